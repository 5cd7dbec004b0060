"""In: files of memory that ranks write their stacks to. Out: file, line and function of every thread of every rank.
Does not write stacks: faulthandler does, in the rank (base/stacks.py). A process that is stopped writes none."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from codescent.base.memory_file import file_of_memory
from codescent.base.stacks import ASKS, STACKS_FD, borrowed, named

ANSWER_S, QUIET_S, LOOK_S = 1.0, 0.1, 0.02
"""Seconds in which a rank answers; after which an answer that does not grow is whole; between two looks."""
MOST_BYTES = 1 << 20
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_WAITS = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/codescent/strategies/by_messages",
    "/codescent/strategies/collectives",
    "/codescent/train/messages",
    "/codescent/meeting/",
)
"""Files in which a rank waits for others. torch waits for gradients of other ranks inside of backward."""


@dataclass(frozen=True)
class StackFrame:
    """A place in a program."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stacks:
    """The files for the stacks of the ranks of this machine."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # by rank
        self._slots: dict[int, int] = {}  # by number of the start

    def environment(self, slot: int) -> tuple[int, dict[str, str]]:
        """The descriptor that a new process inherits, and the variable that names it. The first slots are ranks."""
        if slot not in self._slots:
            self._slots[slot] = self._files[slot] = file_of_memory(f"codescent stacks {slot}")
        return self._slots[slot], {STACKS_FD: named(self._slots[slot])}

    def release(self, slot: int) -> None:
        """The process of this slot has ended: close its file. What it has written was read when it was asked."""
        if (descriptor := self._slots.pop(slot, None)) is not None:
            self._files = {rank: found for rank, found in self._files.items() if found != descriptor}
            os.close(descriptor)

    def renumber(self, slots: Mapping[int, int]) -> None:
        """From now on the ranks are the processes of these slots."""
        self._files = {rank: self._slots[slot] for rank, slot in slots.items() if slot in self._slots}

    def adopt(self, rank: int, pid: int, descriptor: int, inode: int) -> None:
        """The file that a rank has made itself, which this process has not started."""
        found = borrowed(pid, descriptor, inode)
        if found is not None:
            self._files[rank] = found

    def ask(self, pids: Mapping[int, int]) -> dict[int, str]:
        """The stacks of these ranks, by rank. A rank that does not answer in ANSWER_S is left out."""
        begins = {rank: os.fstat(self._files[rank]).st_size for rank in pids if rank in self._files}
        for rank in begins:
            with suppress(ProcessLookupError):
                os.kill(pids[rank], ASKS)
        sizes, grown_s, end_s = dict(begins), dict.fromkeys(begins, 0.0), time.monotonic() + ANSWER_S
        while (now_s := time.monotonic()) < end_s:
            for rank, descriptor in self._files.items():
                if rank in sizes and (size := os.fstat(descriptor).st_size) != sizes[rank]:
                    sizes[rank], grown_s[rank] = size, now_s
            if all(grown and now_s - grown > QUIET_S for grown in grown_s.values()):
                break
            time.sleep(LOOK_S)
        found = {rank: sizes[rank] - begin for rank, begin in begins.items() if sizes[rank] > begin}
        return {
            rank: os.pread(self._files[rank], min(size, MOST_BYTES), begins[rank]).decode(errors="replace")
            for rank, size in found.items()
        }

    def close(self) -> None:
        """Close the files."""
        for descriptor in {*self._files.values(), *self._slots.values()}:
            os.close(descriptor)
        self._files.clear()
        self._slots.clear()


def main_thread(text: str) -> list[StackFrame]:
    """The frames of the main thread, innermost first. faulthandler writes the oldest thread last."""
    frames: list[StackFrame] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(StackFrame(found["file"], found["line"], found["function"]))
    return frames


def waits_for_others(frames: list[StackFrame]) -> bool:
    """Whether a thread is in a call that waits for other ranks, by the files of its innermost frames."""
    return any(part in frame.file for frame in frames[:4] for part in _WAITS)
