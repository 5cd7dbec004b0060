"""In: the instruction lists of a plan, and seconds per instruction. Out: begin and end of each, idle time per stage.
Does not know schedules by name and runs nothing: train/execute.py runs the same lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from codescent.cost.dataflow import Dataflow, StageMessage
from codescent.cost.doing import Activity, Doing
from codescent.cost.events import Clock, Event, Process
from codescent.plan import SENDS, Instruction, Schedule, Traffic, Verb

Seconds = float | tuple[float, ...]
"""One number for all stages, or a tuple: one number per virtual stage (chunk c of stage s of p has index c p + s).
A tuple for reduce and step has one number per stage."""


class Sends(StrEnum):
    """When a message leaves its sender, and which computation or stage waits for it."""

    BUFFERED = "buffered"  # leaves at its send; the computation that reads it waits
    POSTED = "posted"  # leaves when both send and receive are reached; the computation that reads it waits
    BLOCKING = "blocking"  # leaves when both are reached; both stages wait until it has arrived


@dataclass(frozen=True)
class Costs:
    """Seconds of each instruction. The defaults are relative to a forward pass of 1.

    A message arrives `latency_s + transfer_s` after it has left. The next message from the same stage to the same stage
    leaves after `transfer_s`. A tuple `transfer_s` is indexed by the sending virtual stage.
    """

    forward_s: Seconds = 1.0
    backward_s: Seconds = 2.0
    backward_input_s: Seconds = 1.0
    backward_weight_s: Seconds = 1.0
    load_s: Seconds = 0.0
    latency_s: float = 0.0
    transfer_s: Seconds = 0.0
    reduce_s: Seconds = 0.0
    step_s: Seconds = 0.0

    def compute_s(self, stage: int, at: Instruction, virtual: int) -> float:
        """Seconds of an instruction of a virtual stage; messages and what has no cost take none."""
        return _of(getattr(self, f"{at.verb}_s", 0.0), virtual)

    def message_s(self, message: StageMessage) -> float:
        """See `transfer_s`."""
        return _of(self.transfer_s, message[1])


def _of(seconds: Seconds, virtual: int) -> float:
    return seconds[virtual] if isinstance(seconds, tuple) else seconds


@dataclass(frozen=True)
class Span:
    """An instruction of a stage with its begin and end, in seconds from the start of the step.

    `waits_s`: the part before its end in which the stage waits for collectives. Of a walk over ranks: all its seconds
    without arithmetic; `Walk.activities` says when and why.
    """

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float
    waits_s: float = 0.0


@dataclass(frozen=True)
class SimulatedMessage:
    """A message between two stages, in seconds from the start of the step: it leaves `stage` and arrives at `peer`.

    `record`: of a walk over ranks: the collective to which it belongs; None: to none.
    """

    stage: int
    peer: int
    start_s: float
    end_s: float
    record: Traffic | None = None


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage. The four times sum to the makespan.

    Attributes:
        busy_s: the stage computes.
        data_wait_s: it waits because another stage has not yet computed its input.
        comm_wait_s: it waits for a message under way, or for collectives. With blocking sends: also each send and its
            wait.
        idle_end_s: it has finished its list, and other stages have not.
        peak_live: largest number of (micro-batch, chunk) pairs with activations in memory. They stay there from
            FORWARD until BACKWARD, or until BACKWARD_WEIGHT if the backward is split.
    """

    busy_s: float
    data_wait_s: float
    comm_wait_s: float
    idle_end_s: float
    peak_live: int


