"""In: a plan's instruction lists, seconds for each verb. Out: when each instruction runs, who waits, what is held.
Does not know what a step consists of (the plan does) nor any schedule by name: train/execute is its twin."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from codescent.plan import SENDS, Instruction, Schedule, Verb

Seconds = float | tuple[float, ...]
"""One number for all, or one for each virtual stage (chunk c of stage s is number c p + s); for reduce and step one for
each stage."""


class Sends(StrEnum):
    """When a message leaves, and who waits for it."""

    BUFFERED = "buffered"  # when it is sent; who waits is the computation that reads it
    POSTED = "posted"  # when it is sent and its receive is reached too; who waits is the computation that reads it
    BLOCKING = "blocking"  # the same, and both stages wait until it is over


@dataclass(frozen=True)
class Costs:
    """Seconds of each instruction; the defaults are relative, a forward pass being 1.

    A message arrives `latency_s + transfer_s` after it was sent; the next one between the same two stages, in the same
    direction, leaves when `transfer_s` is over. `transfer_s` is that of the virtual stage that sends.
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


@dataclass(frozen=True)
class Span:
    """An instruction of a stage, from its begin to its end, in seconds of the step; waiting is what lies between."""

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageTimes:
    """Where a stage's time goes: the four sum to the makespan.

    `data_wait_s`: another stage has not yet computed what is needed. `comm_wait_s`: it has, but it has not arrived;
    where sends block, also the send itself and the wait for its receiver. `idle_end_s`: this stage has done its step.

    `peak_live` counts micro-batches times chunks whose activations are held: from the beginning of FORWARD to the end
    of BACKWARD, or of BACKWARD_WEIGHT where the backward pass is split (it reads the same activations).
    """

    busy_s: float
    data_wait_s: float
    comm_wait_s: float
    idle_end_s: float
    peak_live: int


@dataclass(frozen=True)
class Simulation:
    """One step: its makespan, what each stage did meanwhile, and every instruction's span in order of begin."""

    makespan_s: float
    stages: tuple[StageTimes, ...]
    timeline: tuple[Span, ...]

    @property
    def ideal_s(self) -> float:
        """The busiest stage's work: no schedule takes less."""
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
    """Lists that stop before their ends; `waiting`: the instruction at which a stage stops, and what it waits for."""

    def __init__(self, waiting: dict[int, tuple[Instruction, str]]) -> None:
        self.waiting = waiting
        places = [f"stage {stage} waits at '{at}' for {what}" for stage, (at, what) in waiting.items()]
        super().__init__(f"deadlock: {'; '.join(places)}")


def simulate(schedule: Schedule, costs: Costs | None = None, sends: Sends = Sends.BUFFERED) -> Simulation:
    """Walk all the lists of `schedule`; messages leave as `sends` says.

    Raises:
        Deadlock: the lists wait for each other, or for a message that nobody sends or nobody receives.
        KeyError: a backward pass without the forward pass before it.
    """
    return _Walk(schedule, costs or Costs(), sends).run()


class _Message(NamedTuple):
    """What is sent: an activation or a gradient, by the virtual stage that made it, of which micro-batch."""

    activation: bool
    maker: int
    microbatch: int | None


