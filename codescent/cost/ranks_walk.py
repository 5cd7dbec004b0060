"""In: a plan, seconds of arithmetic and of coding, links. Out: its ranks in order of time: what they did, and when.
Does not measure. simulate.py has one step of a pipeline's stages in relative units, and needs no plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from codescent.clusters.cluster import Cluster
from codescent.cost.amounts import Phase, phases
from codescent.cost.arithmetic import Seconds
from codescent.cost.coding import Coding
from codescent.cost.doing import Doing, Window
from codescent.cost.events import Clock, Process
from codescent.cost.handed import Handed, meets, segments_of
from codescent.cost.network import Network
from codescent.cost.pairs_walk import Averages
from codescent.cost.processor import Processor
from codescent.cost.rank_program import Program, program_of
from codescent.cost.rank_verbs import RankVerbs, SimulatedRank
from codescent.cost.served_walk import Servers
from codescent.cost.simulate import Deadlock, Span
from codescent.cost.walked import RankMeans, Walk, mean_step_s
from codescent.plan import Instruction, Plan, Verb
from codescent.strategies.gossip_graphs import DRAWN, graph_of

NO_CODING = Coding()
COMPUTES = (Verb.LOAD, Verb.FORWARD, Verb.BACKWARD, Verb.REDUCE, Verb.STEP)
"""Verbs of a step without exchanges. REDUCE then has nothing to await."""
DRAWN_ROUNDS = 16
"""Rounds that are walked where each has other neighbours."""


def walk(
    plan: Plan,
    seconds: Seconds,
    cluster: Cluster,
    *,
    coding: Coding = NO_CODING,
    collective_s: float = 0.0,
    cores: float | None = None,
    phase: Phase | None = None,
    rounds: int | None = None,
    warm_up: int = 1,
    steps: int | None = None,
    end_steps: int = 0,
    timeline: bool = True,
) -> Walk:
    """Walk all ranks through `warm_up` and `rounds` rounds of a phase; the latter are measured.

    Where ranks are given portions of work they have no common rounds. Then they walk `steps` steps, with the meetings
    of all ranks in them. What comes behind the first `warm_up` rounds is measured.

    Args:
        plan: of a run.
        seconds: of arithmetic, see `arithmetic`.
        cluster: the machines, with links as they are reached (`Cluster.reached`). Neighbouring ranks share a host.
        coding: how fast ranks encode, decode, add and copy what they exchange. The default takes no time.
        collective_s: of a collective beside its messages.
        cores: hosts on one machine share so many. A thread has one at most, and `seconds` are those of a whole core.
            None: each rank has a processor of its own.
        phase: None: the last one.
        rounds: None: one, or where neighbours are drawn in each round, DRAWN_ROUNDS; where they come in turn, one turn.
        steps: of a run of portions; None: as many as `segments_of` says, and where all ranks meet more seldom none of
            the meetings.
        end_steps: last ones of them whose time does not count: all ranks wait for what is under way then.
        timeline: keep what each rank did and when. Without it, steps of a round in which a rank exchanges nothing are
            one: long rounds take no longer than short ones.

    Raises:
        Deadlock: the lists wait for each other.
    """
    phase = phase or phases(plan)[-1]
    hosts = [rank // cluster.devices for rank in range(plan.world_size)]
    clock = Clock()
    network = Network(clock, cluster, hosts, collective_s)
    shared = None if cores is None else Processor(clock, cores)
    processors = [shared or Processor(clock) for _ in hosts]
    if plan.layout.hands_out:
        segments, period = segments_of(plan, steps), plan.schedule.period
        numbers = range(segments[-1].stop)
        handed = _HandedWalk(plan, seconds, clock, network, processors, coding, numbers)
        return handed.of_rounds(period, warm_up, timeline=timeline).run_segments(segments, end_steps)
    if rounds is None:
        rounds = DRAWN_ROUNDS if plan.layout.gossip in DRAWN else graph_of(plan).turn
    numbers = range(phase.round_begins, phase.round_begins + (warm_up + rounds) * phase.period)
    found = _Simulation(plan, seconds, clock, network, processors, coding, numbers)
    return found.of_rounds(phase.period, warm_up, timeline=timeline).run()


class _Simulation(RankVerbs):
    """One simulation: a process for each rank, and the network between them."""

    def of_rounds(self, period: int, warm_up: int, *, timeline: bool) -> Self:
        """Rounds have `period` steps; the first `warm_up` of them are not measured. `timeline`: see `walk`."""
        self.period, self.warm_up, self.timeline = period, warm_up * period, timeline
        self.programs: dict[tuple[int, int], Program] = {}  # by stage and step of a round
        self.alike: dict[tuple[int, tuple[Instruction, ...], tuple[bool, ...]], Program] = {}  # most steps are
        self.spans: list[Span] = []
        self.early: list[Span] = []  # of steps that are not measured, but may end later
        self.diary.is_kept = timeline
        return self

    def run(self) -> Walk:
        """Walk to the ends of all lists."""
        self._run([self._steps(rank) for rank in self.ranks])
        begin_s = max(rank.ends_s[self.warm_up - 1] for rank in self.ranks) if self.warm_up else 0.0
        ranks = tuple(_times(rank, self.warm_up) for rank in self.ranks)
        return self._walk(mean_step_s(ranks), ranks, begin_s)

    def _run(self, processes: Sequence[Process]) -> None:
        for process in processes:
            self.clock.start(process)
        self.clock.run()
        if stuck := {rank.number: rank.at for rank in self.ranks if not rank.has_ended}:
            raise Deadlock({rank: (at, "another rank") for rank, at in stuck.items() if at is not None})

    def _walk(self, step_s: float, ranks: tuple[RankMeans, ...], begin_s: float) -> Walk:
        window = Window(begin_s, math.inf)
        early = [span for span in self.early if span.end_s > max(begin_s, span.start_s)]
        return Walk(
            step_s,
            self.plan.work.tokens / step_s if step_s else 0.0,
            ranks,
            timeline=window.cut(sorted([*early, *self.spans], key=lambda span: (span.start_s, span.stage))),
            flights=window.cut(self.network.flights if self.timeline else []),
            activities=window.cut(sorted(self.diary.activities, key=lambda at: (at.start_s, at.stage))),
        )

    def _steps(self, rank: SimulatedRank) -> Process:
        """The process of a rank: its lists, step after step."""
        number, stop = self.numbers.start, self.numbers.stop
        while number < stop:
            quiet = 0
            while not self.timeline and number + quiet < stop and self._is_quiet(rank, number + quiet):
                quiet += 1
            if quiet:
                yield from self._quiet_steps(rank, number, quiet)
            else:
                yield from self._step_of(rank, number)
            number += max(1, quiet)
        rank.has_ended = True

    def _is_quiet(self, rank: SimulatedRank, number: int) -> bool:
        """Whether a rank only computes in a step."""
        program = self._program(rank.coordinates["pp"], number)
        return all(at.verb in COMPUTES and not (sums.begins or sums.follows) for at, sums in program)

    def _quiet_steps(self, rank: SimulatedRank, first: int, steps: int) -> Process:
        """So many steps in which a rank only computes, from step `first` on. They are alike."""
        step_s = sum(self.seconds(rank.number, at) for at, _ in self._program(rank.coordinates["pp"], first))
        start_s = self.clock.now_s
        yield from rank.processor.work(steps * step_s)
        each_s = (self.clock.now_s - start_s) / steps
        rank.ends_s += [start_s + (number + 1) * each_s for number in range(steps)]
        rank.busy_s += [step_s] * steps
        rank.coding_s += [0.0] * steps
        rank.sent += [0.0] * steps

    def _step_of(self, rank: SimulatedRank, number: int) -> Process:
        for amounts in (rank.busy_s, rank.coding_s, rank.sent):
            amounts.append(0.0)
        for instruction, sums in self._program(rank.coordinates["pp"], number):
            rank.at = instruction
            start_s, busy_s = self.clock.now_s, rank.busy_s[-1]
            yield from self.arms[instruction.verb](rank, instruction, sums)
            if self.timeline:
                waits_s = self.clock.now_s - start_s - (rank.busy_s[-1] - busy_s)
                spans = self.spans if len(rank.ends_s) >= self.warm_up else self.early
                spans.append(Span(rank.number, instruction, start_s, self.clock.now_s, max(0.0, waits_s)))
        rank.ends_s.append(self.clock.now_s)

    def _program(self, stage: int, number: int) -> Program:
        """The list of a stage in a step, with the collectives of each instruction."""
        key = stage, number % self.period
        if key not in self.programs:
            running = tuple(record.runs_in(number) for record in self.plan.traffic)
            same = stage, self.plan.schedule.program(stage, number), running
            if same not in self.alike:
                self.alike[same] = program_of(self.plan, stage, number, self.coding)
            self.programs[key] = self.alike[same]
        return self.programs[key]


class _HandedWalk(_Simulation):
    """A walk of ranks that are given portions of work, from one meeting of all ranks to the next."""

    def run_segments(self, segments: Sequence[range], end_steps: int) -> Walk:
        """Walk to the end of the last segment."""
        found = self.servers or self.averages
        assert found is not None
        self.handed: Handed = found
        self.known: list[tuple[int, float]] = [(0, 0.0)]  # complete steps as rank 0 knows them, and since when
        self.ends = meets(self.plan, list(segments))
        self.begun = -1
        self._run([self._portions(rank, segments) for rank in self.ranks])
        ranks = tuple(_times(rank, self._warm_up(rank)) for rank in self.ranks)
        begin_s = max(rank.ends_s[self._warm_up(rank) - 1] if self._warm_up(rank) else 0.0 for rank in self.ranks)
        found_walk = self._walk(self._step_s(end_steps), ranks, begin_s)
        return replace(found_walk, servers=self._loads(), staleness=tuple(self.handed.staleness))

    def _step_s(self, end_steps: int) -> float:
        """Seconds of a step: where ranks meet, as rank 0 knows them. Portions that were given up trained nothing."""
        if not self.ends:
            return self.handed.step_s()
        first = next(at for at in self.known if at[0] >= self.warm_up)
        if first[0] == self.numbers.stop:  # rank 0 learns of the first steps when all are done
            first = 0, 0.0
        counted = [at for at in self.known if first[0] < at[0] <= self.numbers.stop - end_steps]
        last = counted[-1] if counted else self.known[-1]
        steps, share = last[0] - first[0], 1.0
        if self.handed.dropped:
            share = len(self.handed.done_s) / (len(self.handed.done_s) + self.handed.dropped)
        return (last[1] - first[1]) / max(1, steps) / share

    def _warm_up(self, rank: SimulatedRank) -> int:
        """Steps of a rank that are not measured: a slow rank has fewer steps than others."""
        share = self.warm_up / len(self.numbers) if self.ends else 0.2
        return max(0, min(len(rank.ends_s) - 1, round(len(rank.ends_s) * share)))

    def _loads(self) -> tuple[float, ...]:
        """See `Walk.servers`."""
        if self.servers is None or not self.clock.now_s:
            return ()
        return tuple(seconds / self.clock.now_s for seconds in self.servers.cards())

    def _portions(self, rank: SimulatedRank, segments: Sequence[range]) -> Process:
        """The process of a rank: portions, as long as there are any."""
        for number, segment in enumerate(segments):
            if self.begun < number:
                self.begun = number
                self.handed.begin(segment.start, segment.stop)
            if self.servers is not None:
                yield from self._served(rank, self.servers)
            else:
                assert self.averages is not None
                yield from self._shares(rank, self.averages)
            if self.ends:
                yield from self._await(rank, self.handed.meet(), Doing.RANK)
            if not rank.number:
                self.known.append((segment.stop, self.clock.now_s))
        rank.has_ended = True

    def _shares(self, rank: SimulatedRank, averages: Averages) -> Process:
        """Portions of a rank that averages beside its computation."""
        while (yield from averages.take(rank.number)):
            yield from self._step_of(rank, 0)
            self._learns(rank)
        yield from averages.land(rank.number)

    def _served(self, rank: SimulatedRank, servers: Servers) -> Process:
        """Portions of a worker."""
        yield from servers.pull(rank.number)
        while steps := servers.take(rank.number):
            begin_s = self.clock.now_s
            for step in steps:
                if step == steps[-1]:
                    servers.measured(rank.number, len(steps), self.clock.now_s - begin_s)
                yield from self._step_of(rank, self.period - 1 if step == steps[-1] else min(step, self.period - 2))
            self._learns(rank)

    def _learns(self, rank: SimulatedRank) -> None:
        """Rank 0 is told which steps are complete when it gets work."""
        if not rank.number and self.handed.complete > self.known[-1][0]:
            self.known.append((self.handed.complete, self.clock.now_s))


def _times(rank: SimulatedRank, warm_up: int) -> RankMeans:
    if not rank.ends_s:  # the others have done all portions
        return RankMeans(0.0, 0.0, 0.0, 0.0)
    steps = len(rank.ends_s) - warm_up
    took_s = rank.ends_s[-1] - (rank.ends_s[warm_up - 1] if warm_up else 0.0)
    sent = rank.sent[warm_up:]
    busy_s, coding_s = (sum(amounts[warm_up:]) / steps for amounts in (rank.busy_s, rank.coding_s))
    return RankMeans(took_s / steps, busy_s, sum(sent) / steps, max(sent), coding_s)
