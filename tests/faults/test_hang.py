"""In: small programs as ranks, which stand still in many ways. Out: the verdict of their launcher on each.
Does not train: tests/faults/test_hang_runs.py does. The processes, their states and their stacks are real."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hanging import RANK, SETUP, events, until
from test_launch_local import Launch

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc"),
]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    RunFolder.create(tmp_path / "run", "", {"traffic": [PLANNED]})
    started: list[Launch] = []

    def start(program: str, ranks: int = 2, setup: str = "") -> Launch:
        started.append(Launch(tmp_path, ranks, RANK + program, SETUP + setup))
        return started[-1]

    yield start
    for one in started:
        one.close()


Start = Callable[..., Launch]
PLANNED = {"collective": "all_reduce", "axis": "dp_replicate", "what": "gradients of all layers", "payload_bytes": 9}


CASES = {
    "alone": (
        "meet() if rank == 0 else None\nready()\nstand() if rank == 0 else evaluates_alone()",
        "rank 1 does something that the others do not, and has not come to their collective",
        "evaluates_alone",
    ),
    "first_alone": (
        "meet() if rank else None\nready()\nstand() if rank else evaluates_alone()",
        "rank 0 alone does something, and the others wait for it",
        "evaluates_alone",
    ),
    "spins": ("meet() if rank == 0 else None\nstand() if rank == 0 else spins()", "rank 1 does something", "spins"),
    "order": (
        "meet(b'all_reduce' if rank else b'all_gather')\nstand()",
        "the ranks wait for each other in different collectives",
        "wait_for",
    ),
    "shapes": (
        "meet(size=4096 + 64 * rank)\nstand()",
        "the tensors of one collective have other sizes on ranks 0, 1",
        "wait_for",
    ),
    "reader": (
        "meet() if rank == 0 else own.enter('reading')\nstand()",
        "rank 1 waits for samples: the reader stands still",
        "wait_for",
    ),
    "stopped": (
        "ready()\nmeet() if rank == 0 else os.kill(os.getpid(), signal.SIGSTOP)\nstand()",
        "rank 1 is stopped by a signal",
        "",
    ),
    "gil": (
        "def holds_the_gil():\n    ctypes.PyDLL(None).sleep(100)\n"
        "ready()\nmeet() if rank == 0 else holds_the_gil()\nstand()",
        "rank 1 has not given up the GIL: a call into C holds it",
        "holds_the_gil",
    ),
    "network": (
        "meet()\nready()\nin_torch()",
        "all ranks are in the same collective, and it does not end: the network, or the device",
        "in_torch",
    ),
    "disk": (  # the parent of a vfork waits as a process waits for a disk: in the kernel, and SIGURG does not reach it
        "ready()\nif rank == 0:\n    meet()\n    stand()\nelif ctypes.PyDLL(None).vfork() == 0:\n    time.sleep(100)",
        "rank 1 is in the kernel, in a wait for a disk or a network file system",
        "",
    ),
}
"""Program, likely cause, function that the stack of the rank has. An id is that of FAULT_TESTS or of the cause."""


@pytest.mark.parametrize("name", CASES)
def test_a_hang_is_judged(launch: Start, name: str) -> None:
    """Fault: a hang is blamed on a rank that waits, on a wrong cause, or without the line where it stands."""
    program, cause, function = CASES[name]
    run = launch(program)
    pids = run.pids()
    text = until(run, "codescent:   all stacks: ")
    (event,) = events(run, "hang")
    assert f"likely cause: {cause}" in text
    culprits = (
        [] if name == "network" else [0, 1] if name in ("order", "shapes") else [0] if name == "first_alone" else [1]
    )
    assert event["ranks"] == culprits
    assert event["cause"] == ("alone" if name == "spins" else name)
    first = (culprits or [0])[0]
    at = text.partition(f"rank {first} (pid {pids[first]}) ")[2]
    assert f" in {function}\n" in at if function else at.startswith("says nothing of its stack")
    rows = {int(row[1]): row[0] for row in re.finditer(r"^codescent:   (\d+) of 2  .*$", text, re.MULTILINE)}
    assert str(pids[1]) in rows[1]
    assert "  4  " in rows[0], "the step"
    if culprits == [1]:
        assert rows[1].endswith("before all_reduce 2 over dp_replicate (4,096 bytes: gradients of all layers)")
    whole = (run.folder / "run" / "hang.txt").read_text()
    assert "rank 0, all threads:" in whole
    assert whole.count(" in beside\n") == (1 if name in ("stopped", "disk") else 2), "other threads, too"
    run.close()


def test_ranks_that_work_for_long_do_not_hang(launch: Start) -> None:
    """Fault: a validation of an own loop that nobody has named, or any long step, is taken for a hang."""
    run = launch("ready()\ntime.sleep(2.5)\nown.at(float('inf'))")
    assert run.end() == (0, "", "")
    assert events(run, "hang", "hang_over") == []


def test_a_verdict_is_given_once_and_withdrawn(launch: Start) -> None:
    """Fault: the page is printed at every look; or nobody hears that the ranks go on."""
    run = launch(PAUSES)
    run.pids()
    until(run, "codescent:   all stacks: ")
    time.sleep(1.0)
    run.let("go")
    code, _, err = run.end()
    assert (code, re.fullmatch(r"codescent: the ranks go on after \d+ s\n", err) is not None) == (0, True), err
    (over,) = events(run, "hang_over")
    assert over["seconds"] > 1.0


def test_a_rank_whose_training_has_returned_is_on_the_page_of_the_others(launch: Start) -> None:
    """Fault: rank 0 still closes its files, another rank hangs: the launcher ends with a traceback, not a verdict."""
    run = launch("ready()\nown.at(float('inf')) if rank == 0 else meet()\nstand() if rank == 0 else in_torch()")
    run.pids()
    text = until(run, "codescent:   all stacks: ")
    assert re.search(r"^codescent:   0 of 2  .*  ended  ", text, re.MULTILINE), text
    (event,) = events(run, "hang")
    assert event["steps"] == {"0": None, "1": 4}
    run.close()


def test_a_disk_that_answers_late_is_no_progress(launch: Start) -> None:
    """Fault: the verdict takes as long as its disk. Then a line says that the ranks go on, and the verdict is given
    again and again."""
    run = launch(PAUSES, setup=LATE)
    run.pids()
    until(run, "codescent:   all stacks: ")
    time.sleep(2.0)
    run.let("go")
    code, _, err = run.end()
    assert (code, len(re.findall("go on after", err)), "no rank of" in err) == (0, 1, False), err


LATE = """
import time
from codescent.launch import hang_record
hang_record.write_apart = lambda folder, text, event: time.sleep(1.0)
"""


def test_the_end_of_the_rank_that_hung_is_no_progress(launch: Start) -> None:
    """Fault: when a stopped rank is ended, a line says that the ranks go on."""
    run = launch("ready()\nmeet() if rank == 0 else os.kill(os.getpid(), signal.SIGSTOP)\nwait_for('go')")
    pids = run.pids()
    until(run, "codescent:   all stacks: ")
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert "go on after" not in err
    assert events(run, "hang_over") == []


def test_ranks_that_give_up_do_not_go_on(launch: Start) -> None:
    """Fault: a link is cut, the collective ends by its timeout, and a line says that the ranks go on."""
    gives_up = "own.enter('')\nown.fail(is_consequence=True)\ntime.sleep(1.5)\nsys.exit(1)"
    run = launch(f"own.enter('save')\nmeet() if rank == 0 else None\nready()\nwait_for('go')\n{gives_up}")
    run.pids()
    until(run, "codescent:   all stacks: ")
    run.let("go")
    code, _, err = run.end()
    assert (code, "go on after" in err) == (1, False), err
    assert events(run, "hang_over") == []


PAUSES = """
meet() if rank == 0 else None
ready()
wait_for("go")
own.at(4.5)
time.sleep(0.3)
own.at(float("inf"))
"""


def test_ranks_that_wait_for_each_other_in_a_circle(launch: Start) -> None:
    """Fault: with several groups a rank that only waits is blamed. Here each waits in its group for the next rank."""
    program = """
