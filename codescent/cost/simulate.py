"""In: the instruction lists of a plan, and seconds per instruction. Out: begin and end of each, idle time per stage.
Does not know schedules by name and runs nothing: train/execute.py runs the same lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from codescent.plan import SENDS, Instruction, Schedule, Verb

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

    def message_s(self, computed_by: int) -> float:
        """See `transfer_s`."""
        return _of(self.transfer_s, computed_by)


def _of(seconds: Seconds, virtual: int) -> float:
    return seconds[virtual] if isinstance(seconds, tuple) else seconds


@dataclass(frozen=True)
class Span:
    """An instruction of a stage with its begin and end, in seconds from the start of the step.

    `waits_s`: the part before its end in which the stage waits for collectives.
    """

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float
    waits_s: float = 0.0


@dataclass(frozen=True)
class SimulatedMessage:
    """A message between two stages, in seconds from the start of the step: it leaves `stage` and arrives at `peer`."""

    stage: int
    peer: int
    start_s: float
    end_s: float


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

    `lane`: what has a row of its own in a picture; "rank" where each rank is simulated (ranks_walk.py).
    """

    makespan_s: float
    stages: tuple[StageTimes, ...]
    timeline: tuple[Span, ...]
    messages: tuple[SimulatedMessage, ...] = ()
    lane: str = "stage"

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

    def message_s(self, computed_by: int) -> float:
        """Seconds in which a message of a virtual stage keeps the link busy."""


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


class _Message(NamedTuple):
    """An activation or a gradient: the virtual stage that computed it, and its micro-batch."""

    activation: bool
    computed_by: int
    microbatch: int | None


