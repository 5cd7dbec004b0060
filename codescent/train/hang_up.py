"""In: a number in shared memory that the launcher raises when ranks have died. Out: this rank waits for them no longer.
Its connections to other ranks are shut. Does not meet the others anew (regroup.py does) and starts no process."""

from __future__ import annotations

import faulthandler
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from codescent.base.call import Call, CalledAnew, follow_calls, take_rank_by, wait_without_limit
from codescent.base.ending import is_failing
from codescent.base.errors import RunFailed
from codescent.base.progress import PREPARATION, OwnPage, Pages
from codescent.coupling.lost_peer import is_lost_peer
from codescent.train.stop import stop_when_called

if TYPE_CHECKING:
    from codescent.checkpoint.held import HeldTensors

LOOK_EVERY_S = 0.05
"""Seconds between two looks at the number."""
UNWIND_S = 60.0
"""Seconds from the loss until this rank has let go of everything. Else it ends, and is started again itself."""


class Regroup(Exception):
    """Another rank was lost: this one lets go of its run, and meets the others anew.

    `held`: the tensors that this rank has in memory; None: it has none that are of one step.
    """

    def __init__(self, why: str, held: HeldTensors | None) -> None:
        super().__init__(why)
        self.held = held


class Alarm:
    """A thread that hangs up when the launcher has lost a rank: a wait for it, of any kind, ends with an error.

    Args:
        pages: of the launcher.

    Attributes:
        call: the one that this process has followed last.
        held: what it had in memory when it lost another rank, until it is asked for.
    """

    current: ClassVar[Alarm | None] = None

    def __init__(self, pages: Pages) -> None:
        self._pages, self.call = pages, Call()
        self.held: HeldTensors | None = None
        self._loss = 0, 0.0  # the number of the last urgent call, and since when this rank lets go of its run
        self._is_alone = False  # nobody waits for a world of one rank
        self._over = False
        threading.Thread(target=self._watch, name="codescent alarm", daemon=True).start()
        Alarm.current = self
        follow_calls(self._is_over)
        stop_when_called(lambda: self.asks)

    def follow(self, least: int) -> Call:
        """Wait until the launcher gives this process a place, in a call of at least this number. Returns the call."""
        pid, had_place = os.getpid(), self.call.number == 0 == least or os.getpid() in self.call.places
        while (call := self._pages.call).number < least or (call.number and pid not in call.places):
            self.call, self.held, had_place = call, None, False  # the others go on, and soon this step is an old one
            time.sleep(LOOK_EVERY_S)
        self.call, self._is_alone = call, call.ranks == 1
        take_rank_by(call.number)
        wait_without_limit(not (call.is_urgent or had_place))  # for the end of a step of the others
        return call

    def close(self) -> None:
        """End the thread."""
        self._over, Alarm.current = True, None
        follow_calls(None)
        take_rank_by(0)
        stop_when_called(None)

    @property
    def rings(self) -> bool:
        """Whether ranks were lost since the last call that this process has followed."""
        return self._pages.call.urgent > self.call.number

    @property
    def asks(self) -> bool:
        """Whether the launcher wants other ranks to take part from the end of this step on."""
        return self._pages.call.number > self.call.number

    def _is_over(self, agreed: bool) -> bool:
        """Whether this process follows an old call. Who has agreed to a list of ranks leaves it only after a loss."""
        return self.rings if agreed else self.asks

    def _watch(self) -> None:
        while not self._over:
            time.sleep(LOOK_EVERY_S)
            call, now_s = self._pages.call, time.monotonic()
            if call.urgent <= self.call.number:
                continue
            if self._loss[0] != call.urgent or _prepares() or self._is_alone:
                if self._loss[0] != call.urgent:
                    hang_up()
                self._loss = call.urgent, now_s
            elif now_s - self._loss[1] > UNWIND_S:
                os.write(2, f"codescent: {UNWIND_S:g} s after a loss this rank still has its run; it ends\n".encode())
                faulthandler.dump_traceback(2)
                os._exit(RunFailed.exit_code)


def _prepares() -> bool:
    """Whether this rank prepares data, which may take hours, and which is not to be lost."""
    return OwnPage.current is not None and OwnPage.current.section == PREPARATION


def meets_again() -> bool:
    """Whether the launcher has called the ranks together since it started them: what they have measured is known."""
    return Alarm.current is not None and Alarm.current.call.number > 0


def outlives(error: BaseException | None) -> bool:
    """Whether this process goes on after an error: it comes from the loss of another rank, which comes again."""
    alarm = Alarm.current
    if alarm is None or not isinstance(error, Exception) or is_failing():
        return False
    return isinstance(error, Regroup | CalledAnew) or is_lost_peer(error) or alarm.rings


def hang_up() -> None:
    """Shut all TCP connections of this process, in both directions.

    Whoever waits on one of them, here or there, gets an error. So a loss reaches every rank at once: gloo alone tells
    only the neighbours of the dead, and `ProcessGroup.abort` ends no wait of gloo. Sockets that listen stay: gloo ends
    the process if one of its own fails.
    """
    descriptors = Path("/proc/self/fd")
    with suppress(OSError):  # there are no more descriptors, not even for the list
        for entry in [*(descriptors if descriptors.is_dir() else Path("/dev/fd")).iterdir()]:
            with suppress(OSError):  # it is closed meanwhile, or is not connected
                _shut(int(entry.name))


def _shut(descriptor: int) -> None:
    """Shut a connection. What is no connection stays as it is."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    copy = os.dup(descriptor)
    try:
        peer = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with peer:
        if peer.family in (socket.AF_INET, socket.AF_INET6) and peer.type == socket.SOCK_STREAM:
            peer.getpeername()
            peer.shutdown(socket.SHUT_RDWR)
