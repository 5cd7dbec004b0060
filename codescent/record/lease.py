"""In: a run folder. Out: the right to write it, held by one process at a time, where locks of files do not reach, too.
Does not write the run (run_folder.py asks before each write) and does not end the process (it calls `lost`).

The folder has one file `.lease-N`: N is the generation of the run's writer. Who renames it to N + 1 is the next writer,
and a rename succeeds for one process only. So a writer whose file has gone has lost the run, and must not write.
A holder renews its file. If it was not renewed for its time, another process may take it (Gray and Cheriton 1989,
"Leases: an efficient fault-tolerant mechanism for distributed file cache consistency"). Times are differences on the
clock of one machine, so no clocks need to agree."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from codescent.base import writing
from codescent.base.durable import replace_file
from codescent.base.early import raise_if_asked
from codescent.base.errors import RunFailed, UserError
from codescent.base.output import progress
from codescent.base.proc import stat_of
from codescent.base.reading import read_bytes
from codescent.record.lines import user_errors

LEASE_S = 30.0
"""Seconds for which a lease holds."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It goes on while the machine sleeps, where the system has such a clock."""
MOST_S = 3600.0
"""No lease holds for longer."""
RENEWALS = 3
"""Renewals in the time of a lease."""
GRACE_S = 2.0
"""Seconds after the end of a lease: who has lost it ends within them, who takes it waits for them."""
SEEN_S = 0.2
"""Seconds in which a folder answers that can be reached."""
CONTENT_BYTES = 512
_NAME = re.compile(r"\.lease-(\d{1,9})")
_BOOT, _SPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Holder:
    """Who writes a run.

    Attributes:
        process, host: process id and name of its machine.
        machine: identifies a start of the machine, and the numbers of its processes; "": unknown.
        started: when the process has started. On Linux in ticks since the start of the machine: clocks may be set.
        lease_s: for how long its lease holds.
        renewals: how often it has renewed its lease.
        released: whether it has ended, and has given up its lease.
    """

    process: int
    host: str
    machine: str
    started: float
    lease_s: float
    renewals: int = 0
    released: bool = False

    @classmethod
    def this(cls, lease_s: float) -> Holder:
        """This process."""
        started = _started(os.getpid())
        return cls(os.getpid(), platform.node(), "" if started is None else _machine(), started or 0, lease_s)

    def is_gone(self) -> bool:
        """Whether it has ended, as far as this machine can know."""
        if self.released:
            return True
        if not self.machine or self.machine != _machine():
            return False
        started = _started(self.process)
        return started is not None and started != self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" if self.process else "another process"


UNKNOWN = Holder(0, "", "", 0, LEASE_S)