class _Walk:
    """The lists' state on the way."""

    def __init__(self, schedule: Schedule, costs: Costs, sends: Sends) -> None:
        self.programs = schedule.programs
        self.num_stages = len(schedule.programs)
        self.last_virtual = max(self._virtual(s, at) for s, program in enumerate(self.programs) for at in program)
        self.costs = costs
        self.sends = sends
        self.seconds: dict[Verb, Seconds] = {
            Verb.LOAD: costs.load_s,
            Verb.FORWARD: costs.forward_s,
            Verb.BACKWARD: costs.backward_s,
            Verb.BACKWARD_INPUT: costs.backward_input_s,
            Verb.BACKWARD_WEIGHT: costs.backward_weight_s,
            Verb.REDUCE: costs.reduce_s,
            Verb.STEP: costs.step_s,
        }
        self.clock, self.busy, self.data_wait, self.comm_wait = ([0.0] * self.num_stages for _ in range(4))
        self.live: list[set[tuple[int, int | None]]] = [set() for _ in self.programs]  # (chunk, micro-batch)
        self.peak_live = [0] * self.num_stages
        self.spans: list[Span] = []
        self.sent: dict[_Message, float] = {}  # when its sender reached the send
        self.expected: dict[_Message, float] = {}  # when its receiver reached the receive
        self.arrival: dict[_Message, float] = {}
        self.links: dict[tuple[int, int], deque[_Message]] = {}  # (from, to) -> sent and not yet under way, in order
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self) -> Simulation:
        """All the lists to their ends."""
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
        return Simulation(makespan, tuple(StageTimes(*stage) for stage in stages), tuple(timeline))

    def _act(self, stage: int, instruction: Instruction) -> bool:
        """Whether the instruction is done; else it is tried again later."""
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
        start, spent = self.clock[stage], self._seconds(self.seconds[verb], virtual)
        self.busy[stage] += spent
        self.clock[stage] += spent
        return self._span(stage, instruction, start)

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
        """What waits on a link leaves, one message after the other, each as soon as it may."""
        queue = self.links.get(link, deque())
        while queue and (self.sends is Sends.BUFFERED or queue[0] in self.expected):
            message = queue.popleft()
            ready = self.sent[message]
            if self.sends is Sends.POSTED:
                ready = max(ready, self.expected[message])
            transfer_s = self._seconds(self.costs.transfer_s, message.maker)
            self.link_free[link] = max(ready, self.link_free.get(link, 0.0)) + transfer_s
            self.arrival[message] = self.link_free[link] + self.costs.latency_s

    def _await(self, stage: int, message: _Message) -> bool:
        """Let the stage wait until the message has arrived; False where it is not sent, or not asked for."""
        if message not in self.arrival or message not in self.expected:
            return False
        self._wait(stage, self.sent[message], self.data_wait)
        self._wait(stage, self.arrival[message], self.comm_wait)
        return True

    def _meet(self, stage: int, instruction: Instruction, message: _Message) -> bool:
        """A send that blocks: both ends begin when the later one is there, and end together."""
        if message not in self.sent or message not in self.expected:
            return False
        start = max(self.sent[message], self.expected[message])
        self._wait(stage, start, self.comm_wait if instruction.verb in SENDS else self.data_wait)
        end = start + self.costs.latency_s + self._seconds(self.costs.transfer_s, message.maker)
        self._wait(stage, end, self.comm_wait)
        self.arrival[message] = end
        return self._span(stage, instruction, start)

    def _wait(self, stage: int, until: float, account: list[float]) -> None:
        account[stage] += max(0.0, until - self.clock[stage])
        self.clock[stage] = max(self.clock[stage], until)

    def _span(self, stage: int, instruction: Instruction, start: float) -> bool:
        self.spans.append(Span(stage, instruction, start, self.clock[stage]))
        return True

    def _seconds(self, seconds: Seconds, virtual: int) -> float:
        return seconds[virtual] if isinstance(seconds, tuple) else seconds

    def _virtual(self, stage: int, instruction: Instruction) -> int:
        return instruction.chunk * self.num_stages + stage

    def _message(self, stage: int, instruction: Instruction) -> _Message:
        """What a send or a receive is about: both ends name it alike."""
        activation = instruction.verb in (Verb.SEND_ACTIVATION, Verb.RECEIVE_ACTIVATION)
        maker = self._virtual(stage, instruction)
        if instruction.verb not in SENDS:
            maker += -1 if activation else 1
        return _Message(activation, maker, instruction.microbatch)

    def _deadlock(self, standing: dict[int, Instruction]) -> Deadlock:
        return Deadlock({stage: (at, self._awaited(stage, at)) for stage, at in standing.items()})

    def _awaited(self, stage: int, instruction: Instruction) -> str:
        """What an instruction that cannot go on waits for, in words."""
        if instruction.peer is not None:
            return f"stage {instruction.peer} to {'receive' if instruction.verb in SENDS else 'send'} it"
        forward = instruction.verb is Verb.FORWARD
        source = (self._virtual(stage, instruction) + (-1 if forward else 1)) % self.num_stages
        return f"{'the activation' if forward else 'the gradient'} from stage {source}"
