"""In: small programs as ranks, scripts of faults. Out: the named rank is killed or stopped, or one joins, in its step.
Does not train, except for slow tests of `codescent prove --faults`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from runs import codescent
from test_launch_local import Launch

from codescent.base.call import Call
from codescent.base.progress import OwnPage, Pages, shared_memory
from codescent.launch.fault_script import parse_faults
from codescent.launch.inject import Injection
from codescent.launch.let_in import LetIn
from codescent.launch.local_ranks import LocalRanks

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="pages of other processes are found by /proc"),
]

STEPS = """
from codescent.base.progress import OwnPage, Pages
own = OwnPage(Pages.of(os.environ), rank)
own.begin()
own.at(2.0)
ready()
for step in range(3, 6):
    wait_for(f"step-{step}")
    own.at(step - 0.5, 0, "backward")
wait_for("end")
own.at(float("inf"))
"""
"""A rank that takes the steps 3 to 5, each when it may."""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[], Launch]]:
    started: list[Launch] = []

    def start() -> Launch:
        started.append(Launch(tmp_path, 3, STEPS))
        return started[-1]

    yield start
    for one in started:
        one.close()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_rank_is_killed_when_it_has_begun_its_step(launch: Callable[[], Launch], tmp_path: Path) -> None:
    """Fault: another rank is killed, or a step too early: the run is proved for another loss than was asked for."""
    run = launch()
    pids = run.pids()
    with Injection(parse_faults("kill 1 at 4", 3, 5), LocalRanks(run.process.pid, 3), tmp_path) as injection:
        run.let("step-3")
        time.sleep(0.3)  # a look is each millisecond
        assert psutil.pid_exists(pids[1])
        assert not injection.hits
        run.let("step-4")
        until(lambda: injection.hits)
        code, _, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert f"codescent: rank 1 of 3 (pid {pids[1]} on {socket.gethostname()}) was killed by SIGKILL (9)" in err
    (hit,) = injection.hits
    assert str(hit) == f"kill 1 at 4: rank 1 (pid {pids[1]}) in step 4, in backward"


def test_faults_come_one_after_the_other_and_none_after_the_end(launch: Callable[[], Launch], tmp_path: Path) -> None:
    """Fault: a later fault does not wait for the earlier one, or the thread outlives its run."""
    run = launch()
    pids = run.pids()
    faults = parse_faults("stop 2 at 3; stop 0 at 4; kill 1 at 5", 3, 5)
    with Injection(faults, LocalRanks(run.process.pid, 3), tmp_path) as injection:
        run.let("step-3")
        until(lambda: psutil.Process(pids[2]).status() == psutil.STATUS_STOPPED)
        assert psutil.Process(pids[0]).status() != psutil.STATUS_STOPPED
        run.let("step-4")
        until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED)
    assert [str(hit.fault) for hit in injection.hits] == ["stop 2 at 3", "stop 0 at 4"]
    assert not injection._thread.is_alive()
    for rank in (0, 2):
        os.kill(pids[rank], signal.SIGCONT)
    for name in ("step-5", "end"):
        run.let(name)
    assert run.end()[0] == 0


def test_ranks_that_have_ended_are_not_there(launch: Callable[[], Launch]) -> None:
    """Fault: the fault is counted as made although the run was over, or the search for the rank raises."""
    run = launch()
    run.pids()
    ranks = LocalRanks(run.process.pid, 3)
    assert ranks.pid_of(7, Call()) is None
    for name in ("step-3", "step-4", "step-5", "end"):
        run.let(name)
    run.end()
    assert ranks.pid_of(1, Call()) is None
    assert ranks.pages() is None


SERVED = ("parallel.servers=1", "parallel.updates=asynchronous", "parallel.staleness=0", "parallel.restarts=2")
WORDS = (*SERVED, "parallel.ranks=4", "train.global_batch_size=12")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_that_are_lost_change_no_loss(project: Path) -> None:
    """Fault: `prove --faults` compares a run that lost nobody, or says the same where a loss has changed."""
    script = "kill 1 at 7; stop 2 at 15"
    done = codescent(project, "prove", "run.toml", *WORDS, "--faults", script, "--steps", "40", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (result,) = found["layouts"]
    assert (result["layout"], result["ranks"], result["verdict"]) == (script, 4, "same")
    assert result["differences"]["train_loss"] <= 1e-9
    assert [(one["kind"], one["rank"], one["step"]) for one in found["faults"]] == [("kill", 1, 7), ("stop", 2, 15)]
    assert all(one["made_in_step"] >= one["step"] for one in found["faults"])


def test_ranks_stand_still_until_the_new_one_has_its_place(tmp_path: Path) -> None:
    """Fault: the run goes on while the new process starts, and ends before it; or its ranks stay stopped for ever."""
    descriptor, over = shared_memory(3), threading.Event()
    pages = Pages(descriptor, 3)
    with subprocess.Popen(["sleep", "60"]) as rank, ThreadPoolExecutor() as pool:
        status = psutil.Process(rank.pid).status
        try:
            lets = LetIn(pages, Waiting(0, 2), tmp_path, over)
            joined = pool.submit(lets.at, 5)
            pages.call = Call(1, {rank.pid: 0}, urgent=1)
            OwnPage(pages, 0).at(2.5)
            time.sleep(0.2)
            assert status() != psutil.STATUS_STOPPED, "step 3 is not the one before step 5"
            OwnPage(pages, 0).at(3.1)
            until(lambda: status() == psutil.STATUS_STOPPED and (tmp_path / "77").is_dir())
            OwnPage(pages, 2).beat()
            pages.call = Call(2, {rank.pid: 0, 77: 1}, urgent=1)
            assert joined.result(30) == (77, 1)
            until(lambda: status() != psutil.STATUS_STOPPED)
        finally:
            over.set()
            rank.kill()
            os.close(descriptor)


class Waiting(LocalRanks):
    """One process waits for a place."""

    def waiting(self, call: Call) -> dict[int, int]:
        """The process, and its page."""
        return {77: 2}


SHRINKS = ("parallel.ranks=4", "survive.on_loss=shrink", "survive.max_restarts=9", "checkpoint.every=5")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill 2 at 7; join at 12; kill 0 at 20", ("train.global_batch_size=12",)),
        (
            "kill 3 at 5; kill 2 at 9; kill 1 at 13; join at 17; join at 20; join at 23",
            ("train.global_batch_size=12",),
        ),
        ("kill 1 at 8; join at 13", ("parallel.dp_shard=4",)),
    ],
)
def test_f8_ranks_join_at_their_steps(project: Path, script: str, words: tuple[str, ...]) -> None:
    """Fault: a rank comes back before its `join`, or never; the second one that is lost cannot be started again; a step
    is lost; the proof compares another run."""
    done = codescent(project, "prove", "run.toml", *SHRINKS, *words, "--faults", script, "--steps", "30", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (result,) = found["layouts"]
    assert (result["verdict"], result["ranks"]) == ("same", 4)
    assert result["differences"]["train_loss"] <= 1e-9
    for one in found["faults"]:
        if one["kind"] == "join":
            assert one["rank"] is not None
            assert one["step"] <= one["made_in_step"] <= one["step"] + 2, "the ranks were in the step before"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_lost_has_failed(project: Path) -> None:
    """Fault: the death of the server, which ends the run, is told as the same or as a difference."""
    done = codescent(project, "prove", "run.toml", *WORDS, "--faults", "kill 3 at 7")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "was killed by SIGKILL" in done.stdout
