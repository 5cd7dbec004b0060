"""In: a plan, seconds of arithmetic, a link. Out: its ranks in order of time: seconds of a step, waiting, bytes.
Does not measure. simulate.py has one step of a pipeline's stages in relative units, and needs no plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from codescent.cost.amounts import Phase, phases
from codescent.cost.events import Clock, Event, Process
from codescent.cost.lengths import instructions_of, lengths
from codescent.cost.network import Link, Network
from codescent.cost.pairs_walk import Averages
from codescent.cost.served_walk import Servers
from codescent.cost.simulate import Deadlock, Flight, Span
from codescent.plan import SENDS, Collective, Instruction, Plan, Traffic, Verb
from codescent.strategies.gossip_graphs import AXIS, graph_of

Seconds = Callable[[int, Instruction], float]
"""Seconds of arithmetic of a rank in an instruction."""
SERVED_STEPS = 100
"""Steps that are walked where portions of work are handed out."""
SERVED_ROUNDS = 40
"""The same, where workers push the changes of rounds of steps."""
_Timed = TypeVar("_Timed", Span, Flight)


@dataclass(frozen=True)
class RankTimes:
    """A rank in a step: means over the measured rounds.

    Attributes:
        step_s: seconds of a step.
        busy_s: seconds of arithmetic.
        sent_bytes: bytes that it sends, by the ring algorithms.
        worst_bytes: in the step in which it sends most.
    """

    step_s: float
    busy_s: float
    sent_bytes: float
    worst_bytes: float

    @property
    def waits_s(self) -> float:
        """Exposed waiting: seconds of a step without arithmetic."""
        return max(0.0, self.step_s - self.busy_s)


@dataclass(frozen=True)
class Walk:
    """What the ranks did.

    Attributes:
        step_s: seconds of a step, the mean of all ranks.
        tokens_per_s: of all ranks together.
        ranks: by rank.
        servers: for each server the share of the time in which its card receives or sends, whichever is longer.
        staleness: for each applied push, by how many versions its weights were older; with asynchronous gossip for each
            update, by how many averages.
        timeline: the instructions of the measured rounds, with `Span.stage` the rank; times from their begin.
        flights: what was sent in them, with `Flight.stage` the rank that sends; a ring's message for each of its ranks.
    """

    step_s: float
    tokens_per_s: float
    ranks: tuple[RankTimes, ...]
    servers: tuple[float, ...] = ()
    staleness: tuple[int, ...] = ()
    timeline: tuple[Span, ...] = ()
    flights: tuple[Flight, ...] = ()

    @property
    def computes(self) -> float:
        """The share of the time in which the busiest rank computes."""
        return max(rank.busy_s / rank.step_s if rank.step_s else 1.0 for rank in self.ranks)


def arithmetic(plan: Plan, compute_s: float, slow: Mapping[int, float] | None = None) -> Seconds:
    """Seconds of each instruction, in the proportions of lengths.py.

    Args:
        plan: of a run.
        compute_s: seconds of arithmetic of a step, on a rank of the stage that computes most.
        slow: by rank: how many times longer it takes.
    """
    costs, stages, slow = lengths(plan).costs, len(plan.schedule.programs), slow or {}

    def units(stage: int, at: Instruction) -> float:
        found = getattr(costs, f"{at.verb}_s", 0.0)
        return float(found[at.chunk * stages + stage] if isinstance(found, tuple) else found)

    most = max(sum(units(stage, at) for at in program) for stage, program in enumerate(plan.schedule.programs))
    stage_of = [plan.role(rank) for rank in range(plan.world_size)]
    return lambda rank, at: units(stage_of[rank], at) * compute_s / most * slow.get(rank, 1.0)


def arithmetic_s(plan: Plan, flops_per_s: float) -> float:
    """Seconds of arithmetic of a step on a rank of the stage that computes most, by the FLOPs of the plan."""
    flops, model = plan.flops(), plan.model.forward_flops
    parts = [sum(sum(model[part.start : part.stop]) for part in plan.schedule.parts(s)) for s in range(plan.mesh.pp)]
    busiest = max(parts) / sum(parts) * plan.mesh.pp  # relative to the mean stage
    return busiest * (flops.total_flops + flops.recomputed_flops) / plan.mesh.world_size / flops_per_s


def walk(
    plan: Plan,
    seconds: Seconds,
    link: Link,
    *,
    ranks_per_host: int = 1,
    phase: Phase | None = None,
    rounds: int = 1,
    warm_up: int = 1,
) -> Walk:
    """Walk all ranks through `warm_up` and `rounds` rounds of a phase; the latter are measured.

    Args:
        plan: of a run.
        seconds: of arithmetic, see `arithmetic`.
        link: between hosts; ranks of one host exchange in no time.
        ranks_per_host: neighbouring ranks share a host and its card.
        phase: None: the last one.

    Raises:
        Deadlock: the lists wait for each other.
    """
    phase = phase or phases(plan)[-1]
    if plan.layout.hands_out:  # ranks have no common rounds: many of them, of which the first ones are not measured
        period = plan.schedule.period
        numbers = range((SERVED_STEPS if period == 1 else SERVED_ROUNDS) * period)
        return _Walk(plan, seconds, link, ranks_per_host, numbers, len(numbers) // period // 5, period).run()
    numbers = range(phase.round_begins, phase.round_begins + (warm_up + rounds) * phase.period)
    return _Walk(plan, seconds, link, ranks_per_host, numbers, warm_up, phase.period).run()


@dataclass
class _Sums:
    """The collectives of an instruction: those that begin with it, and those that run after it."""

    begins: list[tuple[Traffic, float]] = field(default_factory=list)
    follows: list[tuple[Traffic, float]] = field(default_factory=list)


@dataclass
class _Rank:
    """Where a rank is.

    Attributes:
        reductions: sums of gradients that REDUCE awaits.
        flying: by fragment: sums that MERGE awaits.
        ends_s: when each step ended.
        busy_s, sent: seconds of arithmetic and bytes of each step.
    """

    number: int
    coordinates: Mapping[str, int]
    reductions: list[Event] = field(default_factory=list)
    flying: dict[int, list[Event]] = field(default_factory=dict)
    ends_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    at: Instruction | None = None
    has_ended: bool = False


class _Walk:
    """One walk: a process for each rank, and the network between them.

    A verb is a method of the verb's name that yields what the rank waits for. What it sends goes through `_join`
    (collectives) or `_message`, which count the bytes.
    """

    def __init__(
        self, plan: Plan, seconds: Seconds, link: Link, ranks_per_host: int, numbers: range, warm_up: int, period: int
    ) -> None:
        self.plan, self.seconds, self.numbers, self.period = plan, seconds, numbers, period
        self.warm_up = warm_up * period  # steps that are not measured
        self.clock = Clock()
        self.ranks = [_Rank(rank, plan.mesh.coordinates(rank)) for rank in range(plan.mesh.world_size)]
        hosts = [rank // ranks_per_host for rank in range(plan.world_size)]
        self.network = Network(self.clock, link, hosts)
        self.servers = Servers(plan, self.clock, self.network, len(numbers)) if plan.layout.served else None
        self.averages: Averages | None = None
        if plan.layout.averages_beside:
            self.averages = Averages(plan, self.clock, self.network, len(numbers), self._sends)
        verbs = {at.verb for program in (*plan.schedule.programs, *plan.schedule.opening) for at in program}
        self.arms: dict[Verb, Callable[[_Rank, Instruction, _Sums], Process]] = {
            verb: getattr(self, f"_{verb}") for verb in verbs
        }
        self.stages = len(plan.schedule.programs)
        self.last_virtual = len(plan.schedule.depths) - 1
        self.exchanged: dict[tuple[int, int, int], Event] = {}  # by receiver, sender, step
        self.messages: dict[tuple[int, bool, int, int | None, int], Event] = {}
        self.groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self.programs: dict[tuple[int, int], Sequence[tuple[Instruction, _Sums]]] = {}
        self.spans: list[Span] = []

    def run(self) -> Walk:
        """Walk to the ends of all lists."""
        for rank in self.ranks:
            self.clock.start(self._work_of(rank))
        self.clock.run()
        if stuck := {rank.number: rank.at for rank in self.ranks if not rank.has_ended}:
            raise Deadlock({rank: (at, "another rank") for rank, at in stuck.items() if at is not None})
        begin_s = max(rank.ends_s[self._warm_up(rank) - 1] for rank in self.ranks) if self.warm_up else 0.0
        ranks = tuple(self._times(rank) for rank in self.ranks)
        handed = self.servers or self.averages
        speeds = [1 / rank.step_s if rank.step_s else 0.0 for rank in ranks]
        if self.servers is not None:  # what was refused has trained nothing
            speeds = [speed * self.servers.counted(rank) for rank, speed in enumerate(speeds)]
        speed = sum(speeds) / len(speeds)
        return Walk(
            1 / speed if speed else 0.0,
            self.plan.work.tokens * speed,
            ranks,
            servers=self._loads(),
            staleness=tuple(handed.staleness) if handed else (),
            timeline=_since(sorted(self.spans, key=lambda span: (span.start_s, span.stage)), begin_s),
            flights=_since(self.network.flights, begin_s),
        )

    def _times(self, rank: _Rank) -> RankTimes:
        warm_up = self._warm_up(rank)
        steps = len(rank.ends_s) - warm_up
        took_s = rank.ends_s[-1] - (rank.ends_s[warm_up - 1] if warm_up else 0.0)
        sent = rank.sent[warm_up:]
        return RankTimes(took_s / steps, sum(rank.busy_s[warm_up:]) / steps, sum(sent) / steps, max(sent))

    def _warm_up(self, rank: _Rank) -> int:
        """Steps of a rank that are not measured. Where work is handed out a slow rank has fewer steps than others."""
        return max(1, len(rank.ends_s) // 5) if self.plan.layout.hands_out else self.warm_up

    def _loads(self) -> tuple[float, ...]:
        """See `Walk.servers`."""
        if self.servers is None or not self.clock.now_s:
            return ()
        cards = [self.network.cards[self.network.hosts[queue.rank]] for queue in self.servers.queues]
        return tuple(max(card.sending_s, card.receiving_s) / self.clock.now_s for card in cards)

    def _work_of(self, rank: _Rank) -> Process:
        """The process of a rank."""
        if self.servers is not None:
            return self._portions(rank, self.servers)
        return self._steps(rank) if self.averages is None else self._shares(rank, self.averages)

    def _shares(self, rank: _Rank, averages: Averages) -> Process:
        """The process of a rank that averages beside its computation: portions, as long as there are any."""
        while averages.take(rank.number):
            yield from self._step_of(rank, 0)
        rank.has_ended = True

    def _sends(self, rank: int, payload_bytes: float) -> None:
        """Count bytes that a rank sends beside its computation, in its present step."""
        if (sent := self.ranks[rank].sent) and not self.ranks[rank].has_ended:
            sent[-1] += payload_bytes

    def _steps(self, rank: _Rank) -> Process:
        """The process of a rank: its lists, step after step."""
        for number in self.numbers:
            yield from self._step_of(rank, number)
        rank.has_ended = True

    def _portions(self, rank: _Rank, servers: Servers) -> Process:
        """The process of a worker: portions, as long as there are any."""
        yield from servers.pull(rank.number)
        while steps := servers.take(rank.number):
            begin_s = self.clock.now_s
            for step in steps:
                if step == steps[-1]:
                    servers.measured(rank.number, len(steps), self.clock.now_s - begin_s)
                yield from self._step_of(rank, self.period - 1 if step == steps[-1] else min(step, self.period - 2))
        rank.has_ended = True

    def _step_of(self, rank: _Rank, number: int) -> Process:
        rank.busy_s.append(0.0)
        rank.sent.append(0.0)
        for instruction, sums in self._program(rank.coordinates["pp"], number):
            rank.at = instruction
            start_s, busy_s = self.clock.now_s, rank.busy_s[-1]
            yield from self.arms[instruction.verb](rank, instruction, sums)
            if len(rank.ends_s) >= self.warm_up:
                waits_s = self.clock.now_s - start_s - (rank.busy_s[-1] - busy_s)
                self.spans.append(Span(rank.number, instruction, start_s, self.clock.now_s, max(0.0, waits_s)))
        rank.ends_s.append(self.clock.now_s)

    def _compute(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        """Arithmetic, beside the collectives that begin with it; then those for which the rank waits."""
        begun = [(record, self._join(rank, record, times)) for record, times in sums.begins]
        seconds = self.seconds(rank.number, at)
        rank.busy_s[-1] += seconds
        yield seconds
        for record, done in begun:
            if record.verb is Verb.REDUCE:
                rank.reductions.append(done)
            else:
                yield done
        for record, times in sums.follows:
            yield self._join(rank, record, times)

    def _forward(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        virtual = self._virtual(rank, at)
        if virtual:
            yield self._arrival(rank, at, activation=True, virtual=virtual - 1)
        yield from self._compute(rank, at, sums)

    def _backward(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        virtual = self._virtual(rank, at)
        if virtual < self.last_virtual:
            yield self._arrival(rank, at, activation=False, virtual=virtual + 1)
        yield from self._compute(rank, at, sums)

    _load = _backward_weight = _step = _compute
    _backward_input = _backward

    def _reduce(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        yield from rank.reductions
        rank.reductions.clear()
        yield from self._compute(rank, at, sums)

    def _average(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        """Begin the sums of a fragment; MERGE awaits them. Or begin the average of a pair."""
        if self.averages is not None:
            yield from self.averages.average(rank.number)
            return
        seconds = self.seconds(rank.number, at)
        rank.busy_s[-1] += seconds
        yield seconds
        assert at.fragment is not None
        rank.flying[at.fragment] = [self._join(rank, record, times) for record, times in sums.begins]

    def _merge(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        if self.averages is not None:
            self.averages.merge(rank.number)
            return
        assert at.fragment is not None
        yield from rank.flying.pop(at.fragment)
        yield from self._compute(rank, at, sums)

    def _push(self, rank: _Rank, at: Instruction, _: _Sums) -> Process:
        assert self.servers is not None
        rank.sent[-1] += self.servers.pushed_bytes
        yield from self.servers.push(rank.number)

    def _pull(self, rank: _Rank, at: Instruction, _: _Sums) -> Process:
        assert self.servers is not None
        yield from self.servers.pull(rank.number)

    def _serve(self, rank: _Rank, at: Instruction, _: _Sums) -> Process:
        """A server is a queue (served_walk.py), not a process."""
        yield 0.0

    def _exchange(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        """Messages to the neighbours of this round; the rank waits for theirs alone. Then what all ranks sum."""
        graph, index, step = graph_of(self.plan), rank.coordinates[AXIS], len(rank.ends_s)
        round_number = self.numbers[step] // self.plan.layout.gossip_every
        group = self.plan.mesh.group(AXIS, rank.number)
        sent = [(record, times) for record, times in sums.follows if record.collective is Collective.SEND]
        size = float(sum(record.payload_bytes for record, _ in sent))
        for target in graph.targets(round_number, index):
            arrived = self.exchanged.setdefault((group[target], rank.number, step), Event())
            self.clock.start(self._hand_over(self._message(rank, group[target], size), arrived))
        for source in graph.matrix(round_number)[index]:
            if source != index:
                yield self.exchanged.setdefault((rank.number, group[source], step), Event())
        others = [one for one in sums.follows if one not in sent]
        yield from self._compute(rank, at, _Sums(sums.begins, others))

    def _send_activation(self, rank: _Rank, at: Instruction, _: _Sums) -> Process:
        """A message leaves; nobody waits for it here."""
        assert at.peer is not None
        virtual = self._virtual(rank, at)
        receiver = self.plan.mesh.rank_at({**rank.coordinates, "pp": at.peer})
        arrived = self._event(rank, receiver, at, activation=at.verb is Verb.SEND_ACTIVATION, virtual=virtual)
        size = self._message_bytes(rank, at)
        self.clock.start(self._hand_over(self._message(rank, receiver, size), arrived))
        yield 0.0

    _send_gradient = _send_activation

    def _receive_activation(self, rank: _Rank, at: Instruction, sums: _Sums) -> Process:
        """The computation that reads it waits for a message."""
        yield 0.0

    _receive_gradient = _receive_activation

    def _hand_over(self, sent: Event, arrived: Event) -> Process:
        yield sent
        self.clock.happens(arrived)

    def _join(self, rank: _Rank, record: Traffic, times: float) -> Event:
        """The rank's next collective of a group; counts its bytes."""
        key = record.axis, rank.number
        if key not in self.groups:
            self.groups[key] = self.plan.mesh.group(*key)
        group = self.groups[key]
        rank.sent[-1] += times * record.wire_bytes(len(group))
        return self.network.join(rank.number, group, record, times)

    def _message(self, rank: _Rank, receiver: int, payload_bytes: float) -> Event:
        """A message to another rank; counts its bytes."""
        rank.sent[-1] += payload_bytes
        return self.network.send(rank.number, receiver, payload_bytes)

    def _arrival(self, rank: _Rank, at: Instruction, *, activation: bool, virtual: int) -> Event:
        return self._event(rank, rank.number, at, activation=activation, virtual=virtual)

    def _event(self, rank: _Rank, receiver: int, at: Instruction, *, activation: bool, virtual: int) -> Event:
        """The arrival of a message at its receiver, in the step of a rank: one event for both ends."""
        key = (receiver, activation, virtual, at.microbatch, len(rank.ends_s))
        return self.messages.setdefault(key, Event())

    def _message_bytes(self, rank: _Rank, at: Instruction) -> float:
        stage = rank.coordinates["pp"]
        sizes = [t.payload_bytes for t in self.plan.traffic if t.verb is at.verb and t.stage in (None, stage)]
        return float(max(sizes, default=0))

    def _virtual(self, rank: _Rank, at: Instruction) -> int:
        return at.chunk * self.stages + rank.coordinates["pp"]

    def _program(self, stage: int, number: int) -> Sequence[tuple[Instruction, _Sums]]:
        """The list of a stage in a step, with the collectives of each instruction."""
        key = stage, number % self.period
        if key not in self.programs:
            self.programs[key] = _with_sums(self.plan, stage, number)
        return self.programs[key]


def _with_sums(plan: Plan, stage: int, number: int) -> list[tuple[Instruction, _Sums]]:
    """The list of a stage in a step, with the collectives of each instruction that more than one rank runs."""
    program = plan.schedule.program(stage, number)
    found = {at: _Sums() for at in program}
    for record in plan.traffic:
        if record.stage not in (None, stage) or record.verb in SENDS or not record.runs_in(number):
            continue
        if plan.mesh.degree(record.axis) == 1 or record.collective in (Collective.PUSH, Collective.PULL):
            continue
        if plan.layout.averages_beside:  # pairs_walk.py has them
            continue
        instructions = instructions_of(record, plan, program)
        for at in instructions:
            sums = found[at]
            begins = record.during is not None or record.verb is Verb.AVERAGE
            (sums.begins if begins else sums.follows).append((record, record.times / len(instructions)))
    return [(at, found[at]) for at in program]


def _since(found: Sequence[_Timed], begin_s: float) -> tuple[_Timed, ...]:
    """What began at `begin_s` or later, with times from then."""
    return tuple(
        replace(one, start_s=one.start_s - begin_s, end_s=one.end_s - begin_s)
        for one in found
        if one.start_s >= begin_s
    )
