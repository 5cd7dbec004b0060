"""In: nothing. Out: `Verb`, the types of instruction (FORWARD, STEP, ...); `Schedule`, an instruction list per stage.
Does not run the instructions (train/execute.py and cost/simulate.py do) and holds no costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from codescent.plan.brief import brief


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
    AVERAGE = "average"  # begin to average a fragment of the weights over replicas that train apart
    MERGE = "merge"  # wait for this average and put it into the weights
    EXCHANGE = "exchange"  # exchange weights with neighbours among replicas that train apart, and mix them
    PUSH = "push"  # send the gradients of a portion of the batch to the parameter servers
    PULL = "pull"  # fetch weights from the servers, then the next portion
    SERVE = "serve"  # a server: apply pushes until the step is complete, answer pulls


SCALARS = 3
"""Number of values that STEP sums over all ranks: loss, number of ranks with a stop request, squared gradient norm.

An objective with measures adds those between: `Plan.measured`."""

ROUND_SCALARS = 5
"""Number of values that all ranks sum where they agree, at the last MERGE of a round or at an EXCHANGE.

They are: the loss of the last step, ranks with a stop request, skipped steps of replicas. Then the squared distance of
the replicas from their mean, and the squared norm of this mean."""

SENDS: frozenset[Verb] = frozenset({Verb.SEND_ACTIVATION, Verb.SEND_GRADIENT})
RECEIVES: frozenset[Verb] = frozenset({Verb.RECEIVE_ACTIVATION, Verb.RECEIVE_GRADIENT})


@dataclass(frozen=True, slots=True)  # a long pipeline has hundreds of thousands of them
class Instruction:
    """One entry of an instruction list.

    Attributes:
        microbatch: index of its micro-batch; None for REDUCE, STEP, AVERAGE, MERGE and EXCHANGE.
        last: marks the last BACKWARD or BACKWARD_WEIGHT of a chunk, which completes the gradients. The gradient
            reduction may begin during it. Also marks the last MERGE of a round, after which all ranks agree.
        chunk: index of the virtual stage within its stage (see `Schedule`).
        peer: for sends and receives: the other stage.
        fragment: for AVERAGE and MERGE: the index of the fragment of the weights.
        step: the step of the round (from 0) in which it runs; None: every step.
        axis: for REDUCE: one more axis over which it sums the gradients.
    """

    verb: Verb
    microbatch: int | None = None
    last: bool = False
    chunk: int = 0
    peer: int | None = None
    fragment: int | None = brief(None)
    step: int | None = brief(None)
    axis: str = brief("")

    def __str__(self) -> str:
        number = "" if self.microbatch is None else f" {self.microbatch}"
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        end = "" if self.peer is None else f" {'to' if self.verb in SENDS else 'from'} stage {self.peer}"
        part = "" if self.fragment is None else f" fragment {self.fragment}"
        when = "" if self.step is None else f" after step {self.step + 1}"
        over = f" over {self.axis}" if self.axis else ""
        return f"{self.verb}{number}{chunk}{end}{part}{over}{when}"


@dataclass(frozen=True)
class Schedule:
    """The instruction lists of a round of `period` steps. Most schedules have a period of one step.

    `programs[stage]` is the list of every rank of that pipeline stage. With parameter servers `programs[0]` is that of
    the workers, `programs[1]` that of the servers. An instruction with a `step` runs in that step
    of a round, the others run in every step.
    `depths[number]` is the model part of virtual stage `number`: depths [first, end) (see `Parameter.depths`).
    Of p stages, chunk c of stage s is virtual stage c p + s.
    `opening[stage]` is the list of each of the first `opening_steps` steps, a multiple of the period.
    `dues`: with parameter servers all ranks agree after each multiple of one of these numbers: something is due then.
    `agreement`: all ranks agree after a multiple of so many steps, a multiple of the period; 0: after each round.
    """

    programs: tuple[tuple[Instruction, ...], ...]
    depths: tuple[tuple[int, int], ...] = ()
    period: int = brief(1)
    opening: tuple[tuple[Instruction, ...], ...] = brief(())
    opening_steps: int = brief(0)
    dues: tuple[int, ...] = brief(())
    agreement: int = brief(0)

    def program(self, stage: int, number: int) -> tuple[Instruction, ...]:
        """The instructions of a stage, or of a role, in step `number` (from 0)."""
        if number < self.opening_steps:
            return self.opening[stage]
        programs = self._by_step[stage]
        return programs.get(number % self.period, programs[None])

    @cached_property
    def _by_step(self) -> tuple[dict[int | None, tuple[Instruction, ...]], ...]:
        """By stage: the instructions of each step of a round that has its own ones; at None those of other steps."""
        stages = []
        for program in self.programs:
            special = {at.step for at in program if at.step is not None}
            lists: dict[int | None, tuple[Instruction, ...]] = {}
            lists |= {step: tuple(at for at in program if at.step in (None, step)) for step in special}
            lists[None] = tuple(at for at in program if at.step is None)
            stages.append(lists)
        return tuple(stages)

    def agrees_after(self, steps: int) -> bool:
        """Whether all ranks know the same sums after so many steps: where rounds agree, or in the opening steps."""
        if steps <= self.opening_steps:
            return True
        return any(steps % every == 0 for every in self.dues or (self.agrees_every,))

    def agreed_before(self, steps: int) -> int:
        """The last number of steps below `steps`, at least 1, after which all ranks agree."""
        if steps <= self.opening_steps:
            return steps - 1
        return max((steps - 1) // every * every for every in self.dues or (self.agrees_every,))

    def agrees_next(self, steps: int) -> int:
        """The first number of steps above `steps` after which all ranks agree."""
        if steps < self.opening_steps:
            return steps + 1
        return min((steps // every + 1) * every for every in self.dues or (self.agrees_every,))

    @property
    def agrees_every(self) -> int:
        """Steps from one sum over all ranks to the next, after the opening steps."""
        return self.agreement or self.period

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


def with_round(schedule: Schedule, period: int, added: Iterable[Instruction], opening_steps: int = 0) -> Schedule:
    """A schedule with a round of `period` steps: each list ends with the instructions `added`.

    The first `opening_steps` steps are without them. They sum gradients over dp_replicate.
    """
    opening: tuple[tuple[Instruction, ...], ...] = ()
    if opening_steps:
        opening = tuple(
            tuple(replace(at, axis="dp_replicate") if at.verb is Verb.REDUCE else at for at in program)
            for program in schedule.programs
        )
    more = tuple(added)
    programs = tuple((*program, *more) for program in schedule.programs)
    return replace(schedule, programs=programs, period=period, opening=opening, opening_steps=opening_steps)


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
