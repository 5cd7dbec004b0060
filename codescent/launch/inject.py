"""In: faults, the ranks of a run on this machine. Out: in its step a rank is killed or stopped, or one more joins.
Does not parse a script (fault_script.py does) and does not judge how the run goes on (verbs/prove_faults.py does)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from codescent.base.progress import ENDED, Pages
from codescent.launch.fault_script import Fault, FaultKind
from codescent.launch.let_in import LOOK_EVERY_S, LetIn
from codescent.launch.local_ranks import LocalRanks

SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}


@dataclass(frozen=True)
class Hit:
    """A fault that was made.

    Attributes:
        fault: as it was asked for.
        process: of the rank.
        step: that was under way. Of a rank that joins: the first one in which it takes part.
        instruction: that was under way.
        rank: of the process; None: it waits, because no layout has a place for it.
    """

    fault: Fault
    process: int
    step: int
    instruction: str
    rank: int | None

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.fault}: pid {self.process} waits: no layout of so many ranks has the same losses"
        if self.fault.kind is FaultKind.JOIN:
            return f"{self.fault}: rank {self.rank} (pid {self.process}) takes part from step {self.step} on"
        where = f", in {self.instruction}" if self.instruction else ""
        return f"{self.fault}: rank {self.rank} (pid {self.process}) in step {self.step}{where}"


def inject(
    faults: Sequence[Fault], pages: Pages, ranks: LocalRanks, lets: LetIn, over: threading.Event
) -> Iterator[Hit]:
    """Make one fault after the other, each when its rank has begun the step. Yields those that were made.

    Args:
        faults: in the order of their steps.
        pages: of all ranks.
        ranks: of the run.
        lets: has others join.
        over: is set when the run has ended: nothing more is done.
    """
    for fault in faults:
        if fault.rank is None:
            if (joined := lets.at(fault.step)) is None:
                return
            yield Hit(fault, joined[0], fault.step, "", joined[1])
            continue
        if not _begins(fault.rank, fault.step, pages, over):
            return
        process = ranks.pid_of(fault.rank, pages.call)
        if process is None:
            return
        page = pages.read(fault.rank)  # looking for the process has taken some milliseconds
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, SIGNALS[fault.kind])
            yield Hit(fault, process, page.step or fault.step, page.instruction, fault.rank)


def _begins(rank: int, step: int, pages: Pages, over: threading.Event) -> bool:
    """Wait until a rank has begun a step. False: the run is over, or the rank has taken all its steps, or is not there.

    The first instruction of a step puts the position above the number of steps that are done.
    """
    while not over.wait(LOOK_EVERY_S):
        position = pages.read(rank).position
        if position > step - 1:
            return position != ENDED
        if pages.read(0).position > step and 0 < len(pages.call.places) <= rank:
            return False
    return False


class Injection:
    """Makes the faults of a script while a run goes on. A context: a thread begins with it, and ends with it.

    Args:
        faults: in the order of their steps.
        ranks: of the run.
        invited: the folder of INVITED (base/call.py), which the ranks know.

    Attributes:
        hits: the faults that were made.
    """

    def __init__(self, faults: Sequence[Fault], ranks: LocalRanks, invited: Path) -> None:
        self.hits: list[Hit] = []
        self._faults, self._ranks, self._over, self._invited = faults, ranks, threading.Event(), invited
        self._thread = threading.Thread(target=self._make, name="codescent faults", daemon=True)

    def _make(self) -> None:
        pages = None
        while pages is None:
            if self._over.wait(LOOK_EVERY_S * 50):
                return
            pages = self._ranks.pages()
        lets = LetIn(pages, self._ranks, self._invited, self._over)
        self.hits.extend(inject(self._faults, pages, self._ranks, lets, self._over))

    def __enter__(self) -> Injection:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
