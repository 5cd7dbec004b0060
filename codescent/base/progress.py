"""In: what a rank does now: step, instruction, collectives. Out: a page of shared memory for each rank of this machine.
Ranks write their pages, the launcher reads them. Does not decide which rank is late (launch/verdict.py does)."""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from codescent.base.call import Call
from codescent.base.memory_file import file_of_memory
from codescent.base.page import GroupUse, Page, Took

PROGRESS_FD = "CODESCENT_PROGRESS_FD"
"""Environment variable with the file descriptor of the shared memory. The launcher sets it for each rank."""

ENDED = math.inf
"""Position of a rank whose training has returned: after the last step, or after a stop that was requested."""

READING = "reading"
"""The section in which a rank waits for its samples."""
PREPARATION, SCRIPT, ANSWERS = "preparation", "script", "answers"
"""The sections in which ranks wait until data is prepared, in which an own loop has not taken a step, and in which the
model writes answers that get rewards."""

GROUPS, SECTIONS = 16, 12
"""Rows of a page for process groups, and for sections. Further ones are not on the page."""
FOLDER_BYTES, SLOWEST_BYTES, HUB_BYTES = 1024, 64, 64
CALL_BYTES = 1 << 15
"""A call names each process of a machine, with about 14 bytes."""
_NUMBER = struct.Struct("<q")
_TEXT_BYTES = FOLDER_BYTES + SLOWEST_BYTES + HUB_BYTES
BEAT_EVERY_S = 1.0

_WHERE = struct.Struct("<ddq24s")  # position, time, stage, instruction
_SECTION = struct.Struct("<24sd")  # name, since
_LAST = struct.Struct("<qq")  # number of collectives, row of the last
_MOMENT = struct.Struct("<d")
_GROUP = struct.Struct("<qqqd16s24s")  # id, number of collectives, bytes, since, kind, axis
_SPENT = struct.Struct("<24sqd")  # name of a section, how often it has ended, seconds of the last time
_AT_SECTION = _WHERE.size
_AT_LAST = _AT_SECTION + _SECTION.size
_AT_MEETING = _AT_LAST + _LAST.size
_AT_DEATH = _AT_MEETING + _MOMENT.size
_AT_BEAT = _AT_DEATH + _MOMENT.size
_AT_FAILURE = _AT_BEAT + _MOMENT.size
_TOOK = struct.Struct("<q2d")  # steps, seconds of reading, of computing
_AT_TOOK = _AT_FAILURE + _MOMENT.size
_PROCESS = struct.Struct("<3q")  # process id, descriptor of the file for stacks, its inode
_AT_PROCESS = _AT_TOOK + _TOOK.size
_AT_GROUPS = _AT_PROCESS + _PROCESS.size
_AT_SPENT = _AT_GROUPS + GROUPS * _GROUP.size
PAGE_BYTES = _AT_SPENT + SECTIONS * _SPENT.size


