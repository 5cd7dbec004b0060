"""In: asynchronous runs whose workers die by kill -9, with parallel.restarts. Out: they come again, and train on.
Does not test runs without restarts (test_parameter_server_faults and test_late_workers do)."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from forker import Forker, Runs
from runs import assert_same, called, start
from test_late_workers import pages_of
from test_parameter_server_faults import rank_of
from test_train_resume import wait_for_step

from codescent.config.load import load
from codescent.record import RunFolder, order

ASYNCHRONOUS = ("parallel.servers=1", "parallel.updates=asynchronous")
FP64 = ("train.precision=fp64", "train.global_batch_size=12", "checkpoint.every=20", "train.eval_every=20")
STEPS = 60
LONG = (f"train.num_steps={STEPS}", f"optimizer.decay_steps={STEPS}")
LIMIT_S = 60


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, (*FP64, *LONG), ())


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """What the condition gives, as soon as it gives something. What it asks may end meanwhile."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(psutil.Error, OSError):
            if found := condition():
                return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError("never happened")


def again(process: subprocess.Popen[str], rank: int, dead: int) -> psutil.Process:
    """The process of a rank that was started after process `dead`."""

    def look() -> psutil.Process | None:
        found = rank_of(process, rank)
        return found if found.pid != dead else None

    def asked() -> psutil.Process | None:
        try:
            return look()
        except ValueError:  # no process of this rank has an environment yet
            return None

    found: psutil.Process = until(asked, process)
    return found


