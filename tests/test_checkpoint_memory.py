"""In: what ranks that are left hold in memory. Out: the tensors that a checkpoint would give, on ranks of any layout.
Does not lose a rank in a step, and starts none again: the tests of a regrouped run do."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st
from runs import make_project

from codescent.checkpoint.areas import Area, cover, pieces, whole
from codescent.checkpoint.box import Box, LazyTensor
from codescent.checkpoint.held import HeldTensors
from codescent.checkpoint.manifest import StoredTensor
from codescent.checkpoint.reshard import Has, moves_for
from codescent.coupling.coupling import Coupling
from codescent.coupling.local_steps import LocalSteps
from codescent.coupling.pairs import PairedReplicas
from codescent.coupling.round_worker import RoundWorker
from codescent.coupling.served import OnlyServes
from codescent.record import RunFolder

HALF, STEPS = 4, 5
WORDS = (
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.ffn_dim=45",
    "model.vocab_size=97",
    "data.tokenizer=char",
    "train.global_batch_size=12",
    "train.microbatch_size=1",
    "train.eval_every=0",
    "optimizer.decay_steps=20",
)
PAIRS = [  # before -> after, ranks before, the lost one, ranks after, more words
    ("dp_replicate=4 -> dp_replicate=3", 4, 0, 3, ""),
    ("dp_replicate=2 dp_shard=2 -> dp_shard=3", 4, 1, 3, "train.ema=0.9"),
    ("dp_replicate=2 tp=2 -> dp_replicate=3", 4, 2, 3, ""),
]
SLOW_PAIRS = [
    ("dp_replicate=2 pp=2 -> pp=3", 4, 3, 3, "train.precision=bf16 model.num_layers=5"),
    ("dp_replicate=3 -> dp_replicate=4", 3, -1, 4, "train.precision=bf16"),
    ("dp_replicate=2 -> dp_replicate=2", 2, 0, 2, ""),
    ("dp_replicate=2 dp_shard=2 zero_stage=1 -> dp_replicate=3", 4, 3, 3, "train.precision=bf16"),
    ("dp_replicate=2 dp_shard=2 zero_stage=2 -> dp_shard=4", 4, 2, 4, "optimizer.kind=muon"),
    ("dp_replicate=2 tp=2 -> tp=2 dp_shard=2", 4, 1, 4, ""),
    ("dp_shard=2 tp=2 -> tp=2 pp=2", 4, -1, 4, ""),
    ("dp_replicate=2 cp=2 -> dp_replicate=3", 4, 0, 3, "optimizer.kind=muon"),
]
GONE = [  # also what nobody has any more
    ("dp_shard=4 -> dp_shard=3", 4, 2, 3, "model."),
    ("pp=2 tp=2 -> dp_replicate=3", 4, 1, 3, "model."),
    ("dp_replicate=3 wire=int8 -> dp_replicate=3 wire=int8", 3, 1, 3, "rank1."),
]


def area_in(shape: tuple[int, ...], rng: random.Random) -> Area:
    """An area in a tensor, perhaps without elements."""
    ends = [sorted(rng.randint(0, size) for _ in range(2)) for size in shape]
    return Area(tuple(first for first, _ in ends), tuple(stop - first for first, stop in ends))


def elements(area: Area) -> set[tuple[int, ...]]:
    return set(product(*(range(first, first + size) for first, size in zip(*area, strict=True))))


@given(st.integers(0, 2**32))
def test_parts_cover_each_element_once_and_pieces_are_small(seed: int) -> None:
    """Fault: an element is taken twice, or from nobody, or a part that is missing passes for one that is there."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
    wanted = rng.choice([whole(shape), area_in(shape, rng)])
    areas = tuple(area_in(shape, rng) for _ in range(rng.randint(0, 6)))
    found = cover(wanted, areas)
    there = set().union(*(elements(area) for area in areas))
    assert (found is None) == (not elements(wanted) <= there)
    for index, part in found or ():
        assert elements(part) <= elements(areas[index]) & elements(wanted)
        assert not any(elements(part) & elements(area) for area in areas[:index]), "an earlier one has it"
    if found is not None:
        taken = Counter(element for _, part in found for element in elements(part))
        assert taken == Counter(elements(wanted))
    most = rng.randint(1, 20)
    cut = list(pieces(wanted, most))
    assert all(one.numel <= most for one in cut)
    assert Counter(element for one in cut for element in elements(one)) == Counter(elements(wanted))


