"""In: verbs. Out: the instruction list of each pipeline stage, the one description that simulator and executor walk.
Does not run anything and holds no cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Verb(StrEnum):
    """What a rank can be told to do. A new verb needs a simulator arm, an executor arm and a decision note."""

    LOAD = "load"  # copy a micro-batch of this step to the device
    FORWARD = "forward"  # of one chunk: its activations, or the loss
    BACKWARD = "backward"  # of one chunk: add its gradients
    REDUCE = "reduce"  # end the sums of the gradients over their ranks; sum the losses over all ranks
    STEP = "step"  # update the weights
    BACKWARD_INPUT = (
        "backward_input"  # the first part of BACKWARD: gradients of activations, for which the stage before waits
    )
    BACKWARD_WEIGHT = "backward_weight"  # the rest of BACKWARD: add the gradients of weights
    SEND_ACTIVATION = "send_activation"  # what FORWARD made, to the next virtual stage
    RECEIVE_ACTIVATION = "receive_activation"  # what FORWARD will read
    SEND_GRADIENT = "send_gradient"  # what BACKWARD made, to the virtual stage before
    RECEIVE_GRADIENT = "receive_gradient"  # what BACKWARD will read


SCALARS = 2
"""Numbers that REDUCE sums over all ranks: the loss, and how many ranks were asked to stop."""

SENDS: frozenset[Verb] = frozenset({Verb.SEND_ACTIVATION, Verb.SEND_GRADIENT})
RECEIVES: frozenset[Verb] = frozenset({Verb.RECEIVE_ACTIVATION, Verb.RECEIVE_GRADIENT})


@dataclass(frozen=True)
class Instruction:
    """One verb, for one micro-batch where the verb is about one.

    `last` marks the BACKWARD or BACKWARD_WEIGHT after which the gradients of its chunk are complete: what REDUCE sends
    may leave while it runs. `chunk` counts the virtual stages of one rank (see `Schedule`). `peer` is the stage at the
    other end of a send or a receive.
    """

    verb: Verb
    microbatch: int | None = None
    last: bool = False
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        number = "" if self.microbatch is None else f" {self.microbatch}"
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        end = "" if self.peer is None else f" {'to' if self.verb in SENDS else 'from'} stage {self.peer}"
        return f"{self.verb}{number}{chunk}{end}"


@dataclass(frozen=True)
class Schedule:
    """`programs[stage]` is what every rank of that pipeline stage does in one step, in order.

    `depths[number]` is the part of the model that is virtual stage `number`: its first depth (see `Parameter.depths`)
    and the one after its last. Chunk c of stage s is virtual stage c p + s; p counts the stages.
    """

    programs: tuple[tuple[Instruction, ...], ...]
    depths: tuple[tuple[int, int], ...] = ()

    def parts(self, stage: int) -> list[range]:
        """The depths of each chunk of a stage."""
        return [range(first, stop) for first, stop in self.depths[stage :: len(self.programs)]]

    def stages_of(self, depths: Iterable[int]) -> tuple[int, ...]:
        """The stages that compute these depths, each once."""
        return tuple(dict.fromkeys(self._stage_at[depth] for depth in depths))

    @cached_property
    def _stage_at(self) -> tuple[int, ...]:
        """The stage that computes each depth."""
        parts = (((first, stop), number % len(self.programs)) for number, (first, stop) in enumerate(self.depths))
        return tuple(stage for (first, stop), stage in parts for _ in range(first, stop))

    @cached_property
    def weight_verb(self) -> Verb:
        """The verb that computes the gradients of weights."""
        verbs = {at.verb for program in self.programs for at in program}
        return Verb.BACKWARD_WEIGHT if Verb.BACKWARD_WEIGHT in verbs else Verb.BACKWARD

    @property
    def input_verb(self) -> Verb:
        """The verb that computes the gradients of activations."""
        return Verb.BACKWARD_INPUT if self.weight_verb is Verb.BACKWARD_WEIGHT else Verb.BACKWARD


def accumulate(num_microbatches: int, num_depths: int = 1) -> Schedule:
    """The schedule of one stage: forward and backward of each micro-batch in turn, then reduce and step."""
    program: list[Instruction] = []
    for microbatch in range(num_microbatches):
        program += [
            Instruction(Verb.LOAD, microbatch),
            Instruction(Verb.FORWARD, microbatch),
            Instruction(Verb.BACKWARD, microbatch, last=microbatch == num_microbatches - 1),
        ]
    program += [Instruction(Verb.REDUCE), Instruction(Verb.STEP)]
    return Schedule((tuple(program),), ((0, num_depths),))
