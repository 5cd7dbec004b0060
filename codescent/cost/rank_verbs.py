"""In: the verbs of a rank's list. Out: what the rank waits for in each, on its processor and on the network.
Does not decide which list a rank walks, and does not add up what it did (ranks_walk.py does)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from codescent.cost.arithmetic import Seconds
from codescent.cost.coding import Coding, ElementWork, Exchanged, delivered, of_average, of_mixing, of_push
from codescent.cost.dataflow import Dataflow, StageMessage
from codescent.cost.diary import Diary
from codescent.cost.doing import Doing
from codescent.cost.events import Clock, Event, Process
from codescent.cost.network import Network
from codescent.cost.pairs_walk import Averages
from codescent.cost.processor import Processor
from codescent.cost.rank_program import Joined, Sums
from codescent.cost.served_walk import Servers
from codescent.plan import Collective, Instruction, Plan, Traffic, Verb
from codescent.strategies.gossip_graphs import AXIS, graph_of


@dataclass
class SimulatedRank:
    """Where a rank is.

    Attributes:
        reductions: sums of gradients that REDUCE awaits.
        flying: by fragment: sums that MERGE awaits.
        last_coded: by axis: the end of its last sum in a format of its own. A thread computes one after the other.
        ends_s: when each step ended.
        busy_s, coding_s, sent: seconds of arithmetic and of coding, and bytes, of each step.
    """

    number: int
    coordinates: Mapping[str, int]
    processor: Processor
    reductions: list[Event] = field(default_factory=list)
    flying: dict[int, list[Event]] = field(default_factory=dict)
    last_coded: dict[str, Event] = field(default_factory=dict)
    ends_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    coding_s: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    at: Instruction | None = None
    has_ended: bool = False

    def computes(self, seconds: float) -> Process:
        """Arithmetic."""
        self.busy_s[-1] += seconds
        yield from self.processor.work(seconds)

    def codes(self, seconds: float) -> Process:
        """Encode, decode, add or copy what is exchanged."""
        self.coding_s[-1] += seconds
        yield from self.processor.work(seconds)


class RankVerbs:
    """A method of each verb's name: a process that yields what the rank waits for. What it sends goes through `_join`
    (collectives) or `_message`, which count the bytes.

    Args:
        processors: of each rank.
        numbers: the steps that are walked.
    """

    def __init__(
        self,
        plan: Plan,
        seconds: Seconds,
        clock: Clock,
        network: Network,
        processors: Sequence[Processor],
        coding: Coding,
        numbers: range,
    ) -> None:
        self.plan, self.seconds, self.clock, self.network, self.coding = plan, seconds, clock, network, coding
        self.numbers = numbers
        self.processors, self.diary = processors, Diary(clock)
        self.servers: Servers | None = None
        self.averages: Averages | None = None
        verbs = {at.verb for program in (*plan.schedule.programs, *plan.schedule.opening) for at in program}
        if Verb.PUSH in verbs:
            self.servers = Servers(plan, clock, network, self.processors, coding, self.diary)
        elif plan.layout.averages_beside:
            self.averages = Averages(plan, clock, network, self.processors, coding, self._sends, self.diary)
        self.arms: dict[Verb, Callable[[SimulatedRank, Instruction, Sums], Process]] = {
            verb: getattr(self, f"_{verb}") for verb in verbs
        }
        self.ranks = [
            SimulatedRank(rank, plan.mesh.coordinates(rank), self.processors[rank])
            for rank in range(plan.mesh.world_size)
        ]
        self.flow = Dataflow(plan.mesh.pp, len(plan.schedule.depths) - 1)
        self.exchanged: dict[tuple[int, int, int], Event] = {}  # by receiver, sender, step
        self.messages: dict[tuple[int, StageMessage, int], Event] = {}  # by receiver, message, step
        self.groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self.numel = float(sum(tensor.parameter.numel for tensor in plan.trained))

    def _compute(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        """Arithmetic, beside the collectives that begin with it; then those for which the rank waits."""
        begun = [(one.record, self._begin(rank, one)) for one in sums.begins]
        yield from rank.computes(self.seconds(rank.number, at))
        for record, done in begun:
            if record.verb is Verb.REDUCE:
                rank.reductions.append(done)
            else:
                yield from self._await(rank, done, Doing.COLLECTIVE)
        for one in sums.follows:
            yield from self._await(rank, self._begin(rank, one), Doing.COLLECTIVE)

    def _await(self, rank: SimulatedRank, event: Event, why: Doing) -> Process:
        """Wait for an event. Until what ends with it has begun, the rank waits for another one."""
        begin_s = self.clock.now_s
        yield event
        self.diary.waited(rank.number, why, begin_s, event.begun_s)

    def _pass(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        """A computation waits for the message that it reads."""
        if (wanted := self.flow.reads(rank.coordinates["pp"], at)) is not None:
            yield from self._await(rank, self._arrival(rank, rank.number, wanted), Doing.MESSAGE)
        yield from self._compute(rank, at, sums)

    _forward = _backward = _backward_input = _pass
    _load = _backward_weight = _step = _compute

    def _reduce(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        for done in rank.reductions:
            yield from self._await(rank, done, Doing.COLLECTIVE)
        rank.reductions.clear()
        yield from self._compute(rank, at, sums)

    def _average(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        """Begin the sums of a fragment; MERGE awaits them. Or begin the average of a pair."""
        if self.averages is not None:
            yield from self.averages.average(rank.number)
            return
        yield from rank.computes(self.seconds(rank.number, at))
        yield from rank.codes(self._share_s(of_average(self.plan)[0], at))
        assert at.fragment is not None
        rank.flying[at.fragment] = [self._begin(rank, one) for one in sums.begins]

    def _merge(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        if self.averages is not None:
            yield from rank.codes(self.averages.merge(rank.number))
            return
        assert at.fragment is not None
        for done in rank.flying.pop(at.fragment):
            yield from self._await(rank, done, Doing.COLLECTIVE)
        yield from rank.codes(self._share_s(of_average(self.plan)[1], at))
        yield from self._compute(rank, at, sums)

    def _share_s(self, work: ElementWork, at: Instruction) -> float:
        """Seconds for a fragment of this rank's weights. Fragments have about the same size."""
        if self.plan.mesh.degree(AXIS) == 1:
            return 0.0
        mesh = self.plan.mesh
        held = self.numel / (mesh.pp * mesh.tp * mesh.dp_shard)
        return work.seconds(held / self.plan.layout.fragments, self.coding)

    def _push(self, rank: SimulatedRank, at: Instruction, _: Sums) -> Process:
        assert self.servers is not None
        yield from rank.codes(of_push(self.plan)[0].seconds(self.numel, self.coding))
        rank.sent[-1] += self.servers.pushed_bytes
        yield from self.servers.push(rank.number)
        yield from rank.codes(delivered(self.plan).seconds(self.numel, self.coding))

    def _pull(self, rank: SimulatedRank, at: Instruction, _: Sums) -> Process:
        assert self.servers is not None
        yield from self.servers.pull(rank.number)
        yield from rank.codes(ElementWork(2.0).seconds(self.numel, self.coding))

    def _serve(self, rank: SimulatedRank, at: Instruction, _: Sums) -> Process:
        """A server is a queue (served_walk.py), not a process."""
        yield 0.0

    def _exchange(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        """Messages to the neighbours of this round; the rank waits for theirs alone. Then what all ranks sum."""
        graph, index, step = graph_of(self.plan), rank.coordinates[AXIS], len(rank.ends_s)
        round_number = self.numbers[step] // self.plan.layout.gossip_every
        group = self.plan.mesh.group(AXIS, rank.number)
        sent = [one for one in sums.follows if one.record.collective is Collective.SEND]
        size = float(sum(one.record.payload_bytes for one in sent))
        sources = [source for source in graph.matrix(round_number)[index] if source != index]
        before, after = of_mixing(self.plan, len(sources))
        yield from rank.codes(self._share_s(before, at))
        for target in graph.targets(round_number, index):
            arrived = self.exchanged.setdefault((group[target], rank.number, step), Event())
            rank.sent[-1] += size
            arrived.begun_s = self.clock.now_s
            self.clock.start(self._hand_over(self.network.share(rank.number, group[target], size), arrived))
        for source in sources:
            awaited = self.exchanged.setdefault((rank.number, group[source], step), Event())
            yield from self._await(rank, awaited, Doing.MESSAGE)
        yield from rank.codes(self._share_s(after, at))
        others = [one for one in sums.follows if one not in sent]
        yield from self._compute(rank, at, Sums(sums.begins, others))

    def _send_activation(self, rank: SimulatedRank, at: Instruction, _: Sums) -> Process:
        """A message leaves; nobody waits for it here."""
        assert at.peer is not None
        receiver = self.plan.mesh.rank_at({**rank.coordinates, "pp": at.peer})
        arrived = self._arrival(rank, receiver, self.flow.message(rank.coordinates["pp"], at))
        size = self._message_bytes(rank, at)
        arrived.begun_s = self.clock.now_s
        self.clock.start(self._hand_over(self._message(rank, receiver, size), arrived))
        yield 0.0

    _send_gradient = _send_activation

    def _receive_activation(self, rank: SimulatedRank, at: Instruction, sums: Sums) -> Process:
        """The computation that reads it waits for a message."""
        yield 0.0

    _receive_gradient = _receive_activation

    def _hand_over(self, sent: Event, arrived: Event) -> Process:
        yield sent
        self.clock.happens(arrived)

    def _begin(self, rank: SimulatedRank, one: Joined) -> Event:
        """Begin a collective. Returns its end. One with coding is computed by a thread, after those before it."""
        if one.coding is None:
            return self._join(rank, one.record, one.times, in_pieces=one.in_pieces)
        done, before = Event(), rank.last_coded.get(one.record.axis)
        rank.last_coded[one.record.axis] = done
        self.clock.start(self._coded(rank, one, one.coding, before, done))
        return done

    def _coded(self, rank: SimulatedRank, one: Joined, coding: Exchanged, before: Event | None, done: Event) -> Process:
        if before is not None:
            yield before
        yield from rank.codes(one.times * coding.before_s)
        joined = self._join(rank, one.record, one.times, in_pieces=one.in_pieces)
        yield joined
        done.begun_s = joined.begun_s
        yield from rank.codes(one.times * coding.after_s)
        self.clock.happens(done)

    def _join(self, rank: SimulatedRank, record: Traffic, times: float, *, in_pieces: bool) -> Event:
        """The rank's next collective of a group; counts its bytes."""
        if record.collective is Collective.COPY:
            return self.network.copy(rank.number, times * record.inside_bytes)
        key = record.axis, rank.number
        if key not in self.groups:
            self.groups[key] = self.plan.mesh.group(*key)
        group = self.groups[key]
        rank.sent[-1] += times * record.wire_bytes(len(group))
        return self.network.join(rank.number, group, record, times, in_pieces=in_pieces)

    def _message(self, rank: SimulatedRank, receiver: int, payload_bytes: float) -> Event:
        """A message to another rank; counts its bytes."""
        rank.sent[-1] += payload_bytes
        return self.network.send(rank.number, receiver, payload_bytes)

    def _sends(self, rank: int, payload_bytes: float) -> None:
        """Count bytes that a rank sends beside its computation, in its present step."""
        if (sent := self.ranks[rank].sent) and not self.ranks[rank].has_ended:
            sent[-1] += payload_bytes

    def _arrival(self, rank: SimulatedRank, receiver: int, message: StageMessage) -> Event:
        """The arrival of a message at its receiver, in the step of a rank: one event for both ends."""
        return self.messages.setdefault((receiver, message, len(rank.ends_s)), Event())

    def _message_bytes(self, rank: SimulatedRank, at: Instruction) -> float:
        stage = rank.coordinates["pp"]
        sizes = [t.payload_bytes for t in self.plan.traffic if t.verb is at.verb and t.stage in (None, stage)]
        return float(max(sizes, default=0))
