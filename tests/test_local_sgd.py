"""In: replicas that train apart, on real ranks. Out: the weights that the formulas give, bitwise resumes, and no
collective of all ranks within a round. Does not count bytes (test_declared) or test formats (test_wire_sums)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from declared_cases import case
from forker import Forker
from runs import assert_same, called, losses
from trajectories import ODD, write_corpora

from codescent.checkpoint.checkpoints import read_tensors
from codescent.record import RunFolder

SGD = ("optimizer.kind=sgd", "optimizer.max_grad_norm=0", "optimizer.learning_rate=0.1", "train.precision=fp64")
EVERY_5 = ("parallel.average_every=5", "train.precision=fp64", "parallel.outer_optimizer=nesterov")
SFT = ("model.num_layers=2", "model.seq_len=24", "data.task=sft", "data.corpus=pairs.jsonl", *ODD)
SFT += ("data.template=Say {prompt}: {response}",)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_round_of_one_step_is_ddp(project: Path, forker: Forker, ranks: int, momentum: float) -> None:
    words = (*SGD, f"optimizer.momentum={momentum}", "train.global_batch_size=12", "optimizer.weight_decay=0.1")
    name = f"{ranks}-{momentum}"
    expected = forker.train(project, f"ddp-{name}", ranks, *words)
    found = forker.train(project, f"each-{name}", ranks, *words, "parallel.average_every=1")
    for row, other in zip(found.read_metrics(), expected.read_metrics(), strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
        assert row["val_loss"] == (None if other["val_loss"] is None else pytest.approx(other["val_loss"], rel=1e-9))
        assert row["consensus"] > 0  # they had trained apart


def test_with_adamw_a_round_of_one_step_is_another_method(project: Path, forker: Forker) -> None:
    words = ("train.precision=fp64",)
    expected = losses(forker.train(project, "adamw-ddp", 2, *words))
    found = losses(forker.train(project, "adamw-each", 2, *words, "parallel.average_every=1"))
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert abs(found[-1] - expected[-1]) > 1e-4


def test_replicas_are_weighted_by_their_tokens(tmp_path: Path, forker: Forker) -> None:
    """Responses differ in length, so the gradient of DDP is no plain mean of the replicas' means."""
    write_corpora(tmp_path)
    words = (*SFT, *SGD, "optimizer.momentum=0", "train.eval_every=0")  # momenta would be weighted in each step anew
    expected = forker.train(tmp_path, "ddp", 2, *words)
    found = forker.train(tmp_path, "each", 2, *words, "parallel.average_every=1")
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9)
    weights, others = (final_weights(run) for run in (found, expected))
    assert all(torch.allclose(weights[name], others[name], rtol=1e-9, atol=1e-12) for name in others)


