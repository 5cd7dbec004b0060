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
    expected = runs.run(2, "optimizer.max_grad_norm=0", "parallel.reduce_dtype=auto")
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