@dataclass(frozen=True)
class Simulation:
    """One simulated step: its duration, the times of each stage, all instructions and messages sorted by begin.

    `activities`: for what each stage waits, and when; of a walk over ranks also what a server does. `lane`: what has a
    row of its own in a picture; "rank" where each rank is simulated (ranks_walk.py). `names`: of the rows.
    """

    makespan_s: float
    stages: tuple[StageTimes, ...]
    timeline: tuple[Span, ...]
    messages: tuple[SimulatedMessage, ...] = ()
    lane: str = "stage"
    activities: tuple[Activity, ...] = ()
    names: tuple[str, ...] = ()

    def name(self, row: int) -> str:
        """The name of a row."""
        return self.names[row] if self.names else f"{self.lane} {row}"

    @property
    def ideal_s(self) -> float:
        """The busy time of the busiest stage: a lower bound for every schedule."""
        return max(stage.busy_s for stage in self.stages)

    @property
    def bubble_of_total(self) -> float:
        """(makespan - ideal) / makespan."""
        return (self.makespan_s - self.ideal_s) / self.makespan_s if self.makespan_s else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """(makespan - ideal) / ideal: (p - 1) / m for GPipe and 1F1B with equal stages (Narayanan et al. 2021, 2.2)."""
        return (self.makespan_s - self.ideal_s) / self.ideal_s if self.ideal_s else 0.0


class Deadlock(Exception):
    """The lists block each other. `waiting`: for each blocked stage its instruction, and what it waits for."""

    def __init__(self, waiting: dict[int, tuple[Instruction, str]]) -> None:
        self.waiting = waiting
        places = [f"stage {stage} waits at '{at}' for {what}" for stage, (at, what) in waiting.items()]
        super().__init__(f"deadlock: {'; '.join(places)}")


class Timed(Protocol):
    """Seconds of each instruction and message: `Costs`, or what a price is made of (price.py)."""

    @property
    def latency_s(self) -> float:
        """Of a message."""

    def compute_s(self, stage: int, at: Instruction, virtual: int) -> float:
        """Seconds in which a stage computes an instruction of a virtual stage."""

    def message_s(self, message: StageMessage) -> float:
        """Seconds in which a message keeps its link busy."""


Waits = Mapping[tuple[int, Instruction], float]
"""By stage and instruction: seconds that the stage waits for collectives after it has computed the instruction."""


def simulate(
    schedule: Schedule, costs: Timed | None = None, sends: Sends = Sends.BUFFERED, waits: Waits | None = None
) -> Simulation:
    """Simulate one step of `schedule`. `sends` says when messages leave.

    Raises:
        Deadlock: the lists wait for each other, or a send or receive has no partner.
        KeyError: a list has a backward pass without its forward pass.
    """
    return _Simulator(schedule, costs or Costs(), sends, waits or {}).run()


