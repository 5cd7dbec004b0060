"""In: small programs as ranks that die, and may be started again. Out: they are, as often as `Roles.losses` says.
Does not train: test_workers_come_again does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from test_launch_local import Launch

SETUP = """
import functools
from codescent.launch.losses import LossCount
from codescent.launch.roles import Roles
losses = functools.partial(LossCount, {restarts}, 3600.0, 0, "parallel.restarts", together_s=0.0)
local.run_ranks = functools.partial(local.run_ranks, roles=Roles({{}}, frozenset({{1, 2}}), "go on", losses))
"""
"""What a process does before it starts ranks: ranks 1 and 2 are workers without which the run goes on."""

TRAINS = """
from codescent.base.progress import ENDED, OwnPage, Pages
pages, late = Pages.of(os.environ), "CODESCENT_LATE" in os.environ
own = OwnPage(pages, rank)
before = [path.name for path in folder.iterdir() if path.name.startswith(f"life-{rank}-")]
life = len(before)
def train():
    page = pages.read(rank)
    found = {"late": late, "died_s": page.died_s, "position": page.position}
    write(f"life-{rank}-{life}", {**found, "port": os.environ["MASTER_PORT"]})
    own.at(4.5)
    own.come_again()
    for _ in range(life + 1):
        own.took(0.0, 1.0)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def end():
    own.at(ENDED)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[int, str], Launch]]:
    started: list[Launch] = []

    def start(restarts: int, program: str) -> Launch:
        started.append(Launch(tmp_path, 3, TRAINS + program, SETUP.format(restarts=restarts)))
        return started[-1]

    yield start
    for one in started:
        one.close()


Start = Callable[[int, str], Launch]


def lives(run: Launch, rank: int) -> list[dict[str, object]]:
    names = sorted(path.name for path in run.folder.iterdir() if path.name.startswith(f"life-{rank}-"))
    return [run.read(name) for name in names]


@pytest.mark.parametrize(("deaths", "restarts"), [(1, 0), (1, 1), (3, 2), (2, 5)])
def test_a_worker_is_started_again_so_often(launch: Start, deaths: int, restarts: int) -> None:
    """Each life but the first is told that it is late, and when its predecessor has died. Others are not started."""
    starts = min(deaths, restarts)
    program = f"""
train()
if rank == 1 and life < {deaths}:
    die()
if rank == 0:
    wait_for("life-1-{starts}")
    if {starts} == {restarts} < {deaths}:  # the last life dies, too
        while not pages.read(1).died_s:
            time.sleep(0.01)
    wait_for("told")
elif rank == 1:
    wait_for("told")
end()
"""
    run = launch(restarts, program)
    run.until(lambda: len(lives(run, 1)) == starts + 1)
    run.let("told")
    code, _, said = run.end()
    assert code == 0, said
    first, *others = lives(run, 1)
    assert (first["late"], first["died_s"]) == (False, 0.0)
    assert [one["late"] for one in others] == [True] * starts
    for one in others:
        assert isinstance(one["died_s"], float)
        assert one["died_s"] > 0
        assert one["position"] == 4.5
        assert one["port"] == first["port"]
    seen = deaths if starts == deaths else starts + 1
    assert said.count("was killed by SIGKILL (9) in step 5: the others go on without it") == seen
    assert said.count(f"is started again ({starts} of {restarts})") == (starts > 0)
    assert [len(lives(run, rank)) for rank in (0, 2)] == [1, 1]


def test_a_worker_that_does_no_step_is_started_twice_at_most(launch: Start) -> None:
    """Fault: a worker that dies in the same step each time is started again as often as parallel.restarts says."""
    program = """
train() if rank != 1 else own.at(4.5)
if rank == 1:
    write(f"life-1-{life}", 1)
    own.come_again()
    die()
if rank == 0:
    wait_for("life-1-1")
    wait_for("told")
end()
"""
    run = launch(9, program)
    run.until(lambda: len(lives(run, 1)) == 2)
    run.let("told")
    code, _, said = run.end()
    assert code == 0, said
    assert "rank 1 is not started again: 2 starts in a row lost ranks before they had done a step; step 5 was" in said
    assert len(lives(run, 1)) == 2


def test_a_process_that_fails_before_it_trains_ends_nothing(launch: Start) -> None:
    """Its log is shown, since the run ends well and logs are deleted."""
    program = """
if late:
    write("failed", os.getpid())
    sys.exit("no memory left")
train()
if rank == 1:
    die()
if rank == 0:
    wait_for("failed")
    while Path("/proc", (folder / "failed").read_text()).exists():  # until the launcher has seen its end
        time.sleep(0.01)
end()
"""
    run = launch(1, program)
    code, _, said = run.end()
    assert code == 0
    assert "no memory left" in said
    assert "ended with exit code 1 before it joined the others" in said
    assert list(run.logs.iterdir()) == []


def test_nobody_waits_for_a_process_that_comes_too_late(launch: Start) -> None:
    program = """
if late:
    ready()
    time.sleep(100)
train()
if rank == 1:
    die()
if rank == 0:
    wait_for("rank-1")
end()
"""
    run = launch(1, program)
    late = run.read("rank-1")["pid"]
    code, _, said = run.end()
    assert code == 0
    assert "rank 1 came too late to join the others, which have ended" in said
    assert not psutil.pid_exists(late)


def test_a_death_of_a_rank_that_the_run_needs_is_one_as_before(launch: Start) -> None:
    """Rank 0 dies while ranks 1 and 2 have not come again: a process that has not joined is no worker that is left."""
    program = """
if late:
    ready()
    time.sleep(100)
train()
if rank == 1:
    die()
if rank == 2:
    wait_for("dead")
    die()
wait_for("rank-1")
write("dead", 1)
while not pages.read(2).died_s:
    time.sleep(0.01)
die()
"""
    run = launch(1, program)
    code, _, said = run.end()
    assert code == 137
    assert "rank 0 of 3 (pid" in said
    assert "no worker is left: the run has ended with exit code 137" in said
    assert said.count("is started again (1 of 1)") == 2


def test_a_stopped_run_starts_nobody_again(launch: Start) -> None:
    program = """
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
train()
ready()
while not got:
    time.sleep(0.01)
if rank == 1:
    die()
wait_for("told")
end()
sys.exit(130)
"""
    run = launch(3, program)
    run.pids()
    os.kill(run.process.pid, 2)
    run.until(lambda: not psutil.pid_exists(run.read("rank-1")["pid"]))
    run.let("told")
    code, _, said = run.end()
    assert code == 130
    assert "started again" not in said
