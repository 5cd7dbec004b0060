"""In: small programs as ranks, which stand still in many ways. Out: the verdict of their launcher on each.
Does not train: tests/faults/test_hang_runs.py does. The processes, their states and their stacks are real."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_launch_local import Launch

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc"),
]

SETUP = """
from codescent.launch import deadlines, verdict
deadlines.FLOOR_S = deadlines.FIRST_S = deadlines.START_S = 0.6
verdict.WITHOUT_GIL_S = 0.5
local.LOOK_EVERY_S = 0.1
"""
RANK = """
import ctypes, threading
from codescent.base import progress
from codescent.base.progress import OwnPage, Pages
progress.BEAT_EVERY_S = 0.05
world = int(os.environ["WORLD_SIZE"])
own = OwnPage(Pages.of(os.environ, world), rank)
own.begin()
if (folder / "run").exists():
    own.pages.folder = str(folder / "run")
group = own.join("dp_replicate", range(world))
own.at(3.5, 0, "reduce")
def meet(kind=b"all_reduce", size=4096):
    own.collective(group, kind, size)
def stand(name="go"):
    ready()
    wait_for(name)
    own.at(float("inf"))
def beside():
    threading.Event().wait(100)
threading.Thread(target=beside, daemon=True).start()
meet()
"""
ALONE = """
def evaluates_alone():
    time.sleep(100)
def spins():
    ready()
    while True:
        pass
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    RunFolder.create(tmp_path / "run", "", {"traffic": [PLANNED]})
    started: list[Launch] = []

    def start(program: str, ranks: int = 2, setup: str = "") -> Launch:
        started.append(Launch(tmp_path, ranks, RANK + ALONE + program, SETUP + setup))
        return started[-1]

    yield start
    for one in started:
        one.close()


Start = Callable[..., Launch]
PLANNED = {"collective": "all_reduce", "axis": "dp_replicate", "what": "gradients of all layers"}


def verdict_of(run: Launch) -> tuple[str, dict[str, object]]:
    """The page on the console, up to its last line, and the event."""
    assert run.process.stderr is not None
    lines = []
    for line in run.process.stderr:
        lines.append(line)
        if line.startswith("codescent:   all stacks: "):
            break
    (event,) = [one for one in RunFolder.open(run.folder / "run").read_events() if one["kind"] == "hang"]
    return "".join(lines), event


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
    text, event = verdict_of(run)
    assert f"likely cause: {cause}" in text
    culprits = [0, 1] if name in ("order", "shapes") else [0] if name == "first_alone" else [1]
    assert event["ranks"] == culprits
    assert event["cause"] == ("alone" if name == "spins" else name)
    at = text.partition(f"rank {culprits[0]} (pid {pids[culprits[0]]}) ")[2]
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