class _Simulator:
    """One simulation: a process for each stage, and one for each message between two stages."""

    def __init__(self, schedule: Schedule, costs: Timed, sends: Sends, waits: Waits) -> None:
        self.programs, self.flow, self.clock = schedule.programs, Dataflow.of(schedule), Clock()
        self.costs, self.sends, self.waits = costs, sends, waits
        self.busy, self.data_wait, self.comm_wait, self.ends = ([0.0] * len(self.programs) for _ in range(4))
        self.at: list[Instruction | None] = [None for _ in self.programs]
        self.live: list[set[tuple[int, int | None]]] = [set() for _ in self.programs]  # (chunk, micro-batch)
        self.peak_live = [0] * len(self.programs)
        self.spans: list[Span] = []
        self.activities: list[Activity] = []
        self.flights: list[SimulatedMessage] = []
        # By message: its sender has reached the send, its receiver the receive, it has arrived.
        self.sent, self.expected, self.arrived = (defaultdict[StageMessage, Event](Event) for _ in range(3))
        self.left: dict[tuple[int, int], Event] = {}  # (from, to): the last message no longer keeps the link busy

    def run(self) -> Simulation:
        """Simulate all lists to their ends."""
        for stage in range(len(self.programs)):
            self.clock.start(self._walk(stage))
        self.clock.run()
        blocked = {stage: at for stage, at in enumerate(self.at) if at is not None}
        sent = [(at.stage, at.instruction) for at in self.spans if at.instruction.verb in SENDS]
        lost = {stage: at for stage, at in sent if self.expected[self.flow.message(stage, at)].at_s is None}
        if stuck := blocked or lost:
            raise Deadlock({stage: (at, self.flow.awaited(stage, at)) for stage, at in stuck.items()})
        makespan = max(self.ends)
        idle = (makespan - end for end in self.ends)
        stages = zip(self.busy, self.data_wait, self.comm_wait, idle, self.peak_live)
        timeline = sorted(self.spans, key=lambda span: span.start_s)
        messages = sorted(self.flights, key=lambda flight: flight.start_s)
        waits = sorted(self.activities, key=lambda wait: wait.start_s)
        times = tuple(StageTimes(*stage) for stage in stages)
        return Simulation(makespan, times, tuple(timeline), tuple(messages), activities=tuple(waits))

    def _walk(self, stage: int) -> Process:
        """The process of a stage: its instructions, one after the other."""
        for at in self.programs[stage]:
            self.at[stage] = at
            yield from self._compute(stage, at) if at.peer is None else self._communicate(stage, at, at.peer)
        self.at[stage], self.ends[stage] = None, self.clock.now_s

    def _compute(self, stage: int, at: Instruction) -> Process:
        """Wait for what is read, compute, then wait for collectives."""
        held = at.chunk, at.microbatch
        if (needed := self.flow.reads(stage, at)) is not None:
            yield self.expected[needed]
            yield from self._wait(stage, self.sent[needed], Doing.RANK)
            yield from self._wait(stage, self.arrived[needed], Doing.MESSAGE)
        if at.verb is Verb.FORWARD:
            self.live[stage].add(held)
            self.peak_live[stage] = max(self.peak_live[stage], len(self.live[stage]))
        elif at.verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
            self.live[stage].remove(held)
        start_s, spent_s = self.clock.now_s, self.costs.compute_s(stage, at, self.flow.virtual(stage, at))
        self.busy[stage] += spent_s
        waits_s = self.waits.get((stage, at), 0.0)
        yield spent_s
        begin_s = self.clock.now_s
        yield waits_s
        self._waited(stage, Doing.COLLECTIVE, begin_s)
        self.spans.append(Span(stage, at, start_s, self.clock.now_s, waits_s))

    def _communicate(self, stage: int, at: Instruction, peer: int) -> Process:
        """Begin a message, or say that it is expected. With BLOCKING sends: stay until it has arrived."""
        message, is_send = self.flow.message(stage, at), at.verb in SENDS
        self.clock.happens((self.sent if is_send else self.expected)[message])
        start_s = self.clock.now_s
        if is_send:
            self.clock.start(self._carry(stage, peer, message))
        if self.sends is Sends.BLOCKING:
            other = (self.expected if is_send else self.sent)[message]
            yield from self._wait(stage, other, Doing.MESSAGE if is_send else Doing.RANK)
            start_s = self.clock.now_s
            yield from self._wait(stage, self.arrived[message], Doing.MESSAGE)
        self.spans.append(Span(stage, at, start_s, self.clock.now_s))

    def _carry(self, stage: int, peer: int, message: StageMessage) -> Process:
        """A message on its link: behind those before it, and as soon as `Sends` allows."""
        before, left = self.left.get((stage, peer)), Event()
        self.left[stage, peer] = left
        if before is not None and self.sends is not Sends.BLOCKING:
            yield before
        if self.sends is not Sends.BUFFERED:
            yield self.expected[message]
        start_s = self.clock.now_s
        yield self.costs.message_s(message)
        self.clock.happens(left)
        yield self.costs.latency_s
        self.clock.happens(self.arrived[message])
        self.flights.append(SimulatedMessage(stage, peer, start_s, self.clock.now_s))

    def _wait(self, stage: int, event: Event, why: Doing) -> Process:
        begin_s = self.clock.now_s
        yield event
        self._waited(stage, why, begin_s)

    def _waited(self, stage: int, why: Doing, begin_s: float) -> None:
        """Count what a stage has waited until now."""
        account = self.data_wait if why is Doing.RANK else self.comm_wait
        account[stage] += self.clock.now_s - begin_s
        if self.clock.now_s > begin_s:
            self.activities.append(Activity(stage, why, begin_s, self.clock.now_s))