class _Simulator:
    """One simulation: a clock per stage, and the messages between stages."""

    def __init__(self, schedule: Schedule, costs: Timed, sends: Sends, waits: Waits) -> None:
        self.waits = waits
        self.programs = schedule.programs
        self.num_stages = len(schedule.programs)
        self.last_virtual = max(self._virtual(s, at) for s, program in enumerate(self.programs) for at in program)
        self.costs = costs
        self.sends = sends
        self.clock, self.busy, self.data_wait, self.comm_wait = ([0.0] * self.num_stages for _ in range(4))
        self.live: list[set[tuple[int, int | None]]] = [set() for _ in self.programs]  # (chunk, micro-batch)
        self.peak_live = [0] * self.num_stages
        self.spans: list[Span] = []
        self.flights: list[SimulatedMessage] = []
        self.sent: dict[_Message, float] = {}  # when its sender reached the send
        self.expected: dict[_Message, float] = {}  # when its receiver reached the receive
        self.arrival: dict[_Message, float] = {}
        self.links: dict[tuple[int, int], deque[_Message]] = {}  # (from, to) -> messages that still wait, in order
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self) -> Simulation:
        """Simulate all lists to their ends."""
        places = [0] * self.num_stages
        while unfinished := [s for s, program in enumerate(self.programs) if places[s] < len(program)]:
            before = list(places)
            for stage in unfinished:
                program = self.programs[stage]
                while places[stage] < len(program) and self._act(stage, program[places[stage]]):
                    places[stage] += 1
            if places == before:
                raise self._deadlock({stage: self.programs[stage][places[stage]] for stage in unfinished})
        sent = [(at.stage, at.instruction) for at in self.spans if at.instruction.verb in SENDS]
        if lost := {stage: at for stage, at in sent if self._message(stage, at) not in self.expected}:
            raise self._deadlock(lost)
        makespan = max(self.clock)
        ends = (makespan - clock for clock in self.clock)
        stages = zip(self.busy, self.data_wait, self.comm_wait, ends, self.peak_live)
        timeline = sorted(self.spans, key=lambda span: span.start_s)
        messages = sorted(self.flights, key=lambda flight: flight.start_s)
        return Simulation(makespan, tuple(StageTimes(*stage) for stage in stages), tuple(timeline), tuple(messages))

    def _act(self, stage: int, instruction: Instruction) -> bool:
        """Try to do an instruction. False: it has to wait, and the caller tries it again."""
        if instruction.peer is not None:
            return self._communicate(stage, instruction, instruction.peer)
        return self._compute(stage, instruction)

    def _compute(self, stage: int, instruction: Instruction) -> bool:
        verb, held = instruction.verb, (instruction.chunk, instruction.microbatch)
        virtual = self._virtual(stage, instruction)
        needed: _Message | None = None
        if verb is Verb.FORWARD and virtual > 0:
            needed = _Message(True, virtual - 1, instruction.microbatch)
        elif verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT) and virtual < self.last_virtual:
            needed = _Message(False, virtual + 1, instruction.microbatch)
        if needed is not None and not self._await(stage, needed):
            return False
        if verb is Verb.FORWARD:
            self.live[stage].add(held)
            self.peak_live[stage] = max(self.peak_live[stage], len(self.live[stage]))
        elif verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
            self.live[stage].remove(held)
        start, spent = self.clock[stage], self.costs.compute_s(stage, instruction, virtual)
        self.busy[stage] += spent
        self.clock[stage] += spent
        waits_s = self.waits.get((stage, instruction), 0.0)
        self._wait(stage, self.clock[stage] + waits_s, self.comm_wait)
        return self._span(stage, instruction, start, waits_s)

    def _communicate(self, stage: int, instruction: Instruction, peer: int) -> bool:
        message, sends = self._message(stage, instruction), instruction.verb in SENDS
        (self.sent if sends else self.expected).setdefault(message, self.clock[stage])
        if self.sends is Sends.BLOCKING:
            return self._meet(stage, instruction, message)
        link = (stage, peer) if sends else (peer, stage)
        if sends:
            self.links.setdefault(link, deque()).append(message)
        self._deliver(link)
        return self._span(stage, instruction, self.clock[stage])

    def _deliver(self, link: tuple[int, int]) -> None:
        """Send the waiting messages of a link in order, each as soon as `Sends` allows."""
        queue = self.links.get(link, deque())
        while queue and (self.sends is Sends.BUFFERED or queue[0] in self.expected):
            message = queue.popleft()
            ready = self.sent[message]
            if self.sends is Sends.POSTED:
                ready = max(ready, self.expected[message])
            transfer_s = self.costs.message_s(message.computed_by)
            self.link_free[link] = max(ready, self.link_free.get(link, 0.0)) + transfer_s
            self.arrival[message] = self.link_free[link] + self.costs.latency_s
            self.flights.append(SimulatedMessage(*link, self.link_free[link] - transfer_s, self.arrival[message]))

    def _await(self, stage: int, message: _Message) -> bool:
        """Advance the stage's clock to the arrival of the message. False: it was not sent, or not received yet."""
        if message not in self.arrival or message not in self.expected:
            return False
        self._wait(stage, self.sent[message], self.data_wait)
        self._wait(stage, self.arrival[message], self.comm_wait)
        return True

    def _meet(self, stage: int, instruction: Instruction, message: _Message) -> bool:
        """A blocking send or receive: both stages begin when the later one is ready, and end together."""
        if message not in self.sent or message not in self.expected:
            return False
        start = max(self.sent[message], self.expected[message])
        self._wait(stage, start, self.comm_wait if instruction.verb in SENDS else self.data_wait)
        end = start + self.costs.latency_s + self.costs.message_s(message.computed_by)
        self._wait(stage, end, self.comm_wait)
        if instruction.verb in SENDS:
            self.flights.append(SimulatedMessage(stage, instruction.peer or 0, start, end))
        self.arrival[message] = end
        return self._span(stage, instruction, start)

    def _wait(self, stage: int, until: float, account: list[float]) -> None:
        account[stage] += max(0.0, until - self.clock[stage])
        self.clock[stage] = max(self.clock[stage], until)

    def _span(self, stage: int, instruction: Instruction, start: float, waits_s: float = 0.0) -> bool:
        self.spans.append(Span(stage, instruction, start, self.clock[stage], waits_s))
        return True

    def _virtual(self, stage: int, instruction: Instruction) -> int:
        return instruction.chunk * self.num_stages + stage

    def _message(self, stage: int, instruction: Instruction) -> _Message:
        """The message of a send or a receive: equal for both ends."""
        activation = instruction.verb in (Verb.SEND_ACTIVATION, Verb.RECEIVE_ACTIVATION)
        computed_by = self._virtual(stage, instruction)
        if instruction.verb not in SENDS:
            computed_by += -1 if activation else 1
        return _Message(activation, computed_by, instruction.microbatch)

    def _deadlock(self, blocked: dict[int, Instruction]) -> Deadlock:
        return Deadlock({stage: (at, self._awaited(stage, at)) for stage, at in blocked.items()})

    def _awaited(self, stage: int, instruction: Instruction) -> str:
        """What a blocked instruction waits for, in words."""
        if instruction.peer is not None:
            return f"stage {instruction.peer} to {'receive' if instruction.verb in SENDS else 'send'} it"
        forward = instruction.verb is Verb.FORWARD
        source = (self._virtual(stage, instruction) + (-1 if forward else 1)) % self.num_stages
        return f"{'the activation' if forward else 'the gradient'} from stage {source}"
