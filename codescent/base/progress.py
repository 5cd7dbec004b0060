"""In: what a rank does now: step, instruction, collective. Out: a page of shared memory for each rank of this machine.
Ranks write their pages, the launcher reads them. Does not decide which rank is late (launch/watch.py does)."""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

PROGRESS_FD = "CODESCENT_PROGRESS_FD"
"""Environment variable with the file descriptor of the shared memory. The launcher sets it for each rank."""

ENDED = math.inf
"""Position of a rank whose training has returned: after the last step, or after a stop that was requested."""

_WHERE = struct.Struct("<ddq24s")  # position, time, stage, instruction
_SECTION = struct.Struct("<24s")
_COLLECTIVE = struct.Struct("<q40s")  # number, name
_MOMENT = struct.Struct("<d")
_AT_SECTION = _WHERE.size
_AT_COLLECTIVE = _AT_SECTION + _SECTION.size
_AT_MEETING = _AT_COLLECTIVE + _COLLECTIVE.size
_AT_DEATH = _AT_MEETING + _MOMENT.size
PAGE_BYTES = _AT_DEATH + _MOMENT.size


@dataclass(frozen=True)
class Page:
    """What a rank does.

    Attributes:
        position: the number of steps done, plus the finished fraction of the stage's instruction list in this step. 0:
            the rank has not begun to train. Compare ranks of one stage only: stages have different lists.
        time_s: when the position was written, by time.monotonic, which is the same for all processes of a machine.
        stage: index of the rank's program in the plan.
        instruction: that is under way, such as "backward".
        section: what is done between two steps, such as "validation"; "": a step is under way.
        collectives: how many collectives the rank has begun.
        collective: the last of them, such as "all_reduce over tp".
        meets: the step after which the rank is in collectives with all others; 0: it is in none.
        died_s: when the launcher saw that the rank had died; 0: it lives.
    """

    position: float = 0.0
    time_s: float = 0.0
    stage: int = 0
    instruction: str = ""
    section: str = ""
    collectives: int = 0
    collective: str = ""
    meets: int = 0
    died_s: float = 0.0


class Pages:
    """The pages of all ranks of a machine. The launcher can read the page of a rank that is stopped or hangs."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.memory = mmap.mmap(descriptor, ranks * PAGE_BYTES)

    @classmethod
    def of(cls, env: Mapping[str, str], ranks: int) -> Pages | None:
        """Open the memory that the launcher passed to this rank; None if it passed none."""
        text = env.get(PROGRESS_FD, "")
        return cls(int(text), ranks) if text.isdigit() else None

    def read(self, rank: int) -> Page:
        """Read a page."""
        start = rank * PAGE_BYTES
        position, time_s, stage, instruction = _WHERE.unpack_from(self.memory, start)
        (section,) = _SECTION.unpack_from(self.memory, start + _AT_SECTION)
        collectives, collective = _COLLECTIVE.unpack_from(self.memory, start + _AT_COLLECTIVE)
        (meets,) = _MOMENT.unpack_from(self.memory, start + _AT_MEETING)
        (died_s,) = _MOMENT.unpack_from(self.memory, start + _AT_DEATH)
        words = [_text(one) for one in (instruction, section, collective)]
        return Page(position, time_s, stage, words[0], words[1], collectives, words[2], int(meets), died_s)

    def lose(self, rank: int, now_s: float) -> Page:
        """The launcher writes that a rank has died, and the others go on. Returns its page."""
        _MOMENT.pack_into(self.memory, rank * PAGE_BYTES + _AT_DEATH, now_s)
        return self.read(rank)


class OwnPage:
    """The page of this rank, which writes it.

    Attributes:
        current: of the run that this process takes part in; None: its launcher passed none.
    """

    current: ClassVar[OwnPage | None] = None

    def __init__(self, pages: Pages, rank: int) -> None:
        self._memory, self._start, self._collectives = pages.memory, rank * PAGE_BYTES, 0

    def at(self, position: float, stage: int = 0, instruction: str = "") -> None:
        """Write where this rank is: see Page."""
        _WHERE.pack_into(self._memory, self._start, position, time.monotonic(), stage, instruction.encode())

    def enter(self, section: str) -> None:
        """Write what is done between two steps; "": nothing more."""
        _SECTION.pack_into(self._memory, self._start + _AT_SECTION, section.encode())

    def collective(self, name: bytes) -> None:
        """Write that a collective begins."""
        self._collectives += 1
        _COLLECTIVE.pack_into(self._memory, self._start + _AT_COLLECTIVE, self._collectives, name)

    def meet(self, step: int) -> None:
        """Write that this rank is in the collectives after this step, or will be in them; 0: it is in none."""
        _MOMENT.pack_into(self._memory, self._start + _AT_MEETING, step)

    def come_again(self) -> None:
        """This process was started for a rank that has died: from now on the rank lives."""
        _MOMENT.pack_into(self._memory, self._start + _AT_DEATH, 0.0)


def shared_memory(ranks: int) -> int:
    """Create shared memory for `ranks` ranks. Returns its descriptor. The last process that closes it frees it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("codescent progress")
    else:
        import tempfile  # noqa: PLC0415 - not on Linux

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, ranks * PAGE_BYTES)
    return descriptor


def _text(stored: bytes) -> str:
    """Text as it was stored: cut at the end of its place, perhaps while it was being written."""
    return stored.rstrip(b"\0").decode("utf-8", errors="replace")
