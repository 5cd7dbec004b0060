"""In: nothing. Out: programs of ranks that write pages, the setup of their launcher, and what it says of them.
Does not decide what is tested: tests/faults/ does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from test_launch_local import Launch

from codescent.record import RunFolder

SETUP = """
from codescent.launch import deadlines, supervisor, verdict
deadlines.FLOOR_S = deadlines.FIRST_S = deadlines.START_S = 0.6
verdict.WITHOUT_GIL_S = 0.5
supervisor.PAUSE_S = 0.4
local.LOOK_EVERY_S = 0.1
"""
RANK = """
import ctypes, threading
from codescent.base import progress
from codescent.base.progress import OwnPage, Pages
progress.BEAT_EVERY_S = 0.05
world = int(os.environ["WORLD_SIZE"])
own = OwnPage(Pages.of(os.environ), rank)
own.begin()
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
def evaluates_alone():
    time.sleep(100)
def spins():
    ready()
    while True:
        pass
exec(compile("def in_torch(): time.sleep(100)", "/python/torch/distributed/c10d.py", "exec"))
meet()
"""
"""A rank in step 4, which has begun one collective. `beside` is another thread, `in_torch` seems to wait."""


def until(run: Launch, begin: str) -> str:
    """What the launcher prints, up to a line that begins so."""
    assert run.process.stderr is not None
    lines = []
    for line in run.process.stderr:
        lines.append(line)
        if line.startswith(begin):
            return "".join(lines)
    raise AssertionError(f"no line begins with {begin!r}:\n{''.join(lines)}")


def events(run: Launch, *kinds: str) -> Iterable[dict[str, Any]]:
    """The events of these kinds in the run folder of the ranks."""
    return [one for one in RunFolder.open(run.folder / "run").read_events() if one["kind"] in kinds]
