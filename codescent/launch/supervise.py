"""In: the memory with the pages of ranks that torchrun, srun or mpirun has started. Out: what their supervisor says.
Starts no rank. Ends one for parallel.stopped_s alone. Ends itself with the last rank of its host, so nobody waits."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from codescent.base.output import warn
from codescent.base.progress import ENDED, Pages
from codescent.launch.hang_record import HangRecord
from codescent.launch.memory_kills import evidence, is_suspected, memory_kills
from codescent.launch.other_hosts import OtherHosts
from codescent.launch.process_state import state_of
from codescent.launch.stacks import Stacks
from codescent.launch.supervisor import Stopped, Supervisor, host, where_of

LOOK_EVERY_S, END_EVERY_S = 1.0, 0.2
"""Seconds between two looks at the pages, and between two looks whether the ranks have ended."""
KEPT_COUNTS = 6
"""Counts of out-of-memory kills: one each LOOK_EVERY_S."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
"""Signals for the ranks, which a launcher may send to all processes of a job."""


def main(words: Sequence[str]) -> int:
    """Watch until all ranks of this host have ended. Words: ranks, ranks of this host, descriptor of the pages, and
    of a socket for the supervisors of other hosts (-1: none); the values of `Stopped`, as JSON."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    world, local, descriptor, listener = map(int, words[:4])
    stopped = Stopped(*json.loads(words[4]))
    pages = Pages(descriptor, world)
    others = OtherHosts(pages, os.environ)
    if listener >= 0:
        others.serve(socket.socket(fileno=listener))
    _RanksOfHost(pages, local, others, stopped).watch()
    return 0


class _RanksOfHost:
    """The ranks of this host, which are not children of this process."""

    def __init__(self, pages: Pages, local: int, others: OtherHosts, stopped: Stopped) -> None:
        self.pages, self.local, self.stacks = pages, local, Stacks()
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()
        self.named = False
        self.kills = deque([memory_kills()], maxlen=KEPT_COUNTS)  # a killed process ends some seconds later
        known = self.stacks, HangRecord(pages), others
        self.supervisor = Supervisor(pages, pages.ranks, stopped, *known, is_whole=local == pages.ranks)

    def watch(self) -> None:
        """Look again and again."""
        look_s = 0.0
        while not self.pids or len(self.ended) < len(self.pids):
            self._find()
            if not self.pids:
                return  # the ranks have parted before this process could look
            self._collect()
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LOOK_EVERY_S
                self.kills.append(memory_kills())
                running = {rank: pid for rank, pid in self.pids.items() if rank not in self.ended}
                warn(*(f"codescent: {line}" for line in self.supervisor.look(running)))
                self._end_overdue(running)
            time.sleep(END_EVERY_S)

    def _find(self) -> None:
        """Learn the processes of ranks that have come."""
        if len(self.pids) == self.local:
            return
        for rank in range(self.pages.ranks):
            pid, descriptor, inode = self.pages.process(rank)
            if pid and rank not in self.pids:
                self.pids[rank] = pid
                self.stacks.adopt(rank, pid, descriptor, inode)

    def _end_overdue(self, running: Mapping[int, int]) -> None:
        """End the ranks that could not run for too long. What ends then is up to their launcher."""
        for rank in self.supervisor.overdue():
            how = f"rank {rank} of {self.pages.ranks} (pid {running[rank]}) {self.supervisor.stuck[rank]}"
            warn(f"codescent: {how}, and is ended now (parallel.stopped_s)")
            with suppress(ProcessLookupError, PermissionError):
                os.kill(running[rank], signal.SIGKILL)

    def _collect(self) -> None:
        """Note the ranks that have ended. Name the first one that ended without a word."""
        for rank, pid in self.pids.items():
            if rank in self.ended or state_of(pid).word != "gone":
                continue
            self.ended.add(rank)
            page = self.pages.read(rank)
            if page.position == ENDED or page.failed_s:
                self.named |= page.failed_s > 0  # it has printed its error
            elif not self.named:
                self.named = True
                found = evidence(self.kills[0])
                why = found if is_suspected(found) else ": it was killed, or the script left"
                how = f"has ended {where_of(page)}, without an error of its own{why}"
                warn(f"codescent: rank {rank} of {self.pages.ranks} (pid {pid} on {host()}) {how}")
                self.supervisor.record_crash(rank, pid, how, page.step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
