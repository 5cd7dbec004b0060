"""In: the ranks of this machine, and how far each has come. Out: who is stopped, gone or far behind, in words.
Does not stop anybody (local does), and asks no rank: one that hangs would not answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from codescent.base.beats import ENDED, Beats

BEHIND_S = 6.0
"""Nobody has moved for so long: who is behind the others keeps them waiting."""
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


class Watch:
    """What the ranks of this machine do, as the process that started them sees it.

    Args:
        beats: how far each rank has come.
        ranks: how many there are.
    """

    def __init__(self, beats: Beats, ranks: int) -> None:
        self.beats, self.ranks = beats, ranks
        self.stuck: dict[int, str] = {}
        """Ranks that do not move now, and why, in words."""
        self._positions: list[tuple[float, float]] = []
        self._moved_s = time.monotonic()
        self._behind: set[int] = set()

    def look(self, running: Mapping[int, int]) -> list[str]:
        """What is new since the last look: a sentence for each rank. `running`: process id of each rank that runs."""
        halted = {rank: how for rank, pid in running.items() if (how := halted_by(pid))}
        said = [
            f"rank {rank} of {self.ranks} (pid {running[rank]}) {how}: the others wait for it"
            for rank, how in halted.items()
            if rank not in self.stuck
        ]
        said += [
            f"rank {rank} of {self.ranks} goes on" for rank in self.stuck if rank in running and rank not in halted
        ]
        self.stuck = halted
        return said + self._late(running, halted)

    def ended_early(self, rank: int) -> bool:
        """Whether a rank that has ended well has done so in the middle of its steps."""
        return 0 < self.beats.get(rank)[0] < ENDED

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has done all it was to do."""
        return self.beats.get(rank)[0] == ENDED

    def _late(self, running: Mapping[int, int], halted: Mapping[int, str]) -> list[str]:
        """Who is behind others of the same stage, where nobody has moved for a while."""
        now_s = time.monotonic()
        positions = [self.beats.get(rank) for rank in range(self.ranks)]
        if positions != self._positions:
            self._positions, self._moved_s = positions, now_s
            return []
        if now_s - self._moved_s < BEHIND_S or halted:
            return []
        first: dict[float, float] = {}
        for position, stage in positions:
            first[stage] = max(position, first.get(stage, 0.0))
        behind = [rank for rank in running if 0 < positions[rank][0] < first[positions[rank][1]] < ENDED]
        new = [rank for rank in behind if rank not in self._behind]
        self._behind |= set(new)
        return [
            f"rank {rank} of {self.ranks} (pid {running[rank]}) is behind: in step {int(positions[rank][0]) + 1} for "
            f"{now_s - self._moved_s:.0f} s, while the others wait for it"
            for rank in new
        ]


def halted_by(pid: int) -> str:
    """Why a process cannot run: "is stopped", by a signal, or "is frozen", by its cgroup; "" if it can."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        if stat.rpartition(")")[2].split()[0] in ("T", "t"):
            return "is stopped (SIGCONT would let it go on)"
        for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if (number == "0" and _is_frozen(CGROUPS / path.lstrip("/") / "cgroup.events", "frozen 1")) or (
                controllers == "freezer"
                and _is_frozen(CGROUPS / "freezer" / path.lstrip("/") / "freezer.state", "FROZEN")
            ):
                return "is frozen (its cgroup is)"
    except (OSError, IndexError):  # it has ended, or this system has no /proc
        return ""
    return ""


def _is_frozen(path: Path, word: str) -> bool:
    try:
        return word in path.read_text()
    except OSError:
        return False
