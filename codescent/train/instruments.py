"""In: the instructions that a rank executes. Out: its position is written; time and memory of each are measured.
Does not execute them (execute.py does) and does not keep results: the stopwatch and the memory watch do."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from codescent.base import cause
from codescent.base.progress import READING, OwnPage
from codescent.base.range_names import NEXT_BATCH, WAITING
from codescent.base.ranges import Recording, named
from codescent.base.stopwatch import Stopwatch
from codescent.plan import Instruction, Verb
from codescent.train.memory import MemoryWatch
from codescent.train.result import WAIT_COLUMN

_NOTHING = nullcontext()
PROFILER = "profiler"
"""What a profile costs between instructions. It is in no metrics column but other_s."""


class Instruments:
    """The instruments of a rank: the launcher's page, ranges of a profile, columns of time, memory.

    Args:
        watch: counts the time of each column.
        memory: counts the memory.
        columns: the metrics column that is charged with a verb.
        stage: of this rank, for the page.
    """

    def __init__(self, watch: Stopwatch, memory: MemoryWatch, columns: Mapping[Verb, str], stage: int) -> None:
        self.watch, self.memory, self.columns, self.stage = watch, memory, columns, stage

    def each(self, program: Sequence[Instruction], number: int) -> Generator[Instruction]:
        """Yield each instruction of a list. What the caller does with it, before it asks for the next one, is measured.

        `number`: of the step (from 0). A rank's position there is the fraction of the list that will be done.
        """
        page, cause.process.position = OwnPage.current, number
        for index, instruction in enumerate(program):
            if page is not None:
                page.at(number + (index + 1) / (len(program) + 1), self.stage, instruction.verb)
            self.watch.part = column = self.columns[instruction.verb]
            with self._ranges(instruction, column) if Recording.on else _NOTHING:
                yield instruction
                self.watch.lap(column)
            self.memory.after(index)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block that takes this rank's samples from the loader."""
        page = OwnPage.current
        if page is not None:
            page.enter(READING)
        with named(NEXT_BATCH) if Recording.on else _NOTHING:
            yield
        if page is not None:
            page.enter("")
        self.watch.lap(self.columns[Verb.LOAD])

    @contextmanager
    def _ranges(self, instruction: Instruction, column: str) -> Iterator[None]:
        """The ranges of an instruction in a profile."""
        with named(instruction):
            self.watch.lap(PROFILER)
            with named(WAITING) if column == WAIT_COLUMN else _NOTHING:
                yield
