"""In: nothing. Out: what a rank does, as data: where it is, its collectives, what its steps have taken.
Does not know how it is stored (progress.py does)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupUse:
    """The last collective that a rank has begun in a process group.

    Attributes:
        group: stands for the group: equal on its ranks, and on no others.
        number: of the collective in this group, from 1; 0: the rank has begun none.
        size_bytes: of its first buffer; 0: unknown.
        since_s: when it began, by time.monotonic.
        kind: such as "all_reduce".
        axis: of the mesh, or the group's name.
    """

    group: int
    number: int = 0
    size_bytes: int = 0
    since_s: float = 0.0
    kind: str = ""
    axis: str = ""

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis}"


@dataclass(frozen=True)
class Took:
    """What steps have taken on a rank, all together, without waiting for other ranks."""

    steps: int = 0
    reading_s: float = 0.0
    computing_s: float = 0.0

    @property
    def work_s(self) -> float:
        """Seconds of reading and of computing."""
        return self.reading_s + self.computing_s

    def since(self, before: Took) -> Took:
        """Of the steps since then."""
        reading_s, computing_s = self.reading_s - before.reading_s, self.computing_s - before.computing_s
        return Took(self.steps - before.steps, reading_s, computing_s)


@dataclass(frozen=True)
class Page:
    """What a rank does.

    Attributes:
        position: the number of steps done, plus the finished fraction of the stage's instruction list in this step. 0:
            the rank has not begun to train. Compare ranks of one stage only: stages have different lists.
        time_s: when the position was written, by time.monotonic, which is the same for all processes of a machine.
        stage: index of the rank's program in the plan.
        instruction: that is under way, such as "backward".
        section: what is done beside the instructions, such as "validation"; "": an instruction is under way.
        section_s: since when.
        collectives: how many collectives the rank has begun.
        last: the last of them; None: there was none.
        groups: the last collective in each group of the rank.
        spent: by section that has ended: how often, and the seconds of the last time.
        meets: the step after which the rank is in collectives with all others; 0: it is in none.
        died_s: when the launcher saw that the rank had died; 0: it lives.
        beat_s: when a thread of the rank had the GIL last; 0: no thread writes it.
        failed_s: when an error began to end the rank; 0: none has. Negative: the error only says that another rank
            does not answer.
        took: the seconds of the parts of the steps so far.
    """

    position: float = 0.0
    time_s: float = 0.0
    stage: int = 0
    instruction: str = ""
    section: str = ""
    section_s: float = 0.0
    collectives: int = 0
    last: GroupUse | None = None
    groups: tuple[GroupUse, ...] = ()
    spent: tuple[tuple[str, int, float], ...] = ()
    meets: int = 0
    died_s: float = 0.0
    beat_s: float = 0.0
    failed_s: float = 0.0
    took: Took = Took()

    @property
    def step(self) -> int | None:
        """The step that is under way, from 1; None: the training has returned."""
        return int(self.position) + 1 if math.isfinite(self.position) else None

    @property
    def moved(self) -> tuple[object, ...]:
        """What changes when the rank makes progress."""
        return self.position, self.time_s, self.instruction, self.section, self.section_s, self.collectives, self.meets