class Run:
    """A run with asynchronous servers, whose ranks are killed."""

    def __init__(self, project: Path, name: str, ranks: int, *words: str) -> None:
        self.ranks, self.folder = ranks, project / "runs" / name
        said = (*ASYNCHRONOUS, *FP64, *LONG, *words)
        self.process = start(project, "train", "run.toml", f"run.name={name}", *said, "--ranks", str(ranks))

    def reaches(self, step: int) -> None:
        wait_for_step(self.process, self.folder, step)

    def kill(self, rank: int) -> int:
        """Kill a rank. Returns its process id."""
        found = rank_of(self.process, rank)
        found.send_signal(signal.SIGKILL)
        return found.pid

    def waits(self, found: psutil.Process, rank: int) -> None:
        """Wait until the new process of a rank asks to be let in, or is in."""
        until(lambda: not pages_of(found, self.ranks).read(rank).died_s, self.process)

    @contextlib.contextmanager
    def held_up(self, rank: int) -> Any:
        """The rank stands still meanwhile. With a bound on the staleness the others soon wait for it."""
        found = rank_of(self.process, rank)
        found.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            found.send_signal(signal.SIGCONT)

    def killed_and_again(self, rank: int, held: int) -> psutil.Process:
        """Kill a rank, and wait for the next one, while the rank `held` stands still."""
        with self.held_up(held):
            found = again(self.process, rank, self.kill(rank))
            self.waits(found, rank)
        return found

    def ended(self) -> tuple[str, str]:
        """What it says, on both streams. It must end well, every sample is used once, and each push has its number."""
        summary, said = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, said
        run = RunFolder.open(self.folder)
        assert [row["step"] for row in run.read_metrics()] == list(range(1, STEPS + 1))
        workers = self.ranks - len(list((self.folder / "order").iterdir()))
        of_servers = [order.read(self.folder, server, STEPS, workers) for server in range(self.ranks - workers)]
        for rows in of_servers:
            assert Counter((row.step, row.part) for row in rows) == Counter(
                (step, part) for step in range(STEPS) for part in range(workers)
            )
            numbers = [[row.number for row in rows if row.worker == worker] for worker in range(workers)]
            assert all(each == sorted(set(each)) for each in numbers)
            assert [(row.worker, row.number) for row in rows] == [(row.worker, row.number) for row in of_servers[0]]
        return summary, said

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in RunFolder.open(self.folder).read_events() if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("servers", [1, 2])
def test_with_staleness_0_the_losses_are_those_of_one_process(runs: Runs, servers: int) -> None:
    """A worker dies and comes again, in the same segment and in another one. Nothing is applied twice or lost."""
    words = ("parallel.staleness=0", f"parallel.servers={servers}", "parallel.restarts=2")
    run = Run(runs.project, f"exact-{servers}", 3 + servers, *words)
    run.reaches(3)
    run.killed_and_again(1, held=2)
    run.reaches(23)
    run.killed_and_again(1, held=2)
    summary, said = run.ended()
    assert_same(RunFolder.open(run.folder), runs.of_one(), 1e-9)
    assert said.count(" (a worker, pid ") == 2
    assert said.count("rank 1 is started again (1 of 2)") == said.count("rank 1 is started again (2 of 2)") == 1
    lost, joined = run.events("worker_lost"), run.events("worker_joined")
    assert [event["rank"] for event in (*lost, *joined)] == [1] * 4
    for death, one in zip(lost, joined, strict=True):
        assert death["step"] <= one["step"] <= death["step"] + 19
        assert one["absent_s"] >= death["noticed_s"]
        assert f"rank 1 on {one['host']} was started again and trained from step {one['step']} on" in summary
    rows = [row for row in RunFolder.open(run.folder).iter_ranks() if row["step"] == STEPS]
    assert [row["rank"] for row in rows] == list(range(3 + servers))
    assert called(runs.project, "prove", "--replay", str(run.folder)).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_death_too_many_is_one_without_restart(project: Path) -> None:
    """Rank 1 dies before it has joined, then after it has joined. The third process is not started."""
    run = Run(project, "thrice", 4, "parallel.staleness=1", "parallel.restarts=2")
    run.reaches(3)
    with run.held_up(2):
        found = again(run.process, 1, run.kill(1))
        found.send_signal(signal.SIGKILL)
        found = again(run.process, 1, found.pid)
        run.waits(found, 1)
    run.reaches(24)
    found.send_signal(signal.SIGKILL)
    _, said = run.ended()
    assert f"(a worker, pid {found.pid}) was killed by SIGKILL (9) in step" in said
    assert said.count("was killed by SIGKILL (9) before it joined the others") == 1
    assert said.count("is started again") == 2
    assert [len(run.events(kind)) for kind in ("worker_lost", "worker_joined")] == [2, 1]
    rows = [row for row in RunFolder.open(run.folder).iter_ranks() if row["step"] == STEPS]
    assert [row["rank"] for row in rows] == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_come_again(project: Path) -> None:
    run = Run(project, "two", 4, "parallel.staleness=1", "parallel.restarts=1", "train.stop_after=50")
    run.reaches(3)
    with run.held_up(2):
        one = again(run.process, 1, run.kill(1))
        run.waits(one, 1)
    run.reaches(23)
    with run.held_up(1):
        two = again(run.process, 2, run.kill(2))
        run.waits(two, 2)
    run.ended()
    assert [event["rank"] for event in run.events("worker_joined")] == [1, 2]
    resumed = called(project, "train", "--resume", str(run.folder), f"train.num_steps={STEPS + 20}")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_comes_too_late(project: Path) -> None:
    """The others do not wait for a process that has not joined when they end."""
    run = Run(project, "too-late", 4, "parallel.staleness=1", "parallel.restarts=1")
    run.reaches(3)
    with run.held_up(2):  # else they may validate by now, where no worker may die
        found = again(run.process, 1, run.kill(1))
        found.send_signal(signal.SIGSTOP)
    _, said = run.ended()
    assert said.count("rank 1 came too late to join the others, which have ended") == 1
    assert not run.events("worker_joined")
    assert not psutil.pid_exists(found.pid)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_stopped_while_a_worker_is_started_again(project: Path) -> None:
    run = Run(project, "stopped", 4, "parallel.staleness=1", "parallel.restarts=1")
    run.reaches(3)
    with run.held_up(2):
        again(run.process, 1, run.kill(1))
        run.process.send_signal(signal.SIGINT)
    _, said = run.process.communicate(timeout=60)
    assert run.process.returncode == 130, said
    assert [event["kind"] for event in RunFolder.open(run.folder).read_events()][-1] == "stop"
    done = called(project, "train", "--resume", str(run.folder))
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(run.folder).read_metrics()[-1]["step"] == STEPS


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("parallel.servers=0",), "parallel.servers = 0: must be a number of ranks that only serve, such as 1"),
        (("parallel.servers=workers",), 'parallel.servers = "workers": must be a number of ranks that only serve'),
        (("parallel.updates=synchronous",), 'set it to "asynchronous", with parallel.staleness = 0 for equal losses'),
        (("parallel.average_every=4",), "parallel.average_every = 4: an optimizer dies with its worker; set it to 0"),
        (("parallel.wire=int8",), 'parallel.wire = "int8": a residual dies with its worker; set it to "none"'),
    ],
)
def test_restarts_are_refused_where_a_death_ends_the_run(project: Path, words: tuple[str, ...], nearest: str) -> None:
    load(project / "run.toml", (*ASYNCHRONOUS, "parallel.restarts=1"))
    done = called(project, "plan", "run.toml", *ASYNCHRONOUS, "parallel.restarts=1", *words, "--ranks", "4")
    assert done.returncode == 2
    assert "parallel.restarts: given 1, but the death of a worker ends a run" in done.stderr
    assert nearest in done.stderr
    assert "or set parallel.restarts to 0" in done.stderr


def test_another_launcher_starts_no_rank_again(project: Path, forker: Forker) -> None:
    done = forker.run(project, 3, [*ASYNCHRONOUS, "parallel.restarts=1", "run.name=by-another"])
    assert done.codes == [2, 2, 2]
    assert "parallel.restarts = 1: only `codescent train --ranks` starts ranks of its machine again" in done.said
    assert not (project / "runs" / "by-another").exists()
