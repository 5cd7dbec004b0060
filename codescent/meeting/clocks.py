"""In: the store of all ranks, which rank 0 serves. Out: offset of this rank's clock to that of rank 0, with its error.
Does not set a clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from codescent.meeting.store import Store

ROUNDS = 50
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Offset:
    """The clock of rank 0 minus the clock of this rank, and its largest error: both in nanoseconds."""

    offset_ns: float = 0.0
    error_ns: float = 0.0

    def mean(self, later: Offset) -> Offset:
        """Between this measurement and a later one. Half of their difference, a drift, adds to the error."""
        error = max(self.error_ns, later.error_ns) + abs(later.offset_ns - self.offset_ns) / 2
        return Offset((self.offset_ns + later.offset_ns) / 2, error)


def measure(store: Store, rounds: int = ROUNDS) -> Offset:
    """Measure the offset to rank 0 by the shortest of several round trips.

    The answer was given between the send and the receive, so half of the round trip is the largest error. See Cristian
    1989, "Probabilistic clock synchronization", Distributed Computing 3, equation 3, with no least delay known.
    """
    found: list[Offset] = []
    for _ in range(rounds):
        begin = time.time_ns()
        there = store.clock()
        end = time.time_ns()
        # In whole nanoseconds: a float of such a time has steps of 256 ns.
        found.append(Offset(there - (begin + end) // 2, (end - begin) / 2))
    return min(found, key=lambda one: one.error_ns)


def clock_of() -> str:
    """A name of this machine's clock: processes with the same name read the same clock. "": unknown."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""