class Lease:
    """A lease of a run folder, from the moment that this process has it.

    Args:
        folder: of the run.
        lease_s: for how long it holds without a renewal.
        lost: is called by a thread, with a sentence, when the lease is lost and the process has not given it up
            GRACE_S later: it must end the process.
        renamed: the present path of the folder. Raises UserError: it was removed.
        patience_s: seconds for which it waits for a writer that still renews its lease; 0: such a writer keeps the run.

    Attributes:
        generation: the number of this writer, from 1.
        path: the file of this lease.
        ends_s: when the lease ends, on CLOCK.

    Raises:
        UserError: another process holds it, or the file system refuses it.
        StopAsked: this process was asked to stop, while it waited (base/early.py).
    """

    def __init__(
        self,
        folder: Path,
        lost: Callable[[str], object],
        lease_s: float = LEASE_S,
        renamed: Callable[[], Path] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self.folder, self.lease_s, self._lost, self._renamed = folder, lease_s, lost, renamed
        self._holder, self.generation, self.ends_s, self.path = Holder.this(lease_s), 0, 0.0, folder
        self._released, self._guard = threading.Event(), threading.Lock()
        with user_errors(folder):
            found = _newest(folder)
            if found is not None and not found[1].is_gone():
                self._await_end(*found, patience_s)
            self._become(0 if found is None else found[0])
        for name, act in (("renew", self._renew_often), ("watch", self._watch)):
            threading.Thread(target=act, name=f"codescent lease: {name}", daemon=True).start()

    def follow(self, folder: Path) -> None:
        """The run folder was renamed."""
        with self._guard:
            self.folder, self.path = folder, folder / self.path.name

    def check(self) -> None:
        """Make sure that this process may write now. Raises RunFailed: another one writes the run."""
        with self._guard, user_errors(self.folder):
            if not self._released.is_set() and self._is_over():
                self._renew()
            if not os.path.lexists(self.path):
                raise self._taken()

    def release(self) -> None:
        """Give up the lease: another process may take it at once."""
        self._released.set()
        with self._guard, suppress(OSError, UserError):
            self._find()
            self._write(released=True)

    def _await_end(self, generation: int, holder: Holder, patience_s: float) -> None:
        """Wait until a lease has not been renewed for its time. Raises UserError: it is renewed; StopAsked."""
        waits_s, begin_s = holder.lease_s + GRACE_S, _now_s()
        seen_s, says_s = begin_s, begin_s + holder.lease_s / RENEWALS
        while _now_s() < seen_s + waits_s:
            raise_if_asked()
            time.sleep(min(0.2, holder.lease_s / 10))
            now = _newest(self.folder)
            if now is not None and now[0] == generation and now[1].released:
                return
            is_renewed = now != (generation, holder)
            if is_renewed and (now is None or now[0] != generation or _now_s() > begin_s + patience_s):
                raise UserError(f"{self.folder}: is being written by {holder}: wait for its end, or stop it")
            if is_renewed and now is not None:
                holder, seen_s = now[1], _now_s()
            if _now_s() > says_s:
                longest_s = waits_s + (patience_s if is_renewed else 0)
                progress([f"{self.folder}: {holder} has written this run and may still do: wait {longest_s:g} s"])
                says_s = math.inf

    def _become(self, before: int) -> None:
        """Become the writer after the one of this number. Raises RunFailed: another process has become it."""
        after = self.folder / _name(before + 1)
        try:
            if before:
                writing.move(self.folder / _name(before), after)
            else:
                writing.open_new(after).close()
        except (FileNotFoundError, FileExistsError):
            raise self._taken() from None
        self.generation, self.path, begin_s = before + 1, after, _now_s()
        replace_file(self.path, self._content())  # a writer of before that has the file open does not reach this one
        self.ends_s = begin_s + self.lease_s
        found = _newest(self.folder)
        if found is None or found[0] != self.generation:  # this process was stopped for so long
            with suppress(OSError):
                writing.remove_file(self.path, missing_ok=True)
            raise self._taken()

    def _renew_often(self) -> None:
        while not self._released.wait(self.lease_s / RENEWALS):
            with self._guard, suppress(OSError, UserError):  # `_watch` ends the process, if none succeeds
                if not self._released.is_set():
                    self._renew()

    def _renew(self) -> None:
        """Renew the lease. If it has ended meanwhile (this process was stopped), take it again, if nobody else has.

        Raises RunFailed: another process has it. Raises OSError: the folder cannot be reached.
        """
        self._find()
        if self._is_over():
            self._become(self.generation)
        else:
            self._write()

    def _find(self) -> None:
        """Follow the run folder, if it was renamed since the last write of the run."""
        if self._renamed is not None and not os.path.lexists(self.path):
            with suppress(UserError):
                self.folder = self._renamed()
                self.path = self.folder / self.path.name

    def _write(self, *, released: bool = False) -> None:
        begin_s = _now_s()
        self._holder = replace(self._holder, renewals=self._holder.renewals + 1, released=released)
        try:
            with writing.open_own(self.path) as file:
                file.write(self._content())
        except FileNotFoundError:
            raise self._taken() from None
        self.ends_s = begin_s + self.lease_s

    def _content(self) -> bytes:
        """One line. Its length does not change: whoever reads while it is written anew gets the old or the new one."""
        return json.dumps(asdict(self._holder)).ljust(CONTENT_BYTES - 1).encode() + b"\n"

    def _watch(self) -> None:
        """End the process if its lease has ended, and could not be renewed."""
        while not self._released.wait(max(0.05, self.ends_s - _now_s())):
            if not self._is_over():
                continue
            if self._released.wait(GRACE_S) or not self._is_over():
                continue  # renewed: this process was only stopped for a time
            return self._say_lost()

    def _is_over(self) -> bool:
        return _now_s() > self.ends_s

    def _say_lost(self) -> None:
        said: list[str] = []
        look = threading.Thread(
            target=lambda: said.append(str(self._taken())), daemon=True
        )  # the folder may not answer
        look.start()
        look.join(SEEN_S)
        self._lost(said[0] if said else f"{self.folder}: does not answer for {self.lease_s:g} s: this process ends")

    def _taken(self) -> RunFailed:
        """An error that says who has the lease."""
        try:
            now = _newest(self.folder)
            if now is None or now[0] < self.generation:
                why = f"{self.path.name} was deleted, by which one process at a time writes this run"
            elif now[0] > self.generation:
                why = f"{now[1]} writes this run now"
            else:
                why = f"this process could not renew its lease for {self.lease_s:g} s"
        except FileNotFoundError:
            why = "the run folder was removed, or moved to another disk"
        except OSError:
            why = "another process writes this run now, or its folder cannot be read"
        return RunFailed(f"{self.folder}: {why}: this process ends, and writes nothing more")


def _newest(folder: Path) -> tuple[int, Holder] | None:
    """The number of the newest writer of a run, and who it is; None: it had none. Raises OSError."""
    numbers = [int(match[1]) for one in folder.iterdir() if (match := _NAME.fullmatch(one.name))]
    if not numbers:
        return None
    newest = max(numbers)
    try:
        return newest, _holder(read_bytes(folder / _name(newest), CONTENT_BYTES))
    except FileNotFoundError:
        if os.path.lexists(folder / _name(newest)):  # a link that leads nowhere
            return newest, UNKNOWN
        return _newest(folder)  # renamed meanwhile


def _holder(content: bytes) -> Holder:
    """Who has written a lease. UNKNOWN: it is made now, or not by this program."""
    try:
        holder = Holder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return UNKNOWN
    kinds = {"process": int, "host": str, "machine": str, "renewals": int, "released": bool}
    numbers = all(isinstance(value, (int, float)) for value in (holder.started, holder.lease_s))
    fits = numbers and all(isinstance(getattr(holder, name), kind) for name, kind in kinds.items())
    return holder if fits and 0 < holder.lease_s <= MOST_S else UNKNOWN


def _name(generation: int) -> str:
    return f".lease-{generation}"


def _machine() -> str:
    """Identifies a start of this machine, and the numbers of its processes: containers of Linux have their own."""
    try:
        return f"{read_bytes(_BOOT, 64).decode().strip()} {_SPACE.readlink()}"
    except OSError:
        return f"{platform.node()} {psutil.boot_time() // 60:.0f}" if sys.platform == "darwin" else ""


def _started(process: int) -> float | None:
    """When a process has started; 0: it has ended; None: this system cannot tell. See Holder."""
    if sys.platform == "darwin":
        try:
            return psutil.Process(process).create_time()
        except psutil.NoSuchProcess:
            return 0
        except psutil.Error:
            return None
    fields = stat_of(process)
    return None if fields is None else int(fields[19]) if len(fields) > 19 else 0


def _now_s() -> float:
    return time.clock_gettime(CLOCK)