def test_ranks_with_copies_share_the_sending_and_nobody_sends_what_is_there() -> None:
    """Fault: one rank sends all while others with copies wait; a rank fetches what it has; the two ends of a message
    expect other kinds of memory."""
    everything = [Has(f"model.{number}", whole((100, number + 1)), "cuda") for number in range(30)]
    half = [Has(row.name, Area((0, 0), (50, row.area.sizes[1])), "cuda") for row in everything]
    on_host = [row._replace(device="cpu") for row in everything]
    moves = moves_for([everything, everything, on_host, half, []], [everything] * 5, lambda _: 4)
    assert {move.target for move in moves} == {3, 4}, "those that have less than all"
    assert all(move.area.offsets[0] == 50 for move in moves if move.target == 3), "the half that it has not"
    sent = Counter[int]()
    for move in moves:
        sent[move.source] += move.area.numel
        assert move.via == ("cpu" if move.source == 2 else "cuda")
    wanted = sum(row.area.numel for row in everything)
    assert sum(sent.values()) == wanted * 3 / 2
    assert all(abs(numel - wanted / 2) < 0.1 * wanted for numel in (sent[0], sent[1], sent[2]))


# Two copies of two halves: of the four ranks before, rank 1 is lost, and a new one is in its place.
RECOVERIES: dict[str, tuple[list[list[int]], int, int, list[str]]] = {
    "newest": ([[8, 0, 2], [], [7, 1, 2], [8, 1, 2]], 1, 8, []),
    "older": ([[8, 0, 2], [], [7, 0, 2], [7, 1, 2]], 0, 7, ["step 8 is not whole in memory"]),
    "copies": ([[6, 0, 1], [6, 0, 1], [6, 0, 1], []], 0, 6, []),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", RECOVERIES)
def test_the_newest_step_that_is_whole_is_loaded_to_the_bit(forker: Forker, tmp_path: Path, name: str) -> None:
    """Fault: parts of two steps are mixed; a dtype, a scalar or a transposed tensor arrives changed; a message is as
    large as a tensor; memory of the old tensors stays."""
    rows, dim, step, reasons = RECOVERIES[name]
    found = forker.call("held_ranks:recovered", tmp_path, 4, rows=rows, dim=dim)
    first = next(number for number, row in enumerate(rows) if row and row[0] == step)
    for number, one in enumerate(found):
        assert one["differ"] == one["refused"] == []
        assert (one["step"], one["loss"], one["left"]) == (step, 0.5, 0)
        assert one["state"] == {"step": step, "of": first}
        assert [reason.partition(":")[0] for reason in one["reasons"]] == (reasons if number == 0 else [])
        assert one["largest"] <= 4096
    assert sum(one["moved"] for one in found) > 100 * 4096


LOST: dict[str, tuple[list[list[int]], list[str], str]] = {
    "a part": ([[8, 0, 2], [], [8, 0, 2]], [], "has all of model.bool and of 8 more"),
    "everything": ([[], [], []], [], "no rank holds its tensors in memory"),
    "the state of one rank": (
        [[8, 0, 1], [8, 0, 1], []],
        ["rank0.wire", "rank1.wire", "rank2.wire"],
        "has all of rank2.wire",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LOST)
def test_what_is_not_whole_is_not_taken(forker: Forker, tmp_path: Path, name: str) -> None:
    """Fault: a run goes on with a part of its weights, or without the error feedback of a lost rank."""
    rows, own, why = LOST[name]
    found = forker.call("held_ranks:recovered", tmp_path, 3, rows=rows, own=own)
    for one in found:
        assert "step" not in one
        assert one["left"] == 0, "memory that nobody needs is free"
    assert why in found[0]["reasons"][0]


@pytest.mark.timeout(60)
def test_what_a_checkpoint_would_refuse_is_refused_on_every_rank(forker: Forker, tmp_path: Path) -> None:
    """Fault: a rank that has come begins with a state of zeros, while the others go on with theirs."""
    rows = [[3, 0, 1], [3, 0, 1], []]
    found = forker.call("held_ranks:recovered", tmp_path, 3, rows=rows, wants="rank{}.wire")
    title = "the memory of the ranks at step 3: of another model or config:"
    problems = [f"rank{rank}.wire: not in the checkpoint" for rank in range(3)]
    assert [one["refused"] for one in found] == [[title, *problems]] * 3


@pytest.mark.timeout(60)
def test_a_second_loss_while_memory_is_loaded(forker: Forker, tmp_path: Path) -> None:
    """Fault: a rank gives its tensors away, and nobody has them when the exchange is interrupted."""
    found = forker.call("held_ranks:interrupted", tmp_path, 4)
    assert found[1] is None
    living = [found[0], found[2], found[3]]
    assert [one["differ"] for one in living] == [[], [], []]
    assert [one["left"] for one in living] == [0, 0, 0]
    assert all(one["lost"] for one in living)
    assert 0 < found[3]["held"] < found[0]["held"], "the new rank was interrupted in the middle"


def test_ranks_that_disagree_on_a_shape_are_named(forker: Forker, tmp_path: Path) -> None:
    """Fault: a tensor is whole by the shape of one rank, and a part of it is missing by that of another."""
    found = forker.call("held_ranks:disagreeing", tmp_path, 2)
    assert {one[0] for one in found} == {"RanksFailed"}
    assert all("model.weight: rank 1 holds it in another shape or dtype" in one[1] for one in found)


def test_tensors_that_no_memory_holds_are_refused(forker: Forker, tmp_path: Path) -> None:
    """Fault: the groups of a lost rank live on with a DTensor; a tensor without values is sent; a part that the other
    ranks do not know is lost in silence."""
    known = {"model.weight": StoredTensor("F32", (4, 2), ())}
    lazy = LazyTensor.of((4, 2), torch.float32, lambda _: torch.zeros(4, 2))
    with pytest.raises(TypeError, match="computed while they are written"):
        HeldTensors(1, {}, {"model.weight": lazy}, known)
    assert "process groups of its mesh" in forker.call("held_ranks:of_a_mesh", tmp_path)[0]
    part = Box(torch.zeros(2, 2), torch.Size((6, 2)), (0, 0))
    for tensors in ({"model.weight": part}, {"model.bias": torch.zeros(4, 2)}):
        with pytest.raises(ValueError, match="among the tensors of all ranks"):
            HeldTensors(1, {}, dict(tensors), known)


def test_ranks_hold_nothing_where_a_lost_one_had_something_of_its_own() -> None:
    """Fault: replicas with weights of their own are asked for their tensors, a collective, after one was lost."""
    kinds, known = [Coupling], list[type[Coupling]]()
    while kinds:
        known.append(kinds.pop())
        kinds += [kind for kind in known[-1].__subclasses__() if kind.__module__.startswith("codescent.")]
    assert {LocalSteps, RoundWorker, OnlyServes, PairedReplicas} < set(known)
    assert [kind for kind in known if not kind.why_unheld] == [Coupling]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_project(folder)
    return folder


def regrouped(forker: Forker, folder: Path, pair: str, before: int, lost: int, after: int, more: str) -> list[Any]:
    """What the ranks after the loss found, in order."""
    name = "".join(letter if letter.isalnum() else "-" for letter in pair)
    words = [*WORDS, f"run.name={name}", *more.split()]
    first, second = ([f"parallel.{key}" for key in layout.split()] for layout in pair.split("->"))
    then = [*words, *second, f"train.num_steps={STEPS}"]
    ranks = max(before, after + (lost >= 0))
    options = {"before": before, "lost": lost, "words": [*words, *first, f"train.num_steps={HALF}"], "then": then}
    found = forker.call("held_ranks:regrouped", folder, ranks, **options)
    return [one for number, one in enumerate(found) if number != lost]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pair", "before", "lost", "after", "more"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)],
)
def test_memory_gives_the_bits_that_a_checkpoint_gives(
    forker: Forker, project: Path, pair: str, before: int, lost: int, after: int, more: str
) -> None:
    """Fault: real trainers of a strategy hold a tensor, a state or an average in another place than a checkpoint has
    it, so a run that loses a rank leaves its trajectory."""
    found = regrouped(forker, project, pair, before, lost, after, more)
    assert len(found) == after
    for one in found:
        assert one["reasons"] == []
        assert one["memory"] == HALF
        assert one["differ"] == []
        assert one["tensors"] > 5
        assert one["left"] == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("source", ["memory", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_loss_while_a_new_trainer_is_filled(forker: Forker, project: Path, source: str) -> None:
    """Fault: the new trainer is taken for the step that it was to load, with its initial values."""
    words = [*WORDS, f"run.name=filled-{source}"]
    options = {
        "words": [*words, "parallel.dp_shard=2", f"train.num_steps={HALF}"],
        "then": [*words, "parallel.tp=2", f"train.num_steps={STEPS}"],
    }
    found = forker.call("held_ranks:interrupted_load", project, 2, source=source, **options)
    for one in found:
        if source == "memory":
            assert (one["held"][0], one["memory"], one["differ"]) == (HALF, HALF, [])
        else:
            assert one["held"] is one["memory"] is None


def test_copies_that_differ_in_memory_are_healed(forker: Forker, project: Path) -> None:
    """Fault: a run that could heal ends after a loss, because nobody asks at the step from which it goes on; or it goes
    on with weights that differ."""
    name = [*WORDS, "run.name=healed", "survive.on_divergence=heal"]
    options = {"words": [*name, f"train.num_steps={HALF}"], "then": [*name, f"train.num_steps={STEPS}"]}
    forker.call("held_ranks:flipped", project, 3, **options)
    (healed,) = [
        event for event in RunFolder.open(project / "runs" / "healed").read_events() if event["kind"] == "healed"
    ]
    assert (healed["step"], healed["differences"][0]["ranks"]) == (HALF, [2])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pair", "before", "lost", "after", "gone"),
    [GONE[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in GONE[1:])],
)
def test_a_shard_that_nobody_has_is_read_from_the_disk(
    forker: Forker, project: Path, pair: str, before: int, lost: int, after: int, gone: str
) -> None:
    """Fault: ranks take what is left of sharded weights, or of the error feedback of each rank, for all of it."""
    found = regrouped(forker, project, pair, before, lost, after, "")
    assert [one["memory"] for one in found] == [None] * after
    assert f"no rank that is left has all of {gone}" in found[0]["reasons"][0]


def test_a_lazy_tensor_is_written_in_pieces_of_its_rows() -> None:
    """Fault: a piece has values of another one, or a row that is longer than a piece is computed at once."""
    whole = torch.arange(42.0).reshape(3, 14)
    lazy = LazyTensor(whole.to("meta"), whole.shape, (0, 0), lambda slices: whole[slices], 5)
    found = torch.full_like(whole, -1.0)
    for area in lazy.chunks:
        assert area.numel <= 5
        Box(found, whole.shape, (0, 0)).values(area).copy_(lazy.values(area))
    assert torch.equal(found, whole)