def test_a_round_without_losses_takes_the_plain_mean(project: Path, forker: Forker) -> None:
    """The replicas have equally many tokens: each counts half with losses and without."""
    words = (*SGD, "parallel.average_every=1", "train.eval_every=0")
    expected = final_weights(forker.train(project, "with-losses", 2, *words))
    found = final_weights(forker.train(project, "without-losses", 2, *words, fault="without_losses"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_outer_sgd_of_rate_1_takes_the_mean(project: Path, forker: Forker) -> None:
    words = ("parallel.average_every=5", "train.precision=fp64")
    outer = ("outer_optimizer=sgd", "outer_learning_rate=1", "outer_momentum=0")
    mean = forker.train(project, "mean", 3, *words, "train.global_batch_size=12")
    found = forker.train(
        project, "outer", 3, *words, "train.global_batch_size=12", *(f"parallel.{word}" for word in outer)
    )
    assert_same(found, mean, 1e-9)


def test_the_synchronous_steps_are_those_of_ddp(project: Path, forker: Forker) -> None:
    words = ("train.precision=fp64",)
    expected = forker.train(project, "opening-ddp", 2, *words)
    found = forker.train(project, "opening", 2, *words, "parallel.average_every=5", "parallel.synchronous_steps=10")
    for column in ("train_loss", "val_loss"):  # norms are added in another order
        rows = [[row[column] for row in run.read_metrics()] for run in (found, expected)]
        assert [*map(repr, rows[0][:10])] == [*map(repr, rows[1][:10])]
    assert losses(found)[:10] == losses(expected)[:10]
    assert losses(found)[10:] != losses(expected)[10:]


LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp": ("parallel.tp=2",),
    "tp without sequence": ("parallel.tp=2", "parallel.sequence_parallel=false"),
    "pp": ("parallel.pp=2", "train.microbatch_size=2"),
    "zero 3": ("parallel.dp_shard=2",),
    "zero 1": ("parallel.dp_shard=2", "parallel.zero_stage=1"),
    "cp": ("parallel.cp=2",),
    "muon, zero 3": ("parallel.dp_shard=2", "optimizer.kind=muon"),
    "muon, tp": ("parallel.tp=2", "optimizer.kind=muon"),
    "lora, tp": ("parallel.tp=2", "lora.rank=3"),
}
SLOW = ("tp without sequence", "zero 1", "cp", "muon, tp", "lora, tp")


@pytest.mark.parametrize("layout", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in LAYOUTS])
def test_a_replica_may_be_any_layout(project: Path, forker: Forker, layout: str) -> None:
    common = [word for word in LAYOUTS[layout] if not word.startswith(("parallel.", "train."))]
    words = (*EVERY_5, *common, "train.check_every=1")
    alone = "-".join(["alone", *common]).replace("=", "-")
    if not (project / "runs" / alone).exists():
        forker.train(project, alone, 2, *words)
    found = forker.train(project, layout, 4, *words, *LAYOUTS[layout], "parallel.dp_replicate=2")
    assert_same_losses(found, RunFolder.open(project / "runs" / alone), 1e-9)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("layout", ["pp", pytest.param("zero 3", marks=pytest.mark.slow)])
def test_a_replica_in_another_precision(
    project: Path, forker: Forker, layout: str, precision: str, tolerance: float
) -> None:
    words = (*EVERY_5, f"train.precision={precision}", "train.check_every=1")
    alone = f"alone-{precision}"
    if not (project / "runs" / alone).exists():
        forker.train(project, alone, 2, *words)
    found = forker.train(project, f"{layout} {precision}", 4, *words, *LAYOUTS[layout], "parallel.dp_replicate=2")
    assert_same_losses(found, RunFolder.open(project / "runs" / alone), tolerance)


@pytest.mark.parametrize("wire", ["int4", "powersgd:2", "topk:0.1"])
@pytest.mark.parametrize("layout", ["tp", "pp"])
@pytest.mark.parametrize("method", ["ddp", "local"])
def test_copies_stay_equal_when_messages_are_rounded(
    project: Path, forker: Forker, method: str, layout: str, wire: str
) -> None:
    """Norms are copies on the ranks of tp, the tied matrix is one on two stages: compared after each step or round."""
    words = (f"parallel.wire={wire}", "parallel.dp_replicate=2", *LAYOUTS[layout], "train.check_every=1")
    words += ("parallel.average_every=5",) if method == "local" else ()
    run = forker.train(project, f"{method} {layout} {wire.replace(':', '-')}", 4, *words)
    assert losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", ["powersgd:16", "topk:1"])
@pytest.mark.parametrize("method", ["ddp", "local"])
def test_a_wire_that_loses_nothing_changes_nothing_in_20_steps(
    project: Path, forker: Forker, method: str, wire: str, ranks: int
) -> None:
    """Powers of full rank send whole matrices. Of two summands the sum is the same to the bit, of three to rounding."""
    words = ("train.precision=fp64", "train.global_batch_size=12", "train.eval_every=0")
    words += EVERY_5 if method == "local" else ()
    name = f"{method}-whole-{ranks}"
    if not (project / "runs" / name).exists():
        forker.train(project, name, ranks, *words)
    expected = RunFolder.open(project / "runs" / name)
    found = forker.train(project, f"{name}-{wire.replace(':', '-')}", ranks, *words, f"parallel.wire={wire}")
    weights, others = (final_weights(run) for run in (found, expected))
    assert weights.keys() == others.keys()
    if ranks == 2:
        assert losses(found) == losses(expected)
        assert all(torch.equal(weights[name], others[name]) for name in others)
    assert_same(found, expected, 1e-9)
    assert all(torch.allclose(weights[name], others[name], rtol=1e-9, atol=1e-9) for name in others)