class Pages:
    """The pages of all ranks of a machine. The launcher can read the page of a rank that is stopped or hangs."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.ranks = ranks
        self.memory = mmap.mmap(descriptor, _all_bytes(ranks))

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Pages | None:
        """Open the memory that the launcher passed to this rank; None if it passed none."""
        text = env.get(PROGRESS_FD, "")
        if not text.isdigit():
            return None
        return cls(int(text), (os.fstat(int(text)).st_size - _all_bytes(0)) // PAGE_BYTES)

    def read(self, rank: int) -> Page:
        """Read a page."""
        start = rank * PAGE_BYTES
        position, time_s, stage, instruction = _WHERE.unpack_from(self.memory, start)
        section, section_s = _SECTION.unpack_from(self.memory, start + _AT_SECTION)
        collectives, row = _LAST.unpack_from(self.memory, start + _AT_LAST)
        meets, died_s, beat_s, failed_s = struct.unpack_from("<4d", self.memory, start + _AT_MEETING)
        rows = [self._group(start, index) for index in range(GROUPS)]
        return Page(
            position=position,
            time_s=time_s,
            stage=stage,
            instruction=_text(instruction),
            section=_text(section),
            section_s=section_s,
            collectives=collectives,
            last=rows[row] if collectives and 0 <= row < GROUPS else None,
            groups=tuple(one for one in rows if one.group),
            spent=tuple(self._spent(start)),
            meets=int(meets),
            died_s=died_s,
            beat_s=beat_s,
            failed_s=failed_s,
            took=Took(*_TOOK.unpack_from(self.memory, start + _AT_TOOK)),
        )

    def process(self, rank: int) -> tuple[int, int, int]:
        """Of a rank that our launcher has not started: its process, its file for stacks, and the inode of this file. 0:
        the rank has not come."""
        pid, descriptor, inode = _PROCESS.unpack_from(self.memory, rank * PAGE_BYTES + _AT_PROCESS)
        return pid, descriptor, inode

    def clear(self, rank: int) -> None:
        """The launcher forgets what a rank has done: it begins anew."""
        start = rank * PAGE_BYTES
        self.memory[start : start + PAGE_BYTES] = bytes(PAGE_BYTES)

    @property
    def call(self) -> Call:
        """The last call of the launcher."""
        start = self.ranks * PAGE_BYTES + _TEXT_BYTES
        while (number := _NUMBER.unpack_from(self.memory, start)[0]) > 0:
            found = Call.of(self.memory[start + _NUMBER.size : start + CALL_BYTES].rstrip(b"\0"))
            if found is not None and found.number == number:
                return found
        return Call()

    @call.setter
    def call(self, call: Call) -> None:
        start, written = self.ranks * PAGE_BYTES + _TEXT_BYTES, call.to_bytes()
        assert len(written) <= CALL_BYTES - _NUMBER.size
        self.memory[start + _NUMBER.size : start + CALL_BYTES] = written.ljust(CALL_BYTES - _NUMBER.size, b"\0")
        _NUMBER.pack_into(self.memory, start, call.number)  # last: who reads an older number reads again

    def lose(self, rank: int, now_s: float) -> Page:
        """The launcher writes that a rank has died, and the others go on. Returns its page."""
        _MOMENT.pack_into(self.memory, rank * PAGE_BYTES + _AT_DEATH, now_s)
        return self.read(rank)

    @property
    def folder(self) -> str:
        """The path of the run folder that a rank has written; "": none has."""
        return self._read_text(0, FOLDER_BYTES)

    @folder.setter
    def folder(self, path: str) -> None:
        if len(os.fsencode(path)) < FOLDER_BYTES:
            self._write_text(0, FOLDER_BYTES, path)

    @property
    def slowest(self) -> str:
        """The rank that slows the others, as the launcher has found it, in a few words; "": none does."""
        return self._read_text(FOLDER_BYTES, SLOWEST_BYTES)

    @slowest.setter
    def slowest(self, words: str) -> None:
        self._write_text(FOLDER_BYTES, SLOWEST_BYTES, words)

    @property
    def hub(self) -> str:
        """Where the supervisor of the host of rank 0 serves those of other hosts: address and port; "": unknown."""
        return self._read_text(FOLDER_BYTES + SLOWEST_BYTES, HUB_BYTES)

    @hub.setter
    def hub(self, place: str) -> None:
        self._write_text(FOLDER_BYTES + SLOWEST_BYTES, HUB_BYTES, place)

    def _read_text(self, offset: int, size: int) -> str:
        start = self.ranks * PAGE_BYTES + offset
        return _text(self.memory[start : start + size])

    def _write_text(self, offset: int, size: int, text: str) -> None:
        start = self.ranks * PAGE_BYTES + offset
        self.memory[start : start + size] = os.fsencode(text)[:size].ljust(size, b"\0")

    def _group(self, start: int, index: int) -> GroupUse:
        group, number, size, since_s, kind, axis = _GROUP.unpack_from(
            self.memory, start + _AT_GROUPS + index * _GROUP.size
        )
        return GroupUse(group, number, size, since_s, _text(kind), _text(axis))

    def _spent(self, start: int) -> list[tuple[str, int, float]]:
        rows = [_SPENT.unpack_from(self.memory, start + _AT_SPENT + index * _SPENT.size) for index in range(SECTIONS)]
        return [(_text(name), often, seconds) for name, often, seconds in rows if often]


class OwnPage:
    """The page of this rank, which writes it.

    Attributes:
        current: of the run that this process takes part in; None: its launcher passed none.
        section: as on the page.
        rows: the row of each process group, by a number that the caller chooses.
    """

    current: ClassVar[OwnPage | None] = None

    def __init__(self, pages: Pages, rank: int) -> None:
        self.pages, self._memory, self._start, self._collectives = pages, pages.memory, rank * PAGE_BYTES, 0
        self.rows: dict[int, int] = {}
        self._took = Took()
        self._numbers: list[int] = []  # of collectives, by row
        self._axes: list[tuple[int, bytes]] = []
        self._spent: dict[str, tuple[int, int]] = {}  # row and count of each section
        self.section, self._section_s, self._failed_s = "", 0.0, 0.0

    def begin(self) -> None:
        """This page is that of the process from now on. A thread beats as long as it is."""
        OwnPage.current = self
        threading.Thread(target=self._beat, name="codescent heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while OwnPage.current is self:
            self.beat()
            time.sleep(BEAT_EVERY_S)

    def at(self, position: float, stage: int = 0, instruction: str = "") -> None:
        """Write where this rank is: see Page."""
        _WHERE.pack_into(self._memory, self._start, position, time.monotonic(), stage, instruction.encode())

    def enter(self, section: str) -> str:
        """Write what is done beside the instructions; "": nothing more. Returns the section of before."""
        now_s, before = time.monotonic(), self.section
        if before:
            row, often = self._spent.get(before, (len(self._spent), 0))
            self._spent[before] = row, often + 1
            if row < SECTIONS:
                at = self._start + _AT_SPENT + row * _SPENT.size
                _SPENT.pack_into(self._memory, at, before.encode(), often + 1, now_s - self._section_s)
        self.section, self._section_s = section, now_s
        _SECTION.pack_into(self._memory, self._start + _AT_SECTION, section.encode(), now_s)
        return before

    def join(self, axis: str, ranks: Sequence[int]) -> int:
        """This rank belongs to a process group. Returns the row of its collectives."""
        group = zlib.crc32(f"{axis} {','.join(map(str, ranks))}".encode()) + 1  # 0: an empty row
        self._numbers.append(0)
        self._axes.append((group, axis.encode()))
        row = len(self._numbers) - 1
        self._write(row, b"", 0, 0.0)
        return row

    def leave_groups(self) -> None:
        """The process groups of this rank are over. Others come."""
        self.rows.clear()
        self._numbers.clear()
        self._axes.clear()
        _LAST.pack_into(self._memory, self._start + _AT_LAST, self._collectives, -1)
        begin = self._start + _AT_GROUPS
        self._memory[begin : begin + GROUPS * _GROUP.size] = bytes(GROUPS * _GROUP.size)

    def collective(self, row: int, kind: bytes, size_bytes: int = 0) -> None:
        """Write that a collective begins in the group of this row."""
        self._collectives += 1
        self._numbers[row] += 1
        self._write(row, kind, size_bytes, time.monotonic())
        _LAST.pack_into(self._memory, self._start + _AT_LAST, self._collectives, row)

    def meet(self, step: int) -> None:
        """Write that this rank is in the collectives after this step, or will be in them; 0: it is in none."""
        _MOMENT.pack_into(self._memory, self._start + _AT_MEETING, step)

    def come_again(self) -> None:
        """This process was started for a rank that has died: from now on the rank lives."""
        _MOMENT.pack_into(self._memory, self._start + _AT_DEATH, 0.0)

    def answers(self, pid: int, descriptor: int) -> None:
        """Write for a supervisor that has not started this rank: its process, and its file for stacks."""
        row = pid, descriptor, os.fstat(descriptor).st_ino
        _PROCESS.pack_into(self._memory, self._start + _AT_PROCESS, *row)

    def beat(self) -> None:
        """Write that a thread of this rank has the GIL now."""
        _MOMENT.pack_into(self._memory, self._start + _AT_BEAT, time.monotonic())

    def fail(self, *, is_consequence: bool) -> None:
        """Write that an error ends this rank. `is_consequence`: it only says that another rank does not answer."""
        self._failed_s = self._failed_s or time.monotonic()
        signed_s = -self._failed_s if is_consequence else self._failed_s
        _MOMENT.pack_into(self._memory, self._start + _AT_FAILURE, signed_s)

    def took(self, reading_s: float, computing_s: float) -> None:
        """Write that a step is done, and what it took without waiting for other ranks."""
        before = self._took
        self._took = Took(before.steps + 1, before.reading_s + reading_s, before.computing_s + computing_s)
        row = self._took.steps, self._took.reading_s, self._took.computing_s
        _TOOK.pack_into(self._memory, self._start + _AT_TOOK, *row)

    def _write(self, row: int, kind: bytes, size_bytes: int, since_s: float) -> None:
        if row < GROUPS:
            group, axis = self._axes[row]
            at = self._start + _AT_GROUPS + row * _GROUP.size
            _GROUP.pack_into(self._memory, at, group, self._numbers[row], size_bytes, since_s, kind, axis)


def shared_memory(ranks: int) -> int:
    """Create shared memory for `ranks` ranks. Returns its descriptor. The last process that closes it frees it."""
    descriptor = file_of_memory("codescent progress")
    os.ftruncate(descriptor, _all_bytes(ranks))
    return descriptor


def _all_bytes(ranks: int) -> int:
    return ranks * PAGE_BYTES + _TEXT_BYTES + CALL_BYTES


def _text(stored: bytes) -> str:
    """Text as it was stored: cut at the end of its place, perhaps while it was being written."""
    return stored.rstrip(b"\0").decode("utf-8", errors="replace")
