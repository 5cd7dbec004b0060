"""In: verbs. Out: the instruction list of each pipeline stage, the one description that simulator and executor walk.
Does not run anything and holds no cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verb(StrEnum):
    """What a rank can be told to do. A new verb needs a simulator arm, an executor arm and a decision note."""

    LOAD = "load"  # take the micro-batch from the loader
    FORWARD = "forward"  # compute its loss
    BACKWARD = "backward"  # add its gradients
    REDUCE = "reduce"  # sum the gradients and the loss over the data-parallel ranks
    STEP = "step"  # update the weights


@dataclass(frozen=True)
class Instruction:
    """One verb, for one micro-batch where the verb is about one.

    `last` marks the BACKWARD after which the gradients are complete: what REDUCE sends may leave while it runs.
    """

    verb: Verb
    microbatch: int | None = None
    last: bool = False

    def __str__(self) -> str:
        return self.verb if self.microbatch is None else f"{self.verb} {self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """`programs[stage]` is what every rank of that pipeline stage does in one step, in order."""

    programs: tuple[tuple[Instruction, ...], ...]


def accumulate(num_microbatches: int) -> Schedule:
    """The schedule of one stage: forward and backward of each micro-batch in turn, then reduce and step."""
    program: list[Instruction] = []
    for microbatch in range(num_microbatches):
        program += [
            Instruction(Verb.LOAD, microbatch),
            Instruction(Verb.FORWARD, microbatch),
            Instruction(Verb.BACKWARD, microbatch, last=microbatch == num_microbatches - 1),
        ]
    program += [Instruction(Verb.REDUCE), Instruction(Verb.STEP)]
    return Schedule((tuple(program),))