groups = [own.join(f"pair {one}", (one, (one + 1) % 3)) if rank in (one, (one + 1) % 3) else None for one in range(3)]
own.collective(groups[rank], b"all_reduce", 8)
stand()
"""
    run = launch(program, 3)
    run.pids()
    text = until(run, "codescent:   all stacks: ")
    assert "likely cause: the ranks wait for each other in different collectives" in text
    (event,) = events(run, "hang")
    assert event["ranks"] == [0, 1, 2]


def test_the_one_that_all_wait_for_is_found_through_other_groups(launch: Start) -> None:
    """Fault: a rank that waits for the culprit is blamed by those that wait for it: with tp and dp, most ranks."""
    program = """
rows = own.join("tp", (0, 1) if rank < 2 else (2, 3))
columns = own.join("dp", (0, 2) if rank % 2 == 0 else (1, 3))
if rank != 3:
    own.collective(columns if rank == 1 else rows if rank == 2 else rows, b"all_reduce", 8)
ready()
stand() if rank != 3 else evaluates_alone()
"""
    run = launch(program, 4)
    run.pids()
    text = until(run, "codescent:   all stacks: ")
    (event,) = events(run, "hang")
    assert event["ranks"] == [3], text
    assert re.search(r"^codescent:   3 of 4  .* before all_reduce 1 over (tp|dp) \(8 bytes\)$", text, re.MULTILINE)
