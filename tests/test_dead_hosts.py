"""In: runs with servers or gossip, without a launcher that sees all ranks; ranks and hosts that die. Out: who goes on.
Does not test `codescent train --ranks`, which sees its ranks die (test_parameter_server_faults does)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import host_ranks
import pytest
from forker import Forker
from host_ranks import hosts, started
from runs import called, environment

from codescent.coupling.failure_detector import CLOSED_S
from codescent.record import RunFolder, order

ENV = environment(CODESCENT_TOKEN="a token that no outsider knows")
ASYNCHRONOUS = "parallel.updates=asynchronous"
FP64 = ("train.precision=fp64", "train.global_batch_size=12")
BOUNDS = {"no bound": (), "bound": ("parallel.staleness=1",)}


def lost(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["kind"] == "worker_lost"]


def assert_applied_once(run: RunFolder, steps: int, workers: int, servers: int) -> None:
    for server in range(servers):
        applied = Counter((row.step, row.part) for row in order.read(run.path, server, steps, workers))
        assert applied == Counter((step, part) for step in range(steps) for part in range(workers))


def die(
    project: Path, forker: Forker, name: str, ranks: int, *words: str, rank: int, fault: str = "killed_in_push 2"
) -> tuple[list[int | None], str]:
    """A run of ranks of which none has a launcher that sees the others. `rank` dies in its second push, by kill -9."""
    options = {"words": [*FP64, *words, f"run.name={name}"], "fault": fault, "rank": rank}
    codes, _, said = forker._ask("parameter_server_ranks:run", project, ranks, options)
    return codes, said


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("servers", [1, 2])
def test_the_others_go_on_without_a_worker_that_dies(project: Path, forker: Forker, servers: int, bound: str) -> None:
    name = f"dead-{servers}-{'-'.join(bound.split())}"
    words = (f"parallel.servers={servers}", ASYNCHRONOUS, *BOUNDS[bound])
    codes, said = die(project, forker, name, 3 + servers, *words, rank=1)
    assert codes == [0, -9, 0, *[0] * servers], said
    assert said.count("rank 1 was not connected for 3 s") == said.count("the others go on without it") == 1
    run = RunFolder.open(project / "runs" / name)
    assert [row["step"] for row in run.read_metrics()][-1] == 20
    (death,) = lost(run)
    assert (death["rank"], death["noticed_s"] < 5) == (1, True)
    assert_applied_once(run, 20, 3, servers)
    assert called(project, "prove", "--replay", str(run.path)).returncode == 0


def test_a_worker_that_computes_long_connects_again_meanwhile(project: Path, forker: Forker) -> None:
    """Else its lost connection would be taken for its death: it asks for nothing for longer than CLOSED_S."""
    words, fault = ("parallel.servers=1", ASYNCHRONOUS), f"computing_long 2 {CLOSED_S + 2}"
    codes, said = die(project, forker, "computes-long", 4, *words, rank=1, fault=fault)
    assert codes == [0] * 4, said
    run = RunFolder.open(project / "runs" / "computes-long")
    assert lost(run) == []
    assert_applied_once(run, 20, 3, 1)


ONE_SEGMENT = ("train.eval_every=0", "train.num_steps=3000")
ENDS = {
    "synchronous": ((), 1, "this run needs all its workers"),
    "rounds": ((ASYNCHRONOUS, "parallel.average_every=5"), 1, "this run needs all its workers"),
    "first": ((ASYNCHRONOUS, *ONE_SEGMENT), 0, "only rank 0 writes the run folder"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_death_that_ends_the_run_is_named(project: Path, forker: Forker, case: str) -> None:
    words, rank, why = ENDS[case]
    words = ("parallel.servers=1", "parallel.timeout_s=8", *words)
    codes, said = die(project, forker, f"ends-{case}", 4, *words, rank=rank, fault="killed_in_push 1")
    assert codes[rank] == -9
    assert codes[3] == 1, said
    assert f"error: rank {rank} was not connected for 3 s (on " in said
    assert f"and {why}; `codescent train --resume` goes on from the last checkpoint" in said
    assert 0 not in codes


@pytest.mark.parametrize(("rank", "graph"), [(1, "pairs"), (2, "pairs"), (3, "ring")])
def test_a_death_in_asynchronous_gossip_is_named_by_all_others(
    project: Path, forker: Forker, rank: int, graph: str
) -> None:
    """An active replica and two passive ones. The others hear of it before their own wait is over."""
    gossip = (f"parallel.gossip={graph}", "parallel.gossip_mode=asynchronous", "parallel.timeout_s=60")
    name = f"gossip-{graph}-{rank}"
    codes, said = die(project, forker, name, 4, *gossip, *ONE_SEGMENT, rank=rank, fault="killed_in_portion 5")
    assert codes == [-9 if other == rank else 1 for other in range(4)], said
    assert said.count(f"error: rank {rank} was not connected for 3 s (on ") == 3
    assert said.count("and its weights with it; `codescent train --resume` goes on from the last checkpoint") == 3
    assert "has not answered" not in said


# hosts, whose links are cut

TIMEOUT_S = 20
STEPS, SEGMENT = 300, 150
LONG = (
    f"train.num_steps={STEPS}", f"optimizer.decay_steps={STEPS}", f"train.eval_every={SEGMENT}",
    "parallel.servers=1", f"parallel.timeout_s={TIMEOUT_S}",
)  # fmt: skip
SEGMENT_S = 15.0
"""Least seconds of a segment: for so long the weights of its portions travel over the server's link."""
PORTION_MBIT = 0.7
"""Size of the weights, on their way to the worker of a portion: 10,960 in fp64."""


