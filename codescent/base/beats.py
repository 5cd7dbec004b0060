"""In: the progress of each rank (steps done, plus a fraction of the current step), its stage, whether it meets others.
Out: shared memory that the ranks write and the launcher reads.
Does not decide which rank is late (launch/watch.py does)."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping

BEATS_FD = "CODESCENT_BEATS_FD"
"""Environment variable with the file descriptor of the shared memory. The launcher sets it for each rank."""

ENDED = math.inf
"""Position of a rank whose training has returned: after the last step, or after a stop that was requested."""

_SLOT = struct.Struct("<ddd")
_PROGRESS, _MEETS = struct.Struct("<dd"), struct.Struct("<d")


class Beats:
    """Shared memory with three numbers for each rank: its position, its pipeline stage, and where it meets the others.

    The position is the number of steps done, plus the finished fraction of the stage's instruction list in this step.
    0: the rank has not begun to train. Compare positions within a stage only: stages have different lists.
    The launcher can read the position of a rank that is stopped or hangs.
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.memory = mmap.mmap(descriptor, ranks * _SLOT.size)

    @classmethod
    def of(cls, env: Mapping[str, str], ranks: int) -> Beats | None:
        """Open the memory that the launcher passed to this rank; None if it passed none."""
        text = env.get(BEATS_FD, "")
        return cls(int(text), ranks) if text.isdigit() else None

    def put(self, rank: int, position: float, stage: float = 0) -> None:
        """Write the position and the stage of a rank."""
        _PROGRESS.pack_into(self.memory, rank * _SLOT.size, position, stage)

    def meet(self, rank: int, step: int) -> None:
        """Write that a rank is in the collectives after this step, or will be in them; 0: it is in none."""
        _MEETS.pack_into(self.memory, rank * _SLOT.size + _PROGRESS.size, step)

    def meets(self, rank: int) -> int:
        """The step after which a rank meets the others now; 0: it does not meet them."""
        (step,) = _MEETS.unpack_from(self.memory, rank * _SLOT.size + _PROGRESS.size)
        return int(step)

    def lost(self, rank: int) -> tuple[float, float] | None:
        """When the launcher saw that a rank had died, by time.monotonic, and its position then; None: it lives."""
        moment, position = self.get(rank)
        return (-moment, position) if moment < 0 else None

    def lose(self, rank: int, now_s: float) -> float:
        """The launcher writes that a rank has died, and the others go on. Returns the position of the rank."""
        position, _ = self.get(rank)
        self.put(rank, -now_s, position)
        return position

    def get(self, rank: int) -> tuple[float, float]:
        """Read the position and the stage of a rank."""
        position, stage = _PROGRESS.unpack_from(self.memory, rank * _SLOT.size)
        return position, stage


def shared_memory(ranks: int) -> int:
    """Create shared memory for `ranks` ranks. Returns its descriptor. The last process that closes it frees it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("codescent beats")
    else:
        import tempfile  # noqa: PLC0415 - not on Linux

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, ranks * _SLOT.size)
    return descriptor
