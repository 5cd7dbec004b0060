"""In: faults, the process that has started the ranks of a run here. Out: a rank is killed or stopped in its step.
Does not parse a script (fault_script.py does) and does not judge how the run goes on (verbs/prove_faults.py does)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from codescent.base.progress import ENDED, PROGRESS_FD, Pages
from codescent.base.stacks import borrowed
from codescent.launch.fault_script import Fault, FaultKind

LOOK_EVERY_S = 0.001
"""A step of a small model takes some milliseconds."""
SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}

PidOf = Callable[[int], int | None]
"""The process of a rank; None: there is none now."""


@dataclass(frozen=True)
class Hit:
    """A fault that was made.

    Attributes:
        fault: as it was asked for.
        process: of the rank.
        step: that was under way.
        instruction: that was under way.
    """

    fault: Fault
    process: int
    step: int
    instruction: str

    def __str__(self) -> str:
        where = f", in {self.instruction}" if self.instruction else ""
        return f"{self.fault}: rank {self.fault.rank} (pid {self.process}) in step {self.step}{where}"


def inject(faults: Sequence[Fault], pages: Pages, pid_of: PidOf, over: threading.Event) -> Iterator[Hit]:
    """Make one fault after the other, each when its rank has begun the step. Yields those that were made.

    Args:
        faults: kills and stops, in the order of their steps.
        pages: of all ranks.
        pid_of: looks for the process of a rank.
        over: is set when the run has ended: nothing more is done.
    """
    for fault in faults:
        if fault.rank is None:
            raise ValueError(f"{fault}: only kills and stops can be made")
        if not _begins(fault.rank, fault.step, pages, over):
            return
        process = pid_of(fault.rank)
        if process is None:
            return
        page = pages.read(fault.rank)  # looking for the process has taken some milliseconds
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, SIGNALS[fault.kind])
            yield Hit(fault, process, page.step or fault.step, page.instruction)


def _begins(rank: int, step: int, pages: Pages, over: threading.Event) -> bool:
    """Wait until a rank has begun a step. False: the run is over, or the rank has taken all its steps.

    The first instruction of a step puts the position above the number of steps that are done.
    """
    while not over.wait(LOOK_EVERY_S):
        position = pages.read(rank).position
        if position > step - 1:
            return position != ENDED
    return False


class LocalRanks:
    """The ranks that a process of this machine has started, seen from another process (Linux: by /proc).

    Args:
        launcher: id of that process.
        ranks: their number.
    """

    def __init__(self, launcher: int, ranks: int) -> None:
        self.launcher, self.ranks = launcher, ranks

    def pid_of(self, rank: int) -> int | None:
        """The process of a rank; None: there is none now."""
        return next((pid for pid, number, _ in self._children() if number == rank), None)

    def pages(self) -> Pages | None:
        """What the ranks write; None: no rank has started yet, or this process may not read it."""
        for pid, _, descriptor in self._children():
            with contextlib.suppress(OSError, ValueError):
                inode = Path(f"/proc/{pid}/fd/{descriptor}").stat().st_ino
                if (found := borrowed(pid, descriptor, inode)) is None:
                    continue
                try:
                    return Pages(found, self.ranks)
                finally:
                    os.close(found)
        return None

    def _children(self) -> Iterator[tuple[int, int, int]]:
        """Process, rank, and descriptor of the pages of each rank that lives."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.launcher).children():
                with contextlib.suppress(psutil.Error, OSError):
                    names = child.environ()
                    rank, descriptor = names.get("RANK", ""), names.get(PROGRESS_FD, "")
                    if rank.isdigit() and descriptor.isdigit() and child.status() != psutil.STATUS_ZOMBIE:
                        yield child.pid, int(rank), int(descriptor)


class Injection:
    """Makes the faults of a script while a run goes on. A context: a thread begins with it, and ends with it.

    Attributes:
        hits: the faults that were made.
    """

    def __init__(self, faults: Sequence[Fault], ranks: LocalRanks) -> None:
        self.hits: list[Hit] = []
        self._faults, self._ranks, self._over = faults, ranks, threading.Event()
        self._thread = threading.Thread(target=self._make, name="codescent faults", daemon=True)

    def _make(self) -> None:
        pages = None
        while pages is None:
            if self._over.wait(LOOK_EVERY_S * 50):
                return
            pages = self._ranks.pages()
        self.hits.extend(inject(self._faults, pages, self._ranks.pid_of, self._over))

    def __enter__(self) -> Injection:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
