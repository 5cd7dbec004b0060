"""In: an instruction that a rank executes. Out: its position is written; its time and its memory are measured.
Does not execute it (execute.py does) and does not keep results: the stopwatch and the memory watch do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from codescent.base.range_names import WAITING
from codescent.base.ranges import Recording, named
from codescent.base.stopwatch import Stopwatch
from codescent.plan import Instruction, Verb
from codescent.train.memory import MemoryWatch
from codescent.train.result import WAIT_COLUMN
from codescent.train.world import World

PROFILER = "profiler"
"""What a profile costs between instructions. It is in no metrics column but other_s."""


class Instruments:
    """The instruments of a rank: the launcher's page, ranges of a profile, columns of time, memory.

    Args:
        world: of this rank; it writes the page.
        watch: counts the time of each column.
        memory: counts the memory.
        columns: the metrics column that is charged with a verb.
    """

    def __init__(self, world: World, watch: Stopwatch, memory: MemoryWatch, columns: Mapping[Verb, str]) -> None:
        self.world, self.watch, self.memory, self.columns = world, watch, memory, columns

    @contextmanager
    def around(self, position: float, index: int, instruction: Instruction) -> Iterator[None]:
        """A block that executes an instruction.

        Args:
            position: of the rank when it is done, in steps.
            index: of the instruction in the list of this stage.
            instruction: its verb decides which column is charged.
        """
        self.world.at(position, instruction.verb)
        self.watch.part = column = self.columns[instruction.verb]
        with named(instruction):
            if Recording.on:
                self.watch.lap(PROFILER)
            with named(WAITING) if column == WAIT_COLUMN else nullcontext():
                yield
                self.watch.lap(column)
        self.memory.after(index)
