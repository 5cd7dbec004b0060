"""In: the stack of the main thread, looked at from time to time. Out: a message, if all ranks wait in different calls.
Makes no collective and ends nothing: the timeout of the process group does."""

from __future__ import annotations

import json
import linecache
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from codescent.base.counted import counted
from codescent.base.output import warn
from codescent.base.rank import Rank
from codescent.meeting.store import Store
from codescent.own.steps import most_steps

LOOKS_EVERY_S = 1.0
"""Seconds between two looks at the main thread."""
LONG_S = 7.0
"""A wait of so many seconds is written to the store."""
WAITS_IN = ("torch.distributed", "codescent.strategies.by_messages", "codescent.strategies.collectives")
"""Modules whose functions wait for other ranks."""
PASSES_ON = "torch.utils._contextlib"
"""torch's decorators, such as torch.no_grad(): the user's function is inside of them."""
KEY = "codescent_waits"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")
_called: deque[tuple[str, int]] = deque(maxlen=100)
_count = [0]
"""The last lines of the script that called a distributed module, and how many calls there were."""


class Waits:
    """Watches whether this rank waits for the others, in a thread of its own. The main thread does nothing for it.

    A wait is long if the main thread has not run for LONG_S. Only long waits are written to the store. If all ranks
    wait long, none of them can help another one. If their calls differ, one rank prints the calls of all.
    While one rank computes, loads, saves or compiles, nothing is said.
    """

    def __init__(self, store: Store, this_rank: Rank) -> None:
        main = threading.main_thread()
        self._this_rank, self._store, self._main = this_rank, store, main.ident
        self._status = Path(f"/proc/self/task/{main.native_id}/status")
        self._over = threading.Event()
        if this_rank.world_size > 1 and self._status.exists():  # only Linux counts the switches of a thread
            threading.Thread(target=self._watch, daemon=True, name="codescent waits").start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        looks, said, before = 0, "", ""
        with suppress(RuntimeError):  # rank 0, which serves the store, has ended
            while not self._over.wait(LOOKS_EVERY_S):
                now = self._look()
                looks, before = (looks + 1 if now and now == before else 0), now
                mine = now if looks * LOOKS_EVERY_S >= LONG_S else ""
                if mine == said != "":
                    if self._compare():
                        return
                elif mine != said:
                    self._store.set(self._key(self._this_rank.rank), mine)
                    said = mine

    def _look(self) -> str:
        """The call in which the main thread waits, with how often this thread has run; "": it does not wait."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None or not str(frame.f_globals.get("__name__")).startswith(WAITS_IN):
            return ""
        lines = self._status.read_text().splitlines()
        runs = [line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")]
        return json.dumps({"call": _call_of(frame), "runs": runs})

    def _compare(self) -> bool:
        """Print the calls of all ranks if all wait and the calls differ. Whether it is proved."""
        keys = [self._key(rank) for rank in range(self._this_rank.world_size)]
        if not self._store.check(keys):
            return False
        values = [value.decode() for value in self._store.multi_get(keys)]
        if not all(values) or self._over.wait(LOOKS_EVERY_S * 2):  # a wait that has ended is withdrawn by then
            return False
        if values != [value.decode() for value in self._store.multi_get(keys)]:
            return False
        lines = told([json.loads(value)["call"] for value in values])
        if lines and self._store.add(f"{KEY} named", 1) == 1:
            for line in lines:
                warn(f"codescent: {line}")
        return bool(lines)

    @staticmethod
    def _key(rank: int) -> str:
        return f"{KEY} {rank}"


def note_call() -> None:
    """Keep the line of the script that calls the module now."""
    user, _ = _split(sys._getframe(1))
    _called.append((user.f_code.co_filename, user.f_lineno))
    _count[0] += 1


def _split(frame: FrameType) -> tuple[FrameType, list[FrameType]]:
    """The script's frame that calls codescent or torch, and the frames of that call, from the script inwards."""
    stack = [frame]
    while stack[-1].f_back is not None:
        stack.append(stack[-1].f_back)
    user = stack[-1]
    for place in range(len(stack) - 1, -1, -1):
        name = str(stack[place].f_globals.get("__name__"))
        if name == PASSES_ON:
            continue
        if name.partition(".")[0] in ("codescent", "torch"):
            return user, stack[place::-1]
        user = stack[place]
    return user, []


def _call_of(frame: FrameType) -> dict[str, Any]:
    """What the script calls there: the line, the kind of call and of collective, the calls of modules so far."""
    user, inner = _split(frame)
    names = [one.f_code.co_name for one in inner]
    collective = next((kind for name in names for kind in COLLECTIVES if kind in name), "")
    return {
        "line": [user.f_code.co_filename, user.f_lineno],
        "kind": _kind(inner),
        "collective": collective,
        "steps": most_steps() or 0,
        "first": _count[0] - len(_called),
        "called": list(_called),
    }


def _kind(inner: list[FrameType]) -> str:
    """The kind of a call, by its frames in codescent and torch, from the script inwards."""
    for frame in inner:
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if module.startswith(("torch._tensor", "torch.autograd")):
            return "backward"
        if module == "torch.nn.modules.module":
            return "forward"
        if module.startswith("torch.optim"):
            return "step"
        if module.startswith("codescent.own") and module != "codescent.own.arguments":
            return function
    return "a collective"


def told(calls: list[dict[str, Any]]) -> list[str]:
    """Lines with the calls of all ranks, and the first call of a module that they do not share; []: all are alike."""
    where = [(*call["line"], call["kind"], call["collective"], call["steps"]) for call in calls]
    if len(set(where)) == 1:
        return []
    lines = ["the ranks wait for each other in different calls: every rank must make the same calls"]
    for one in dict.fromkeys(where):
        path, number, kind, collective, steps = one
        ranks = ", ".join(str(rank) for rank, other in enumerate(where) if other == one)
        within = f" ({collective})" if collective else ""
        lines.append(
            f"  rank {ranks} waits in {kind}{within}, after {counted(steps, 'step')}, at {_text(path, number)}"
        )
    first = max(call["first"] for call in calls)
    last = min(call["first"] + len(call["called"]) for call in calls)
    for index in range(first, last):
        made = [tuple(call["called"][index - call["first"]]) for call in calls]
        if len(set(made)) > 1:
            lines.append(f"  They differ since call {index + 1} of the module:")
            lines += [f"  rank {rank} called it at {_text(*line)}" for rank, line in enumerate(made)]
            break
    return lines


def _text(path: str, number: int) -> str:
    text = linecache.getline(path, number).strip()
    return f"{path}:{number}" + (f": {text}" if text else "")
