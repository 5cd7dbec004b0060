"""In: a plan, a stage, a cluster, a software. Out: the seconds of each instruction of the stage, by what takes them.
Does not put the instructions of stages in order (simulate.py does), and does not say what is sent (the plan does)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.amounts import phases, runs_in
from codescent.cost.collective_time import BETWEEN, BUS, INSIDE, seconds
from codescent.cost.device_time import Spent, copies_per_s, spent
from codescent.cost.loading import Loading
from codescent.cost.operators import operators_of_depth
from codescent.cost.second_products import kept_shares
from codescent.cost.time_parts import TimeParts
from codescent.cost.update_time import update_time
from codescent.plan import AXES, SENDS, Collective, Instruction, Plan, Traffic, Verb

PASSES = {Verb.FORWARD: 0, Verb.BACKWARD: 1, Verb.BACKWARD_INPUT: 1, Verb.BACKWARD_WEIGHT: 1}
"""The instructions that compute depths: forward is pass 0, backward is pass 1."""
Waits = dict[str, float]
"""Seconds by link."""


def _none() -> Waits:
    return defaultdict(float)


@dataclass
class DepthMessages:
    """The messages of a depth in a pass.

    Attributes:
        before: weights that are gathered before the depth computes.
        beside: messages that travel while the depth computes.
        within: sums and gathers of layers, for which the depth waits.
        after: gradients that leave when the depth is done.
        copied_s: seconds of the copies between tensors and the buffers of `before` and `after`.
    """

    before: Waits = field(default_factory=_none)
    beside: Waits = field(default_factory=_none)
    within: Waits = field(default_factory=_none)
    after: Waits = field(default_factory=_none)
    copied_s: float = 0.0


class ChunkTime(NamedTuple):
    """A pass through a chunk: its seconds, and the gradients that are still under way at its end."""

    parts: TimeParts
    under_way: Waits


class StageTime:
    """The seconds of the instructions of a stage, on its first rank.

    `always`: by pass and depth, what is sent for each micro-batch. `once`: what is sent for the first forward pass, or
    for the last backward pass. `ends`: by instruction, what its rank waits for.
    """

    def __init__(self, plan: Plan, stage: int, cluster: Cluster, software: Software) -> None:
        self.plan, self.stage, self.cluster, self.software = plan, stage, cluster, software
        self.rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
        self.chunks = plan.schedule.parts(stage)
        self.loading = Loading(plan, stage, cluster, software)
        self.always: dict[tuple[int, int], DepthMessages] = defaultdict(DepthMessages)
        self.once: dict[tuple[int, int], DepthMessages] = defaultdict(DepthMessages)
        self.ends: dict[Verb, Waits] = defaultdict(_none)
        self._ran: dict[tuple[int, int, bool], ChunkTime] = {}
        self.averages: Waits = _none()  # of a round, beside the steps that follow it
        records = [
            one for one in runs_in(plan, phases(plan)[-1]) if one.stage in (None, stage) and one.verb not in SENDS
        ]
        self._runs: dict[object, int] = defaultdict(int)  # of a unit in a step: some are hidden, and others not
        for record in records:
            self._runs[_unit(record)] += record.times
        for record in records:
            self._place(record)

    def _place(self, record: Traffic) -> None:
        """Find where the rank waits for a collective."""
        messages = self._tensors(record) if self.software.by_tensor else 1
        link, each_s = seconds(record, self.plan.mesh, self.rank, self.cluster, self.software, messages)
        whole_s = record.times * each_s / record.every
        depths = [depth for chunk in self.chunks for depth in chunk if depth in range(*record.depths)]
        if record.verb in PASSES:
            self._place_inside(record, link, whole_s, depths or [self.chunks[0].start])
        elif record.verb is Verb.AVERAGE and record.during is not None:
            self.averages[link] += whole_s
        elif record.verb is Verb.REDUCE and record.during is not None and depths and "sums" in self.software.overlaps:
            self.once[1, min(depths)].after[link] += whole_s
        else:
            self.ends[Verb.REDUCE if record.verb is Verb.REDUCE else Verb.STEP][link] += whole_s

    def _tensors(self, record: Traffic) -> int:
        """How many tensors a collective of weights or gradients has."""
        depths = range(*record.depths)
        if sends_layers(record):
            return 1
        held = self.plan.held_by(self.stage)
        return max(1, sum(any(depth in depths for depth in tensor.parameter.depths) for tensor in held))

    def _place_inside(self, record: Traffic, link: str, whole_s: float, depths: Sequence[int]) -> None:
        """A collective of depths: of each micro-batch, of a part of them (then it counts as the mean of all), or once.

        What is sent once may be sent for each micro-batch, and the other way round: see `Software.units`.
        """
        of_pass, is_layers = PASSES[record.verb], sends_layers(record)
        gathers, units = record.collective is Collective.ALL_GATHER, "" if is_layers else self.software.units
        runs, microbatches = self._runs[_unit(record)] / len(depths), self.plan.work.num_microbatches
        share, repeats, again = 1.0, is_layers or runs > 1, units == "again" and gathers and runs <= 1
        if units == "kept" and runs > 1:
            share, repeats = 0.0 if gathers and of_pass else 1.0 / runs, False
        exchanges = self.always if repeats or again else self.once
        share /= len(depths) * (microbatches if repeats else 1)
        each_s = share * whole_s
        copied_s = 0.0 if is_layers else share * record.times / record.every * self._copied_s(record)
        for depth in depths:
            found = exchanges[of_pass, depth]
            found.copied_s += copied_s
            if is_layers:
                hidden = record.during is None and "layers" in self.software.overlaps
                pieces = self.plan.mesh.degree(record.axis) if hidden else 1  # the first piece is waited for
                (found.within if record.during is None else found.beside)[link] += each_s / pieces
            elif gathers or of_pass == 0:
                found.before[link] += each_s
                if again and of_pass == 0:
                    exchanges[1, depth].before[link] += each_s
                    exchanges[1, depth].copied_s += copied_s
            else:
                found.after[link] += each_s

    def _copied_s(self, record: Traffic) -> float:
        """What is gathered is copied out of a buffer, and what is summed into one (Zhao et al. 2023, "PyTorch FSDP",
        section 4.2): read once and written once."""
        return 2.0 * record.payload_bytes / copies_per_s(self.cluster.device, self.software)

    def parts_of(self, at: Instruction) -> TimeParts:
        """The seconds of an instruction. REDUCE waits for the gradients that the last backward pass has sent."""
        if at.verb in PASSES:
            of_pass = PASSES[at.verb]
            once = at.last if of_pass else at.microbatch == 0
            share = 1.0
            if at.verb is not Verb.BACKWARD and of_pass:
                share = self._weights if at.verb is Verb.BACKWARD_WEIGHT else 1.0 - self._weights
            beside_s = self.software.microbatch_s / 2 / len(self.chunks)
            return (self._run(of_pass, at.chunk, once=once).parts + TimeParts(microbatch_s=beside_s)).times(share)
        if at.verb is Verb.LOAD:
            return TimeParts(data_s=self.loading.seconds(at))
        if at.verb is Verb.REDUCE:
            return _waited(self.ends[Verb.REDUCE]) + _waited(self._run(1, 0, once=True).under_way)
        if at.verb is Verb.STEP:
            return self._step() + self._averages()
        return TimeParts()

    def _averages(self) -> TimeParts:
        """What is left of an average, a step's share of it, behind the steps that it runs beside."""
        sent_s = sum(self.averages.values())
        if not sent_s:
            return TimeParts()
        passes = (self._run(one, chunk, once=False).parts for chunk in range(len(self.chunks)) for one in (0, 1))
        step_s = self.plan.work.num_microbatches * sum(parts.total_s for parts in passes)
        hidden_s = self.plan.layout.overlap_steps * step_s / self.plan.schedule.period
        left = max(0.0, 1.0 - hidden_s / sent_s)
        return _waited({link: left * each_s for link, each_s in self.averages.items()})

    @cached_property
    def _weights(self) -> float:
        """The share of gradients of weights in a backward pass."""
        share = self.plan.flops().weight_share
        return share / (1.0 + share)

    def _step(self) -> TimeParts:
        """The update, and what it waits for.

        A host updates one unit while it copies others (train/host_copy.py): what is longer counts. The first unit comes
        before and the last one leaves after, so copies in both directions count one after the other. The products of
        Muon need what is copied, so there nothing is hidden.
        """
        update, waits = update_time(self.plan, self.rank, self.cluster, self.software), dict(self.ends[Verb.STEP])
        if not any(tensor.orthogonalized for tensor in self.plan.trained):
            waits[BUS] = max(0.0, waits.get(BUS, 0.0) - update.host_s)
        return TimeParts(update_s=sum(update), step_s=self.software.step_s) + _waited(waits)

    def collectives(self, of_pass: int, chunk: int) -> Waits:
        """By link: the seconds of all collectives of a pass of one micro-batch, which is neither the first nor the last
        one."""
        sent = _none()
        for depth in self.chunks[chunk]:
            if (of_pass, depth) in self.always:
                found = self.always[of_pass, depth]
                for messages in (found.before, found.beside, found.within, found.after):
                    for link, each_s in messages.items():
                        sent[link] += each_s
        return sent

    def _run(self, of_pass: int, chunk: int, *, once: bool) -> ChunkTime:
        key = of_pass, chunk, once
        if key not in self._ran:
            depths = self.chunks[chunk]
            walked = _Walk(self, of_pass, once=once).through(list(reversed(depths) if of_pass else depths))
            if of_pass and not once:  # the next micro-batch begins when gradients have left
                walked = ChunkTime(walked.parts + _waited(walked.under_way), {})
            self._ran[key] = walked
        return self._ran[key]

    @cached_property
    def spent(self) -> dict[int, tuple[Spent, Spent]]:
        """What forward and backward of each depth take. Depths that are alike are computed once."""
        found: dict[int, tuple[Spent, Spent]] = {}
        alike: dict[tuple[object, ...], tuple[Spent, Spent]] = {}
        held: dict[int, list[object]] = defaultdict(list)
        for tensor in self.plan.held_by(self.stage):
            parameter = tensor.parameter
            for depth in parameter.depths:
                held[depth].append((parameter.shape, parameter.role, parameter.trained))
        last, device = self.plan.model.num_layers, self.cluster.device
        kept = kept_shares(self.plan) if self.software.second_products else None
        for depth in (depth for chunk in self.chunks for depth in chunk):
            computes = tuple(one.depths[0] <= depth < one.depths[1] for one in self.plan.operators)
            key = depth == 0, depth > last, computes, tuple(held[depth])
            if key not in alike:
                operators = operators_of_depth(self.plan, depth, device.kind, self.rank, kept)
                alike[key] = spent(operators, device, self.software, self.plan.work.precision, last)
            found[depth] = alike[key]
        return found


