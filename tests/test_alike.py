"""In: runs in which one bit of a rank's copy is another. Out: rank and tensor named, nothing saved, exit code 1.
Does not test the hash (test_tensor_hash does), nor that sound copies are equal in all layouts (test_hybrids does)."""

from __future__ import annotations

import io
import os
import socket
from contextlib import redirect_stderr
from typing import Any

import layout_ranks
import pytest
from forker import Forker, Runs
from rank_server import Place
from runs import losses, make_project

from codescent.launch.environment import STORE_FD
from codescent.verbs import cli

SIZES = (
    "model.hidden_dim=20",
    "model.vocab_size=97",
    "data.tokenizer=char",
    "train.global_batch_size=12",
    "train.num_steps=6",
    "train.eval_every=0",
    "checkpoint.every=2",
)
LORA = ("lora.rank=2",)

CASES: list[tuple[str, int, tuple[str, ...], str, list[int], list[int]]] = [
    # layout, ranks, words, the tensor whose bit is flipped on the last rank, the ranks named, those in the majority
    ("", 3, (), "model.blocks.0.mlp.up.weight", [2], [0, 1]),
    ("", 2, (), "optimizer.exp_avg.tok.weight", [0, 1], []),
    ("", 2, ("train.precision=bf16",), "read.blocks.0.norm_1.weight", [0, 1], []),
    ("", 2, LORA, "read.blocks.1.mlp.down.weight", [0, 1], []),
    ("tp=2", 2, (), "model.norm.weight", [0, 1], []),
    ("tp=2 sequence_parallel=false", 2, (), "optimizer.exp_avg_sq.pos.weight", [0, 1], []),
    ("cp=2", 2, (), "model.tok.weight", [0, 1], []),
    ("pp=2", 2, (), "model.tok.weight", [0, 1], []),
    ("pp=2", 4, (), "model.tok.weight", [3], [0, 1, 2]),
    ("dp_shard=2", 2, (), "optimizer.step.norm.bias", [0, 1], []),
    ("dp_shard=2 dp_replicate=3 zero_stage=1", 6, ("train.precision=bf16",), "model.tok.weight", [5], [1, 3]),
    ("dp_shard=2 tp=2", 4, (), "model.norm.weight", [2, 3], []),
    ("dp_shard=2 zero_stage=2", 2, LORA, "read.tok.weight", [0, 1], []),
]
SLOW: list[tuple[str, int, tuple[str, ...], str, list[int], list[int]]] = [
    ("", 2, ("train.precision=bf16",), "model.pos.weight", [0, 1], []),
    ("tp=2", 2, (), "optimizer.step.tok.weight", [0, 1], []),
    ("pp=2", 4, (), "optimizer.exp_avg.norm.bias", [2, 3], []),
    ("dp_shard=2 dp_replicate=2", 4, (), "optimizer.exp_avg.tok.weight", [1, 3], []),
    ("dp_shard=2 cp=2", 4, LORA, "read.tok.weight", [2, 3], []),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("alike")
    make_project(project)
    return Runs(project, forker, SIZES, ())


def event_of(runs: Runs) -> dict[str, Any]:
    """The last event of the last run, which is that it has diverged."""
    event = runs.last().read_events()[-1]
    assert event["kind"] == "diverged"
    return event


def saved(runs: Runs) -> list[str]:
    return sorted(path.name for path in (runs.last().path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("layout", "ranks", "words", "tensor", "odd", "majority"),
    [
        pytest.param(*case, id=f"{case[0] or 'copies'} {case[3]}", marks=[pytest.mark.slow] if case in SLOW else [])
        for case in [*CASES, *SLOW]
    ],
)
def test_a_flipped_bit_is_named_and_nothing_is_saved(
    runs: Runs, layout: str, ranks: int, words: tuple[str, ...], tensor: str, odd: list[int], majority: list[int]
) -> None:
    keys = [f"parallel.{key}" for key in layout.split()]
    done = runs.start(ranks, *keys, *words, "train.microbatch_size=1", "train.check_every=3", fault=f"flip {tensor}")
    assert done.codes == [1] * ranks, done.said
    assert "Traceback" not in done.said
    assert done.said.count("step 3: copies of the same tensors have diverged, and nothing is saved") == ranks
    event = event_of(runs)
    (difference,) = event["differences"]
    assert event["step"] == 3
    assert (difference["ranks"], difference["majority"]) == (odd, majority)
    assert difference["hosts"] == [socket.gethostname()] * len(odd)
    (named,) = difference["tensors"]
    assert named.partition(" ")[0] == tensor.replace("read.", "model.")
    who = ", ".join(f"rank {rank} ({socket.gethostname()})" for rank in odd)
    certain = f"{who}: values differ from those of the majority (ranks {', '.join(map(str, majority))}): {named}"
    uncertain = f"{who}: values differ, and no majority of ranks shows which are right: {named}"
    assert done.said.count(certain if majority else uncertain) == ranks
    assert saved(runs) == ["step_00000002"]


def test_copies_over_tp_stay_alike_where_it_divides_a_matrix_unequally(runs: Runs) -> None:
    """Its ranks have 129 and 128 rows of the vocabulary, and send these gradients together with those of copies.

    So the messages have different lengths, and sums over four ranks other last bits: with these sizes, at step 1.
    """
    sizes = ("model.num_layers=4", "model.num_heads=4", "model.hidden_dim=16", "model.vocab_size=257")
    words = (*sizes, "train.global_batch_size=8", "train.check_every=1", "checkpoint.every=0")
    layout = ("parallel.tp=2", "parallel.sequence_parallel=false")
    run = runs.run(8, *layout, *words)
    assert losses(run) == pytest.approx(losses(runs.run(1, *words)), rel=1e-5)
    (copied,) = [record for record in run.plan["traffic"] if record["collective"] == "broadcast"]
    assert copied["what"].startswith("gradients of ")


def test_before_every_save_and_the_run_goes_on_from_the_last(runs: Runs) -> None:
    expected = runs.run(2)
    done = runs.start(2, "train.check_every=0", fault="flip model.tok.weight")
    assert done.codes == [1, 1], done.said
    assert event_of(runs)["step"] == 4
    assert saved(runs) == ["step_00000002"]
    assert losses(runs.run(2, "train.check_every=0", resume=True)) == losses(expected)


def test_before_the_first_step(runs: Runs) -> None:
    """As where a machine has another folder of initial weights under the same name."""
    done = runs.start(3, fault="flip_at_start model.pos.weight")
    assert done.codes == [1, 1, 1], done.said
    event = event_of(runs)
    assert (event["step"], event["differences"][0]["ranks"]) == (0, [2])
    assert not runs.last().read_metrics()


def test_weights_of_one_rank_that_are_not_finite(runs: Runs) -> None:
    """Every rank's sum of the gradients is not finite then, and a lower learning rate would mend nothing."""
    done = runs.start(3, fault="not_finite model.tok.weight")
    assert done.codes == [1, 1, 1], done.said
    event = event_of(runs)
    assert (event["step"], event["differences"][0]["ranks"]) == (3, [2])
    assert saved(runs) == ["step_00000002"]


HEALS = ("survive.on_divergence=heal", "train.check_every=1")


@pytest.mark.parametrize(
    ("layout", "ranks", "words", "tensors"),
    [
        ("", 3, (), "model.blocks.0.mlp.up.weight optimizer.exp_avg.norm.bias"),
        ("", 3, ("train.precision=bf16",), "read.blocks.0.norm_1.weight model.tok.weight"),
        ("dp_shard=2 dp_replicate=3 zero_stage=1", 6, (), "model.tok.weight"),
        ("tp=2 dp_replicate=2", 4, (), "model.norm.weight"),
    ],
)
def test_the_majority_heals_the_odd_rank_before_the_next_update(
    runs: Runs, layout: str, ranks: int, words: tuple[str, ...], tensors: str
) -> None:
    """Fault: a rank goes on with other values than the majority, or the wrong rank is taken for the right one."""
    keys = [f"parallel.{key}" for key in layout.split()]
    words = (*keys, *words, "train.microbatch_size=1", *HEALS)
    sound = runs.run(ranks, *words)
    run = runs.run(ranks, *words, fault=f"flip {tensors}")
    (event,) = [event for event in run.read_events() if event["kind"] == "healed"]
    assert event["step"] == 3
    assert {rank for one in event["differences"] for rank in one["ranks"]} == {ranks - 1}
    assert {device for one in event["differences"] for device in one["devices"]} == {"cpu"}
    assert losses(run) == losses(sound)
    assert saved(runs)[-1] == "step_00000006"


@pytest.mark.parametrize("ranks", [2])
def test_two_copies_have_no_majority_and_the_run_stops(runs: Runs, ranks: int) -> None:
    """Fault: of two copies one is taken for the right one."""
    done = runs.start(ranks, *HEALS, fault="flip model.tok.weight")
    assert done.codes == [1] * ranks, done.said
    assert done.said.count("two copies have no majority: with three the odd one is known") == ranks
    assert "most tensors have 2 copies (parallel.dp_replicate x cp), and a majority needs three" in done.said
    assert event_of(runs)["step"] == 3
    assert saved(runs) == ["step_00000002"]


def test_before_the_first_step_no_majority_heals(runs: Runs) -> None:
    """Fault: a rank that has read other initial weights is overruled, and nobody looks at its folder."""
    done = runs.start(3, *HEALS, fault="flip_at_start model.pos.weight")
    assert done.codes == [1, 1, 1], done.said
    assert event_of(runs)["step"] == 0


def test_several_tensors_of_several_parts(runs: Runs) -> None:
    """A weight that tp divides and one that it does not are of different parts, held by different ranks."""
    done = runs.start(4, "parallel.tp=2", "parallel.dp_replicate=2", fault="flip model.tok.weight model.norm.bias")
    assert done.codes == [1] * 4, done.said
    found = {tuple(one["tensors"]): one["ranks"] for one in event_of(runs)["differences"]}
    # A flipped weight is another one from then on; the sum of the gradients is still the same for all.
    assert found == {("model.tok.weight",): [1, 3], ("model.norm.bias",): [3]}


def test_the_command_line_says_why_on_every_rank(runs: Runs) -> None:
    words = ["train", "run.toml", "run.name=by-hand", *SIZES]
    for code, said in runs.forker.call(f"{__name__}:flipped_command_line", runs.project, 2, words=words):
        assert code == 1, said
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert lines[0].startswith(f"error: runs{os.sep}by-hand: step 4: copies of the same tensors have diverged")
        assert "model.tok.weight" in lines[1]
        assert "Traceback" not in said


def flipped_command_line(place: Place, words: list[str]) -> tuple[int, str]:
    """`codescent WORDS` as this rank of a launcher; the last one has a flipped bit. Its exit code and what it said."""
    port, store = place.listener.getsockname()[1], os.dup(place.listener.fileno())
    place.listener.close()
    size, rank = str(place.ranks), str(place.rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank} | ({} if place.rank else {STORE_FD: str(store)})
    if place.rank == place.ranks - 1:
        layout_ranks.FAULTS["flip"]("model.tok.weight")
    err = io.StringIO()
    with redirect_stderr(err):
        code = cli.run(words)
    return code, err.getvalue()


def test_of_one_rank_there_is_nothing_to_compare(runs: Runs) -> None:
    assert len(losses(runs.run(1, "train.check_every=1", fault="flip model.tok.weight"))) == 6
