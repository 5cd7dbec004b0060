"""In: runs with parameter servers, on real ranks. Out: the trajectories of one process, where the algebra is exact; how
such runs stop, continue and skip. Does not test the service (test_servers) or its sockets (test_transport)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from forker import Forker, Runs
from runs import assert_same, called, losses

from codescent.checkpoint.checkpoints import read_tensors
from codescent.record import RunFolder

FP64 = ("train.precision=fp64", "train.global_batch_size=12", "optimizer.max_grad_norm=0.5")
ASYNCHRONOUS = "parallel.updates=asynchronous"
RATES = {"adamw": 0.01, "adam": 0.01, "sgd": 0.5, "adagrad": 0.05, "adadelta": 1.0, "rmsprop": 0.002}
MODES = {"synchronous": (), "staleness 0": (ASYNCHRONOUS, "parallel.staleness=0")}
QUICK = {
    ("adamw", 1, "synchronous"),
    ("adamw", 3, "staleness 0"),
    ("sgd", 3, "synchronous"),
    ("rmsprop", 1, "staleness 0"),
}
EXACT = [(kind, servers, mode) for kind in RATES for servers in (1, 3) for mode in MODES]


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


def of_kind(kind: str) -> tuple[str, ...]:
    return f"optimizer.kind={kind}", f"optimizer.learning_rate={RATES[kind]}"


def served(servers: int | str, *words: str) -> tuple[str, ...]:
    return f"parallel.servers={servers}", *words


def final_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    newest = max((run.path / "checkpoints").iterdir(), key=lambda path: path.name)
    return read_tensors(newest)


@pytest.mark.parametrize(
    ("kind", "servers", "mode"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in EXACT],
)
def test_synchronous_servers_and_no_staleness_are_one_process(runs: Runs, kind: str, servers: int, mode: str) -> None:
    found = runs.run(2 + servers, *of_kind(kind), *served(servers, *MODES[mode]))
    assert_same(found, runs.of_one(*of_kind(kind)), 1e-9)
    assert {row["staleness_max"] for row in found.read_metrics()} == {0}
    clipped = [row["grad_norm"] > 0.5 for row in found.read_metrics()]
    assert any(clipped)


@pytest.mark.parametrize("servers", [1, 2])
def test_one_asynchronous_worker_is_one_process(runs: Runs, servers: int) -> None:
    found = runs.run(1 + servers, *of_kind("adamw"), *served(servers, ASYNCHRONOUS))
    assert_same(found, runs.of_one(*of_kind("adamw")), 1e-9)


def test_one_server_and_a_power_of_two_of_workers_are_ddp_bitwise(runs: Runs) -> None:
    """Two summands: addition commutes. Norms are added in another order."""
    expected = runs.run(2, "optimizer.max_grad_norm=0")
    found = runs.run(3, "optimizer.max_grad_norm=0", *served(1))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_workers_that_serve_are_one_process(runs: Runs, mode: str) -> None:
    found = runs.run(3, *of_kind("adamw"), *served("workers", *MODES[mode]))
    assert_same(found, runs.of_one(*of_kind("adamw")), 1e-9)


def test_asynchronous_workers_that_serve_train(runs: Runs) -> None:
    found = runs.run(3, *of_kind("adamw"), *served("workers", ASYNCHRONOUS))
    rows = found.read_metrics()
    assert sum(row["train_loss"] for row in rows[-5:]) < sum(row["train_loss"] for row in rows[:5])


@pytest.mark.parametrize("mode", MODES)
def test_bf16_weights_travel_and_masters_stay(runs: Runs, mode: str) -> None:
    """As DDP in bf16; sums are fp32 here, and DDP's are bf16."""
    words = ("train.precision=bf16", *of_kind("adamw"))
    expected, found = runs.run(2, *words), runs.run(4, *words, *served(2, *MODES[mode]))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-2)
    masters = final_weights(found)
    assert {name for name in masters if name.startswith("model.")} == {
        name for name in final_weights(expected) if name.startswith("model.")
    }
    assert all(value.dtype == torch.float32 for name, value in masters.items() if name.startswith("model."))


WIRES = ("bf16", "int8", "int4", "sign", "topk:0.1")


@pytest.mark.parametrize("wire", WIRES)
def test_narrow_pushes_train_and_continue_bitwise(runs: Runs, wire: str) -> None:
    """With one server and two workers the sums do not depend on the order. Residuals are in the checkpoint."""
    words = (*of_kind("adamw"), "train.precision=fp32", *served(1), f"parallel.wire={wire}", "checkpoint.every=10")
    whole = runs.run(3, *words)
    assert losses(whole)[-1] < losses(whole)[0]
    expected = final_weights(whole)
    assert [name for name in expected if name.endswith("residual")]
    runs.run(3, *words, "train.num_steps=10", "optimizer.decay_steps=20")
    found = runs.run(3, *words, "optimizer.decay_steps=20", resume=True)
    assert losses(found) == losses(whole)
    assert final_weights(found).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(found).items())


CHANGES = (served(1), served(3), (), served("workers"), served(1, ASYNCHRONOUS, "parallel.staleness=0"), ())


def test_a_run_continues_on_other_servers_and_without(runs: Runs) -> None:
    words = (*of_kind("adamw"), "optimizer.decay_steps=20", "train.eval_every=0")
    found = None
    for number, layout in enumerate(CHANGES, 1):
        steps = 20 * number // len(CHANGES)
        servers = [int(word[-1]) for word in layout if word[-1].isdecimal() and "servers" in word]
        ranks = 2 + sum(servers)
        found = runs.run(ranks, *words, *layout, f"train.num_steps={steps}", "parallel.ranks=auto", resume=number > 1)
    assert found is not None
    assert_same(found, runs.of_one(*words), 1e-9)
