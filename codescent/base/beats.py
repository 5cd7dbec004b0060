"""In: how far a rank has come. Out: the same, readable by the process that started it, without asking the rank.
Does not judge who is late (launch/watch does)."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping

BEATS_FD = "CODESCENT_BEATS_FD"
"""Descriptor of the memory that the launcher of this machine's ranks hands to each of them."""

ENDED = math.inf
"""Where a rank is that has done all it was to do."""

_SLOT = struct.Struct("<dd")


class Beats:
    """Two numbers for each rank: its position, and its pipeline stage.

    The position is the steps done, and the share of its stage's instruction list that is done of the next one: only
    ranks of one stage walk the same list. 0: the rank has not begun to train. The memory is shared: a rank that is
    stopped or hangs does not have to be asked.
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.memory = mmap.mmap(descriptor, ranks * _SLOT.size)

    @classmethod
    def of(cls, env: Mapping[str, str], ranks: int) -> Beats | None:
        """Those of the launcher that started this rank; None: it wants none."""
        text = env.get(BEATS_FD, "")
        return cls(int(text), ranks) if text.isdigit() else None

    def put(self, rank: int, position: float, stage: int = 0) -> None:
        """Say where a rank is."""
        _SLOT.pack_into(self.memory, rank * _SLOT.size, position, stage)

    def get(self, rank: int) -> tuple[float, float]:
        """Position and stage of a rank."""
        position, stage = _SLOT.unpack_from(self.memory, rank * _SLOT.size)
        return position, stage


def shared_memory(ranks: int) -> int:
    """A descriptor of memory for so many ranks, which vanishes with its last user."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("codescent beats")
    else:
        import tempfile  # noqa: PLC0415 - not on Linux

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, ranks * _SLOT.size)
    return descriptor
