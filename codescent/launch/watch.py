"""In: process ids of the local ranks, and their progress. Out: sentences on ranks that are suspended or behind.
Does not end a rank (local.py does) and sends no request to ranks: a rank that hangs cannot answer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.progress import ENDED, Page, Pages

BEHIND_S = 6.0
"""If no rank has made progress for this time, the ranks behind the others are reported."""
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


@dataclass(frozen=True)
class Stopped:
    """How long the others wait for a rank that is stopped or frozen.

    Attributes:
        ends_s: then it is ended (parallel.stopped_s); None: it is not.
        timeout_s: of their collectives (parallel.timeout_s); None: unknown here.
    """

    ends_s: float | None = None
    timeout_s: float | None = None

    def __str__(self) -> str:
        if self.ends_s is not None:
            return f"for {self.ends_s:g} s (parallel.stopped_s), then it is ended"
        most = "parallel.timeout_s" if self.timeout_s is None else f"{self.timeout_s:g} s (parallel.timeout_s)"
        return f"for {most}, then the run ends; with parallel.stopped_s=SECONDS it would end earlier"


class Watch:
    """Watches the progress of the ranks of this machine, from the process that started them.

    Args:
        pages: what each rank does.
        ranks: number of ranks.
        stopped: how long the others wait for one that cannot run.
    """

    def __init__(self, pages: Pages, ranks: int, stopped: Stopped = Stopped()) -> None:
        self.pages, self.ranks, self._stopped = pages, ranks, stopped
        self._since_s: dict[int, float] = {}  # when each rank of `stuck` was found so
        self.stuck: dict[int, str] = {}
        """Ranks that cannot run now, with the reason in words."""
        self._pages: list[Page] = []
        self._moved_s = time.monotonic()
        self._behind: set[int] = set()

    def look(self, running: Mapping[int, int]) -> list[str]:
        """Sentences on changes since the last call. `running`: process id of each rank that has not ended."""
        halted = {rank: how for rank, pid in running.items() if (how := halted_by(pid))}
        said = [
            f"rank {rank} of {self.ranks} (pid {running[rank]}) {how}: the others wait for it {self._stopped}"
            for rank, how in halted.items()
            if rank not in self.stuck
        ]
        said += [
            f"rank {rank} of {self.ranks} continues" for rank in self.stuck if rank in running and rank not in halted
        ]
        self.stuck = halted
        now_s = time.monotonic()
        self._since_s = {rank: self._since_s.get(rank, now_s) for rank in halted}
        return said + self._late(running, halted)

    def overdue(self) -> list[int]:
        """The ranks that could not run for so long that they are to be ended. Each is named once."""
        if self._stopped.ends_s is None:
            return []
        latest_s = time.monotonic() - self._stopped.ends_s
        found = [rank for rank, since_s in self._since_s.items() if since_s <= latest_s]
        self._since_s |= dict.fromkeys(found, math.inf)  # a frozen process ends when it continues, not now
        return found

    def ended_early(self, rank: int) -> bool:
        """Whether a rank with exit code 0 ended after it began to train and before its training returned."""
        return 0 < self.pages.read(rank).position < ENDED

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's training has returned: after the last step, or after a stop that was requested."""
        return self.pages.read(rank).position == ENDED

    def meets(self, rank: int) -> bool:
        """Whether a rank is in collectives with all others, between two segments of work that is given out."""
        return self.pages.read(rank).meets > 0

    def _late(self, running: Mapping[int, int], halted: Mapping[int, str]) -> list[str]:
        """Sentences on ranks behind others of their stage, if no rank has made progress for BEHIND_S."""
        now_s = time.monotonic()
        pages = [self.pages.read(rank) for rank in range(self.ranks)]
        if pages != self._pages:
            self._pages, self._moved_s = pages, now_s
            return []
        if now_s - self._moved_s < BEHIND_S or halted:
            return []
        first: dict[int, float] = {}
        living = {rank: page for rank, page in enumerate(pages) if not page.died_s}
        for page in living.values():
            first[page.stage] = max(page.position, first.get(page.stage, 0.0))
        behind = [
            rank for rank, page in living.items() if rank in running and 0 < page.position < first[page.stage] < ENDED
        ]
        new = [rank for rank in behind if rank not in self._behind]
        self._behind |= set(new)
        return [
            f"rank {rank} of {self.ranks} (pid {running[rank]}) is behind: in step {int(pages[rank].position) + 1} for "
            f"{now_s - pages[rank].time_s:.0f} s{_doing(pages[rank])}, while the others wait for it"
            for rank in new
        ]


def _doing(page: Page) -> str:
    """What a rank does, as a part of a sentence."""
    what = page.section or page.instruction
    doing = f", in {what}" if what else ""
    if not page.collectives:
        return doing
    return f"{doing}; it has begun {counted(page.collectives, 'collective')}, {page.collective} last"


def halted_by(pid: int) -> str:
    """Why a process cannot run: "is stopped" (by a signal) or "is frozen" (by its cgroup); "" if it can run."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        if stat.rpartition(")")[2].split()[0] in ("T", "t"):
            return "is stopped (SIGCONT continues it)"
        for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if (number == "0" and _is_frozen(CGROUPS / path.lstrip("/") / "cgroup.events", "frozen 1")) or (
                controllers == "freezer"
                and _is_frozen(CGROUPS / "freezer" / path.lstrip("/") / "freezer.state", "FROZEN")
            ):
                return "is frozen (by its cgroup)"
    except (OSError, IndexError):  # the process has ended, or this system has no /proc
        return ""
    return ""


def _is_frozen(path: Path, word: str) -> bool:
    try:
        return word in path.read_text()
    except OSError:
        return False
