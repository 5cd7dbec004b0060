"""In: runs with parameter servers whose workers lose a connection or stand still. Out: runs that go on.
Does not test the service's decisions (test_servers) or broken frames (test_transport_faults)."""

from __future__ import annotations

from pathlib import Path

import pytest
from forker import Forker, Runs
from runs import assert_same

from codescent.record import RunFolder

FP64 = ("train.precision=fp64", "train.global_batch_size=12", "train.eval_every=0")
MODES = {"synchronous": (), "asynchronous": ("parallel.updates=asynchronous",)}


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, FP64, ())


def with_fault(runs: Runs, name: str, ranks: int, fault: str, *words: str, rank: int = 1) -> RunFolder:
    options = {"words": [*FP64, *words, f"run.name={name}"], "fault": fault, "rank": rank}
    codes, _, said = runs.forker._ask("parameter_server_ranks:run", runs.project, ranks, options)
    assert codes == [0] * ranks, said
    return RunFolder.open(runs.project / "runs" / name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("servers", "lost"), [(1, "0"), (2, "0"), (2, "1"), (2, "0 1")])
def test_a_lost_connection_is_made_again(runs: Runs, servers: int, lost: str, mode: str) -> None:
    """No server applies a push that another one refuses."""
    name = f"lost-{servers}-{lost.replace(' ', '')}-{mode}"
    found = with_fault(runs, name, 2 + servers, f"disconnected 7 {lost}", f"parallel.servers={servers}", *MODES[mode])
    if mode == "synchronous":  # the portion is computed again, by whoever comes first
        assert_same(found, runs.of_one(), 1e-9)
    assert [row["step"] for row in found.read_metrics()][-1] == 20


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_may_stand_still(runs: Runs, mode: str) -> None:
    found = with_fault(runs, f"still-{mode}", 4, "stopped 7 3", "parallel.servers=2", *MODES[mode])
    if mode == "synchronous":
        assert_same(found, runs.of_one(), 1e-9)
    assert [row["step"] for row in found.read_metrics()] == list(range(1, 21))