def sends_layers(record: Traffic) -> bool:
    """Whether a collective sends parts of layers, for each micro-batch: not weights, and not their gradients.

    Ranks of tp and cp compute the same samples. What those of cp and ep sum are gradients.
    """
    sums = record.collective is Collective.ALL_REDUCE
    return record.axis == "tp" or (record.axis in ("cp", "ep") and not sums)


def _unit(record: Traffic) -> object:
    """Records with the same unit are runs of one collective, of which some are hidden."""
    return record.what, record.verb, record.axis, record.collective, record.depths


class _Walk:
    """A pass through the depths of a chunk: one stream computes, and one for each link sends.

    The weights of a depth are gathered while the one before it computes. Its gradients leave while the next one
    computes (Zhao et al. 2023, "PyTorch FSDP", section 3.3). Both are in one queue for each link. Messages of layers
    are of other groups of ranks: on a link with a queue each of both has half of it.
    """

    def __init__(self, stage: StageTime, of_pass: int, *, once: bool) -> None:
        self.stage, self.of_pass = stage, of_pass
        self.sources = [stage.always, stage.once] if once else [stage.always]
        self.hides = "gathers" in stage.software.overlaps
        self.now_s, self.parts = 0.0, TimeParts()
        self.free_s: Waits = _none()  # by link: when it is free again

    def through(self, depths: Sequence[int]) -> ChunkTime:
        """Walk from the first depth to the last one."""
        ready = self._gather(depths[0]) if depths else {}
        for depth, following in zip(depths, [*depths[1:], None]):
            self._wait_until(ready)
            begins_s = self.now_s
            if self.hides and following is not None:
                ready = self._gather(following)
            messages = self._messages(depth)
            self._compute(self.stage.spent[depth][self.of_pass], messages)
            for found in messages:
                self._wait_beside(found.beside, begins_s, ready)
                self._wait_within(found.within, begins_s, ready)
                self._send(found.after)
            if not self.hides and following is not None:
                ready = self._gather(following)
        return ChunkTime(
            self.parts, {link: at_s - self.now_s for link, at_s in self.free_s.items() if at_s > self.now_s}
        )

    def _messages(self, depth: int) -> list[DepthMessages]:
        return [source[self.of_pass, depth] for source in self.sources if (self.of_pass, depth) in source]

    def _gather(self, depth: int) -> Waits:
        """Begin to gather the weights of a depth. Returns when they are there, by link."""
        ready: Waits = {}
        for found in self._messages(depth):
            for link, each_s in found.before.items():
                ready[link] = self.free_s[link] = max(self.free_s[link], self.now_s) + each_s
        return ready

    def _wait_until(self, ready: Waits) -> None:
        if ready:
            link = max(ready, key=lambda one: ready[one])
            self._wait({link: max(0.0, ready[link] - self.now_s)})

    def _wait_beside(self, messages: Waits, begins_s: float, ready: Waits) -> None:
        """Messages that travel while the depth computes. Until one of both is there, they share a link with its queue:
        each takes longer by the shorter one of them."""
        longer = {link: min(each_s, self._queued_s(link, begins_s)) for link, each_s in messages.items()}
        self._delay(longer, ready)
        passed_s = self.now_s - begins_s
        self._wait({link: max(0.0, each_s + longer[link] - passed_s) for link, each_s in messages.items()})

    def _wait_within(self, messages: Waits, begins_s: float, ready: Waits) -> None:
        """Messages for which the depth waits. They are spread over it: of each second that the queue of their link
        needs, they have their share of the depth, and take longer by as much."""
        passed_s, longer = self.now_s - begins_s, {}
        for link, each_s in messages.items():
            queued_s = self._queued_s(link, begins_s)
            longer[link] = each_s * min(1.0, queued_s / (passed_s + each_s)) if queued_s else 0.0
        self._delay(longer, ready)
        self._wait({link: each_s + longer[link] for link, each_s in messages.items()})

    def _queued_s(self, link: str, begins_s: float) -> float:
        """For how long messages were in the queue of a link when the depth began."""
        return max(0.0, self.free_s.get(link, 0.0) - begins_s)

    def _delay(self, longer: Mapping[str, float], ready: Waits) -> None:
        """The queues of links take longer. The weights of the next depth are the last in them."""
        for link, each_s in longer.items():
            if each_s:
                self.free_s[link] += each_s
                if link in ready:
                    ready[link] += each_s

    def _compute(self, wanted: Spent, messages: Sequence[DepthMessages]) -> None:
        """What collectives take from the device while they run makes the computation longer."""
        moved_s = wanted.moved_s + sum(found.copied_s for found in messages)
        device_s = wanted.products_s + wanted.attention_s + moved_s
        sent_s = [sum(found.beside.values()) for found in messages]
        beside_s = min(device_s, max(0.0, max(self.free_s.values(), default=0.0) - self.now_s, *sent_s))
        slower = 1.0 + (self.stage.software.contention - 1.0) * (beside_s / device_s if device_s else 0.0)
        host_s = max(0.0, wanted.launches * self.stage.software.host_s - slower * device_s)
        computing = TimeParts(wanted.products_s, wanted.attention_s, moved_s).times(slower)
        self.parts += computing + TimeParts(host_s=host_s)
        self.now_s += slower * device_s + host_s

    def _wait(self, waits: Mapping[str, float]) -> None:
        self.parts += _waited(waits)
        self.now_s += sum(waits.values())

    def _send(self, waits: Mapping[str, float]) -> None:
        """Gradients leave; nobody waits for them here, unless nothing is sent beside the computation."""
        if not self.hides:
            self._wait(waits)
            return
        for link, each_s in waits.items():
            self.free_s[link] = max(self.free_s[link], self.now_s) + each_s


def _waited(waits: Mapping[str, float]) -> TimeParts:
    return TimeParts(inside_s=waits.get(INSIDE, 0.0), between_s=waits.get(BETWEEN, 0.0), bus_s=waits.get(BUS, 0.0))