def assert_same_losses(found: RunFolder, expected: RunFolder, tolerance: float) -> None:
    for column in ("train_loss", "val_loss", "grad_norm", "consensus"):
        rows = [[row[column] for row in run.read_metrics()] for run in (found, expected)]
        for number, other in zip(*rows, strict=True):
            wanted = (
                None if other is None else pytest.approx(other, rel=tolerance * (10 if column != "val_loss" else 1))
            )
            assert number == wanted, column


def final_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    (folder,) = (run.path / "checkpoints").iterdir()
    return {name: value for name, value in read_tensors(folder).items() if name.startswith("model.")}


# The same rounds, computed in one process.

DEPTHS = {"average_every": 6, "fragments": 2, "overlap_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "mean": {"average_every": 3},
    "sgd": {"average_every": 3, "outer_optimizer": "sgd", "outer_learning_rate": 0.5, "outer_momentum": 0.8},
    "nesterov": {"average_every": 3, "outer_optimizer": "nesterov"},
    "opening": {"average_every": 3, "synchronous_steps": 6, "outer_optimizer": "nesterov"},
    "fragments": {"average_every": 4, "fragments": 2},
    "overlap": {"average_every": 3, "overlap_steps": 2},
    "both": {**DEPTHS, "outer_optimizer": "nesterov"},
}
LEAVES = {"mean": [2], "sgd": [2], "nesterov": [2], "opening": [2], "fragments": [1, 3], "overlap": [0], "both": [1, 3]}
"""The steps of a round (from 0) after which the fragments leave, evenly spaced; the last one is back at the end."""


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_those_of_the_formulas(forker: Forker, tmp_path: Path, name: str) -> None:
    keys, ranks, steps = CASES[name], 3, 18
    generator = torch.Generator().manual_seed(3)
    pulls = torch.randn(steps, ranks, generator=generator, dtype=torch.float64).tolist()
    counts = torch.randint(1, 9, (steps, ranks), generator=generator).tolist()
    config = case("fp64", dp_replicate=ranks, model={"num_layers": 4}, **keys)["config"]
    found = forker.call("local_sgd_ranks:averaged", tmp_path, ranks, config=config, pulls=pulls, losses=counts)
    distances = [one.pop("distance") for one in found]
    for one in distances if name == "mean" else ():  # each round alone, whatever the rounds before it had
        assert len(one) == 4 * steps // keys["average_every"]
        for begin in range(0, len(one), 4):
            assert one[begin : begin + 2] == pytest.approx(one[begin + 2 : begin + 4], rel=1e-9)
    for number, parameter in enumerate(found[0]):
        fragment = block_of(parameter, 4) % keys.get("fragments", 1)
        wanted = simulated(number, LEAVES[name][fragment], pulls, counts, keys)
        for rank in range(ranks):
            assert found[rank][parameter] == pytest.approx(wanted[rank], rel=1e-12, abs=1e-12), (parameter, rank)


def block_of(parameter: str, blocks: int) -> int:
    """The block with which a parameter is averaged: the embeddings with the first, the last norm with the last."""
    group, _, rest = parameter.partition(".")
    if group == "blocks":
        return int(rest.split(".")[0])
    return 0 if group in ("tok", "pos") else blocks - 1


