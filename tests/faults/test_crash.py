"""In: small programs as ranks, of which one dies. Out: their launcher names it at once, and not its neighbour.
Does not train: test_running.py kills ranks of runs, test_memory_kill.py has the kernel kill one."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hanging import RANK, events, until
from test_launch_local import HANDLE, Launch

from codescent.base.page import Page
from codescent.launch.supervisor import Supervisor
from codescent.record import RunFolder

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    RunFolder.create(tmp_path / "run", "", {})
    started: list[Launch] = []

    def start(program: str) -> Launch:
        started.append(Launch(tmp_path, 4, RANK + program))
        return started[-1]

    yield start
    for one in started:
        one.close()


Start = Callable[[str], Launch]


def test_f1_a_killed_rank_is_named_before_the_others_have_ended(launch: Start) -> None:
    """Fault: the name comes after the grace of the other ranks (10 s), or is that of a rank which lost a connection."""
    others = f"{HANDLE}own.at(12.5, 0, 'backward')\nready()\nsave_when_asked()\nwait_for('go')\nsys.exit(1)"
    run = launch(f"if rank == 2:\n    own.at(12.5, 0, 'backward'); ready(); time.sleep(100)\n{others}")
    pids = run.pids()
    os.kill(pids[2], signal.SIGKILL)
    who = f"codescent: rank 2 of 4 (pid {pids[2]} on {socket.gethostname()})"
    until(run, f"{who} was killed by SIGKILL (9) in step 13, in backward: the other ranks are stopped")
    run.let("go")  # only now do the others end
    code, _, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert f"codescent: rank 2 of 4 (pid {pids[2]}) was killed by SIGKILL (9)" in err
    (event,) = events(run, "crash")
    assert (event["rank"], event["process"], event["step"]) == (2, pids[2], 13)
    assert event["ending"].startswith("was killed by SIGKILL (9)")


def test_f1_the_first_error_is_the_cause_whoever_ends_first(launch: Start) -> None:
    """Fault: the rank that failed takes long to end (it closes files), so a neighbour that ended before is blamed."""
    program = """
ready()
wait_for("go")
if rank == 2:
    own.fail(is_consequence=False)
    write("failed", 1)
    time.sleep(0.5)
else:
    wait_for("failed")
    own.fail(is_consequence=True)
print(f"Traceback of rank {rank}", file=sys.stderr)
sys.exit(1)
"""
    run = launch(program)
    pids = run.pids()
    run.let("go")
    code, _, err = run.end()
    assert code == 1
    assert err.startswith("Traceback of rank 2\n")
    assert f"codescent: rank 2 of 4 (pid {pids[2]}) ended with exit code 1" in err


def test_f1_a_rank_that_failed_before_the_first_look_does_not_end_the_watch() -> None:
    """Fault: the launcher ends with a KeyError, as no look has seen this rank move; the others are left alone."""
    done = {0: Page(), 1: Page(failed_s=time.monotonic())}
    pages: Any = SimpleNamespace(read=done.__getitem__)
    looks = Supervisor(pages, 2)
    for position in (1, 2, 2):
        done[0] = Page(position)
        assert looks.look({0: os.getpid(), 1: os.getpid()}) == []
