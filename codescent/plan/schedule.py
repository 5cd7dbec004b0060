"""In: nothing. Out: `Verb`, the types of instruction (FORWARD, STEP, ...); `Schedule`, an instruction list per stage.
Does not run the instructions (train/execute.py and cost/simulate.py do) and holds no costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Verb(StrEnum):
    """Type of an instruction. A new type needs code in the simulator and the executor, and a decision note."""

    LOAD = "load"  # copy a micro-batch to the device
    FORWARD = "forward"  # forward pass of one chunk; the last chunk computes the loss
    BACKWARD = "backward"  # backward pass of one chunk; adds to its gradients
    REDUCE = "reduce"  # finish the gradient reduction
    STEP = "step"  # sum the SCALARS over all ranks; update the weights
    BACKWARD_INPUT = "backward_input"  # first part of BACKWARD: gradients of activations
    BACKWARD_WEIGHT = "backward_weight"  # second part of BACKWARD: gradients of weights
    SEND_ACTIVATION = "send_activation"  # output of FORWARD, to the next virtual stage
    RECEIVE_ACTIVATION = "receive_activation"  # input of FORWARD
    SEND_GRADIENT = "send_gradient"  # output of BACKWARD, to the previous virtual stage
    RECEIVE_GRADIENT = "receive_gradient"  # input of BACKWARD


SCALARS = 3
"""Number of values that STEP sums over all ranks: loss, number of ranks with a stop request, squared gradient norm."""

SENDS: frozenset[Verb] = frozenset({Verb.SEND_ACTIVATION, Verb.SEND_GRADIENT})
RECEIVES: frozenset[Verb] = frozenset({Verb.RECEIVE_ACTIVATION, Verb.RECEIVE_GRADIENT})


@dataclass(frozen=True)
class Instruction:
    """One entry of an instruction list.

    Attributes:
        microbatch: index of its micro-batch; None for REDUCE and STEP.
        last: marks the last BACKWARD or BACKWARD_WEIGHT of a chunk, which completes the gradients. The gradient
            reduction may begin during it.
        chunk: index of the virtual stage within its stage (see `Schedule`).
        peer: for sends and receives: the other stage.
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
    """The instruction lists of one step.

    `programs[stage]` is the list of every rank of that pipeline stage.
    `depths[number]` is the model part of virtual stage `number`: depths [first, end) (see `Parameter.depths`).
    Of p stages, chunk c of stage s is virtual stage c p + s.
    """

    programs: tuple[tuple[Instruction, ...], ...]
    depths: tuple[tuple[int, int], ...] = ()

    def parts(self, stage: int) -> list[range]:
        """The depths of each chunk of a stage, as ranges."""
        return [range(first, stop) for first, stop in self.depths[stage :: len(self.programs)]]

    def stages_of(self, depths: Iterable[int]) -> tuple[int, ...]:
        """The stages that compute the given depths, each once."""
        return tuple(dict.fromkeys(self._stage_at[depth] for depth in depths))

    def most_in_flight(self, stage: int, until: int | None = None) -> int:
        """The most forward passes of chunks that wait for their backward pass at once on a stage, at least 1.

        `until`: look at so many instructions only.
        """
        return max([1, *self._in_flight(stage, until)])

    def in_flight(self, stage: int, until: int) -> int:
        """The forward passes that wait for their backward pass after so many instructions of a stage."""
        return [0, *self._in_flight(stage, until)][-1]

    def _in_flight(self, stage: int, until: int | None) -> Iterator[int]:
        begins, ends = (Verb.FORWARD,), (Verb.BACKWARD, Verb.BACKWARD_INPUT)
        waiting = 0
        for instruction in self.programs[stage][:until]:
            waiting += (instruction.verb in begins) - (instruction.verb in ends)
            yield waiting

    @cached_property
    def _stage_at(self) -> tuple[int, ...]:
        """The stage that computes each depth."""
        parts = (((first, stop), number % len(self.programs)) for number, (first, stop) in enumerate(self.depths))
        return tuple(stage for (first, stop), stage in parts for _ in range(first, stop))

    @cached_property
    def weight_verb(self) -> Verb:
        """The instruction type that computes weight gradients."""
        verbs = {at.verb for program in self.programs for at in program}
        return Verb.BACKWARD_WEIGHT if Verb.BACKWARD_WEIGHT in verbs else Verb.BACKWARD

    @property
    def input_verb(self) -> Verb:
        """The instruction type that computes activation gradients."""
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