def simulated(
    number: int,
    leaves: int,
    pulls: list[list[float]],
    counts: list[list[int]],
    keys: dict[str, Any],
) -> list[list[float]]:
    """By rank, an element of a tensor after each step (Douillard et al. 2023, "DiLoCo", algorithm 1)."""
    ranks, period, opening = len(pulls[0]), keys["average_every"], keys.get("synchronous_steps", 0)
    x = [torch.tensor(float(number), dtype=torch.float64) for _ in range(ranks)]
    anchor, momentum, since, flying = x[0], torch.tensor(0.0, dtype=torch.float64), [0] * ranks, None
    rows: list[list[float]] = [[] for _ in range(ranks)]
    for step, (points, losses_of) in enumerate(zip(pulls, counts, strict=True)):
        moves = [0.1 * (point - one) for point, one in zip(points, x, strict=True)]
        if step < opening:
            moves = [sum(moves) / ranks] * ranks
        x = [one + move for one, move in zip(x, moves, strict=True)]
        if step < opening:
            anchor = x[0]
        else:
            since = [a + b for a, b in zip(since, losses_of, strict=True)]
            if step % period == leaves:
                mean = sum(a * w for a, w in zip(x, since, strict=True)) / sum(since)
                flying, since = (mean, list(x)), [0] * ranks
            if flying is not None and step % period == leaves + keys.get("overlap_steps", 0):
                mean, then = flying
                if kind := keys.get("outer_optimizer"):
                    change, beta = anchor - mean, keys.get("outer_momentum", 0.9)
                    momentum = beta * momentum + change
                    change = change + beta * momentum if kind == "nesterov" else momentum
                    mean = anchor = anchor - keys.get("outer_learning_rate", 0.7) * change
                x = [one + (mean - before) for one, before in zip(x, then, strict=True)]
                flying = None
        for row, one in zip(rows, x, strict=True):
            row.append(float(one))
    return rows


# Runs that end and go on.