@pytest.fixture
def made() -> Iterator[hosts.Hosts]:
    """Hosts 0 to 2 for workers, and host 3 for the server. The server's link decides how long a step takes."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    with hosts.Hosts(4) as found:
        found.shape(SEGMENT * 3 * PORTION_MBIT / SEGMENT_S)
        yield found


@contextmanager
def cut(made: hosts.Hosts, host: int) -> Iterator[None]:
    """The link of a host carries nothing meanwhile. Neither side is told: the device of the host stays up."""
    hosts._do("ip", "-n", made._switch, "link", "set", f"port{host}", "nomaster")
    yield
    hosts._do("ip", "-n", made._switch, "link", "set", f"port{host}", "master", "bridge0")


def ended(run: host_ranks.Started, *ranks: int) -> bool:
    return all(run.processes[rank].poll() is not None for rank in ranks)


def has_steps(run: host_ranks.Started, count: int) -> bool:
    metrics = run.run / "metrics.csv"
    return metrics.exists() and metrics.read_bytes().count(b"\n") > count


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_others_go_on_without_a_host_whose_link_is_cut(made: hosts.Hosts, project: Path) -> None:
    """When the link works again, the rank that was taken for dead is refused, and changes nothing."""
    with started(made, 4, project, "cut", ENV, (*FP64, *LONG, ASYNCHRONOUS)) as run:
        host_ranks.until(lambda: has_steps(run, 8))
        with cut(made, 1):
            host_ranks.until(lambda: "was silent" in run.logs[3].read_text())
        host_ranks.until(lambda: ended(run, 0, 1, 2, 3))
        assert [process.returncode for process in run.processes] == [0, 1, 0, 0], run.said()
        said = [log.read_text() for log in run.logs]
    assert "rank 1 was silent for 10 s (on host1, in step" in said[3]
    line, whose = said[1].splitlines()
    assert whose.startswith("codescent: rank 1 of 4 (pid ")
    assert line.startswith("error: server 0 (rank 3) at 10.77.0.4:")
    assert "does not let rank 1 in: the others have gone on without rank 1, which was silent for 10 s" in line
    assert "rank 1 on host1 died in step" in said[0]
    found = RunFolder.open(run.run)
    (death,) = lost(found)
    assert (death["rank"], death["host"]) == (1, "host1")
    assert len([row for row in found.read_metrics() if row["val_loss"] is not None]) == STEPS // SEGMENT
    assert_applied_once(found, STEPS, 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_link_that_works_again_in_time_costs_no_worker(made: hosts.Hosts, project: Path) -> None:
    with started(made, 4, project, "again", ENV, (*FP64, *LONG, ASYNCHRONOUS)) as run:
        host_ranks.until(lambda: has_steps(run, 8))
        with cut(made, 1):
            time.sleep(7.0)  # its connection has ended by then
        found = run.finish()
    assert lost(found) == []
    assert_applied_once(found, STEPS, 3, 1)
    late = [row for row in order.read(found.path, 0, STEPS, 3) if row.step >= SEGMENT]
    assert 1 in {row.worker for row in late}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_is_killed_on_another_host(made: hosts.Hosts, project: Path) -> None:
    with started(made, 4, project, "killed", ENV, (*FP64, *LONG, ASYNCHRONOUS)) as run:
        host_ranks.until(lambda: has_steps(run, 8))
        run.processes[1].kill()
        host_ranks.until(lambda: ended(run, 0, 1, 2, 3))
        assert [process.returncode for process in run.processes] == [0, -9, 0, 0], run.said()
    found = RunFolder.open(run.run)
    (death,) = lost(found)
    assert (death["rank"], death["host"], death["noticed_s"] < 5) == (1, "host1", True)
    assert_applied_once(found, STEPS, 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_synchronous_run_ends_by_its_timeout_and_names_the_rank(made: hosts.Hosts, project: Path) -> None:
    with started(made, 4, project, "synchronous", ENV, (*FP64, *LONG)) as run:
        host_ranks.until(lambda: has_steps(run, 8))
        with cut(made, 1):
            host_ranks.until(lambda: ended(run, 0, 1, 2, 3))
        assert [process.returncode for process in run.processes] == [1, 1, 1, 1], run.said()
        said = [log.read_text() for log in run.logs]
    assert "error: rank 1 was silent for 18 s (on host1, in step" in said[3]
    assert "and this run needs all its workers" in said[3]
    assert "Traceback" not in "".join(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_asynchronous_gossip_names_the_rank_whose_link_is_cut(made: hosts.Hosts, project: Path) -> None:
    gossip = ("parallel.servers=0", "parallel.gossip=pairs", "parallel.gossip_mode=asynchronous")
    with started(made, 4, project, "gossip", ENV, (*FP64, *LONG, *gossip)) as run:
        host_ranks.until(lambda: has_steps(run, 8))
        with cut(made, 1):
            host_ranks.until(lambda: ended(run, 0, 1, 2, 3))
        assert [process.returncode for process in run.processes] == [1, 1, 1, 1], run.said()
        said = [log.read_text() for log in run.logs]
    for rank in (0, 2, 3):
        assert "error: rank 1 was silent for 13.5 s (on host1, in step" in said[rank]
    assert "rank 0 at " in said[1]
    assert "Traceback" not in "".join(said)
