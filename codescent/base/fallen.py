"""In: the pages of the ranks of this host, on a rank that has lost another. Out: the rank that ended without a word.
Does not look at other hosts (meeting/silent.py asks the store) and ends nothing."""

from __future__ import annotations

import time

from codescent.base.proc import stat_of
from codescent.base.progress import ENDED, OwnPage

ENDS_S, LOOK_S = 0.5, 0.02
"""Seconds in which a process has ended whose connections are closed; between two looks."""


def fallen() -> str:
    """The rank of this host that has ended without an error of its own, in words; "": there is none.

    A rank that an error ends has said so on its page, and prints its error.
    """
    own, end_s = OwnPage.current, time.monotonic() + ENDS_S
    if own is None:
        return ""
    pages = own.pages
    pids = {rank: pid for rank in range(pages.ranks) if (pid := pages.process(rank)[0])}
    while pids:
        found = {rank: pages.read(rank) for rank in pids}
        if any(page.failed_s > 0 for page in found.values()):
            return ""
        for rank, page in found.items():
            if page.position != ENDED and not page.failed_s and not _lives(pids[rank]):
                step = f" in step {int(page.position) + 1}" if page.position else " before its first step"
                return f"rank {rank} of {pages.ranks} (pid {pids[rank]}) has ended{step} without an error of its own"
        if time.monotonic() >= end_s:
            return ""
        time.sleep(LOOK_S)
    return ""


def _lives(pid: int) -> bool:
    fields = stat_of(pid)
    return fields is None or fields[:1] not in ([], ["Z"], ["X"])