LOSSY = ("parallel.outer_optimizer=nesterov", "parallel.average_every=5")
RESUMED: dict[str, tuple[str, ...]] = {
    "mean": ("parallel.average_every=5",),
    "nesterov": LOSSY,
    "fragments": (*LOSSY, "parallel.fragments=2", "parallel.overlap_steps=2"),
    "fragments, int4": (*LOSSY, "parallel.fragments=2", "parallel.overlap_steps=2", "parallel.wire=int4"),
    "powersgd": (*LOSSY, "parallel.wire=powersgd:2"),
    "topk from step 10": ("parallel.average_every=5", "parallel.wire=topk:0.1", "parallel.wire_from=10"),
    "opening": (*LOSSY, "parallel.synchronous_steps=15"),
    "ddp int4": ("parallel.wire=int4",),
    "ddp powersgd": ("parallel.wire=powersgd:2", "parallel.bucket_bytes=20000"),
    "ddp topk": ("parallel.wire=topk:0.05", "parallel.wire_from=12"),
    "three replicas, sign": (*LOSSY, "parallel.wire=sign", "parallel.fragments=2"),
    "ddp, three replicas, int8": ("parallel.wire=int8",),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_bitwise(project: Path, forker: Forker, name: str) -> None:
    ranks = 3 if "three" in name else 2
    words = (*RESUMED[name], "train.global_batch_size=12", "optimizer.decay_steps=20")
    expected = forker.train(project, f"whole {name}", ranks, *words)
    forker.train(project, f"half {name}", ranks, *words, "train.num_steps=10")
    found = forker.train(project, f"half {name}", ranks, *words, resume=True)
    assert losses(found) == losses(expected)
    assert same_files(found, expected)


def test_a_resumed_run_weights_by_all_tokens_since_a_departure(tmp_path: Path, forker: Forker) -> None:
    """Losses counted between the departure of a fragment and the end of a round are in the checkpoint."""
    write_corpora(tmp_path)
    words = (*SFT, *RESUMED["fragments"], "train.eval_every=0", "optimizer.decay_steps=20")
    expected = forker.train(tmp_path, "whole", 2, *words)
    forker.train(tmp_path, "half", 2, *words, "train.num_steps=10")
    found = forker.train(tmp_path, "half", 2, *words, resume=True)
    assert losses(found) == losses(expected)
    assert same_files(found, expected)


def same_files(found: RunFolder, expected: RunFolder) -> bool:
    """Whether the last checkpoints of two runs are equal to the bit."""
    one, other = (read_tensors(max((run.path / "checkpoints").iterdir())) for run in (found, expected))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_request_to_stop_ends_the_round(project: Path, forker: Forker) -> None:
    words = ("parallel.average_every=5", "optimizer.decay_steps=20")
    done = forker.run(project, 2, ["run.name=stopped", *words], fault="asked_to_stop 7")
    assert done.codes == [128 + 15] * 2, done.said
    run = RunFolder.open(project / "runs" / "stopped")
    assert len(run.read_metrics()) == 10
    (stop,) = [event for event in run.read_events() if event["kind"] == "stop"]
    assert stop["step"] == 10
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000010"]
    found = forker.train(project, "stopped", 2, *words, resume=True)
    assert losses(found) == losses(forker.train(project, "undisturbed", 2, *words))


def test_a_skipped_step_of_one_replica_is_known_to_all(project: Path, forker: Forker) -> None:
    """The last rank skips step 3. At the end of the round all know it. The weights are good, and are saved."""
    words = ("run.name=skipped", "parallel.average_every=5", "checkpoint.every=5")
    done = forker.run(project, 2, list(words), fault="infinite_gradient")
    assert done.codes == [0, 0], done.said
    run = RunFolder.open(project / "runs" / "skipped")
    skips = [event for event in run.read_events() if "skip" in event["kind"]]
    assert [(event["kind"], event["step"], event["count"]) for event in skips] == [("skipped_steps", 5, 1)]
    assert not [event for event in run.read_events() if event["kind"] == "not_saved"]
    assert all(bool(value.isfinite().all()) for value in read_tensors(max(run.checkpoints.iterdir())).values())


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.average_every=5",),
        RESUMED["fragments, int4"],
        pytest.param(("parallel.wire=int4",), id="ddp"),
    ],
)
def test_a_plain_tensor_is_the_same_on_all_ranks(project: Path, forker: Forker, words: Sequence[str]) -> None:
    """What differs between ranks has the name of its rank or replica."""
    name = f"named {len(words)}{words[0][:17]}"
    found = forker.call(
        "local_sgd_ranks:saved_names", project, 2, words=[f"run.name={name}", *words, "checkpoint.every=10"]
    )
    for mine, others in zip(*found, strict=True):
        assert {name for name in mine if not name.startswith(("rank0.", "replica0."))} == {
            name for name in others if not name.startswith(("rank1.", "replica1."))
        }
        for tensor in mine.keys() & others.keys():
            assert mine[tensor] == others[tensor], tensor
    kept = read_tensors(max((project / "runs" / name / "checkpoints").iterdir()))
    for tensor, value in kept.items():
        if tensor.startswith("replica0.model."):
            mean = (value + kept[tensor.replace("replica0", "replica1")]) / 2
            assert torch.allclose(mean, kept[tensor.removeprefix("replica0.")], rtol=0, atol=1e-7)
    if "parallel.fragments=2" in words:
        assert any(tensor.startswith("replica0.model.") for tensor in kept)


def test_commands_read_the_mean(project: Path, forker: Forker) -> None:
    run = forker.train(project, "read", 2, *RESUMED["fragments"])
    last = run.read_metrics()[-1]["val_loss"]
    done = called(project, "evaluate", "runs/read")
    assert done.returncode == 0, done.stderr
    found = float(done.stdout.partition("\nloss ")[2].partition(",")[0])
    assert found == pytest.approx(last, rel=5e-3)  # it reads the first token and the last, shorter window, too
    assert called(project, "sample", "runs/read", "--tokens", "4").returncode == 0
    assert called(project, "export", "runs/read", "exported").returncode == 0


def test_all_ranks_meet_at_the_end_of_a_round_alone(project: Path, forker: Forker) -> None:
    words = ["run.name=met", "parallel.average_every=5", "parallel.tp=2", "parallel.synchronous_steps=5"]
    for met in forker.call("local_sgd_ranks:meetings", project, 4, words=[*words, "parallel.dp_replicate=2"]):
        assert set(met) == {0, 1, 2, 3, 4, 9, 14, 19}
        assert met.count(14) == 2  # the sum of scalars, and the meeting after old checkpoints were removed
