"""In: the steps of every rank, the Plan. Out: a row for each kind of collective on each axis: bytes, time, bandwidth.
Does not read a trace (profile_rank.py does) and does not print."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from codescent.plan import AXES, SENDS, Collective, Plan, Traffic, Verb
from codescent.report.profile_rank import RECEIVE, Ran, RankSteps
from codescent.trace.intervals import intersection, seconds

BETWEEN_STAGES = "stages"
"""The axis of messages between pipeline stages. Each pair of stages has a group of its own."""


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective on one axis. Seconds and numbers are of a step, and means over ranks.

    Attributes:
        kind, axis: as in the Plan's traffic; BETWEEN_STAGES for messages.
        calls: of the rank with most.
        planned: the same in the Plan; 0: the Plan has no such collective in these steps.
        sent_bytes: that a rank sends by the Plan; of the rank with most.
        wire_s: from the arrival of the last rank to the end.
        bus_bytes_per_s: bytes that a rank sends in a ring, per second on the wire; None: nothing was sent.
        skew_s: mean time of a call from the first arrival to the last; None: messages, whose two ranks do not meet.
        flight_s: from the arrival of a rank to the end.
        exposed_s: the part of flight_s in which the rank waited.
    """

    kind: str
    axis: str
    calls: float
    planned: float
    sent_bytes: float
    wire_s: float
    bus_bytes_per_s: float | None
    skew_s: float | None
    flight_s: float
    exposed_s: float

    @property
    def hidden(self) -> float | None:
        """Share of the time in flight in which the rank worked; None: no time."""
        return 1.0 - self.exposed_s / self.flight_s if self.flight_s > 0 else None


@dataclass
class _Call:
    """A collective of a group: what each of its ranks saw of it."""

    axis: str
    group: tuple[int, ...]
    seen: dict[int, Ran] = field(default_factory=dict)


_Key = tuple[str, str]
"""Kind and axis of a row."""


def collective_rows(found: Sequence[RankSteps], plan: Plan) -> Iterator[CollectiveRow]:
    """A row for each kind on each axis that is planned in the recorded steps, or ran on an axis of the Plan."""
    planned: dict[_Key, list[Traffic]] = {}
    for record in _planned(plan, [number - 1 for number in found[0].steps]):
        axis = BETWEEN_STAGES if record.verb in SENDS else record.axis
        planned.setdefault((record.collective, axis), []).append(record)
    calls: dict[_Key, list[_Call]] = {}
    for key, call in _calls(found, plan):
        calls.setdefault(key, []).append(call)
    for key in dict.fromkeys([*planned, *calls]):
        yield _row(key, calls.get(key, []), planned.get(key, []), found, plan)


def _planned(plan: Plan, numbers: Sequence[int]) -> Iterator[Traffic]:
    """The records that run in these steps (from 0); `times`: in all of them together.

    The messages of an exchange with neighbours are one call, as they are recorded: they leave and are awaited together.
    """
    exchanges: list[Traffic] = []
    for record in plan.traffic:
        runs = sum(map(record.runs_in, numbers))
        if not (runs and record.axis and plan.mesh.degree(record.axis) > 1):
            continue
        whole = replace(record, times=record.times * runs)
        if record.verb is Verb.EXCHANGE and record.collective is Collective.SEND:
            exchanges.append(whole)
        else:
            yield whole
    for stage in {record.stage for record in exchanges}:
        of_stage = [record for record in exchanges if record.stage == stage]
        calls = sum(number % of_stage[0].every == of_stage[0].at for number in numbers)
        sent = sum(record.times * record.payload_bytes for record in of_stage)
        yield replace(of_stage[0], times=calls, payload_bytes=sent // calls)


def _calls(found: Sequence[RankSteps], plan: Plan) -> Iterator[tuple[_Key, _Call]]:
    """The calls of all groups. The ranks of a group issue the calls of a step in one order."""
    known = {*AXES, *(record.axis for record in plan.traffic)}
    calls: dict[tuple[object, ...], tuple[_Key, _Call]] = {}
    for one in found:
        rank, numbers = one.head.rank, Counter[tuple[object, ...]]()
        begins = [begin for begin, _ in one.steps.values()]
        for ran in one.collectives:
            if ran.axis not in known:
                continue
            between = ran.axis.startswith("pp[") and ran.kind in (Collective.SEND, RECEIVE)
            kind = Collective.SEND if ran.kind == RECEIVE else ran.kind
            group = plan.mesh.group(ran.axis, rank)
            of = (kind, ran.axis, group, bisect(begins, ran.begin))
            numbers[of] += 1
            key = (kind, BETWEEN_STAGES if between else ran.axis)
            call = calls.setdefault((*of, numbers[of]), (key, _Call(ran.axis, group)))[1]
            call.seen[rank] = ran
    return iter(calls.values())


def _row(
    key: _Key, calls: Sequence[_Call], planned: Sequence[Traffic], found: Sequence[RankSteps], plan: Plan
) -> CollectiveRow:
    steps, between = len(found[0].steps), key[1] == BETWEEN_STAGES
    whole = [call for call in calls if len(call.seen) == len(call.group)]
    groups: dict[tuple[str, tuple[int, ...]], list[_Call]] = {}
    for call in whole:
        groups.setdefault((call.axis, call.group), []).append(call)
    wire_s = sum(_wire_s(call, found) for call in whole)
    sent = sum(
        _sent(planned, axis, group, plan) * len(those) / max(1, _times(planned, axis, group, plan))
        for (axis, group), those in groups.items()
    )
    skews = [_skew_s(call) for call in whole]
    issued = Counter(rank for call in calls for rank, ran in call.seen.items() if ran.kind != RECEIVE)
    taking = {rank for call in calls for rank in call.seen}
    flights = [(rank, (ran.begin, ran.end)) for call in calls for rank, ran in call.seen.items()]
    mean = 1 / steps / max(1, len(taking))
    stages = range(plan.mesh.pp)
    return CollectiveRow(
        *key,
        calls=max(issued.values(), default=0) / steps,
        planned=max((sum(t.times for t in planned if t.stage in (None, stage)) for stage in stages), default=0) / steps,
        sent_bytes=max(_bytes((t for t in planned if t.stage in (None, stage)), plan) for stage in stages) / steps,
        wire_s=wire_s / steps / max(1, len(groups)),
        bus_bytes_per_s=sent / wire_s if wire_s > 0 and sent > 0 else None,
        skew_s=None if between or not skews else statistics.fmean(skews),
        flight_s=mean * sum(seconds([flight]) for _, flight in flights),
        exposed_s=mean * sum(seconds(intersection([flight], found[rank].waiting)) for rank, flight in flights),
    )


def _bytes(records: Iterable[Traffic], plan: Plan) -> float:
    """Bytes that a rank sends in the recorded steps."""
    return sum(record.times * record.wire_bytes(plan.mesh.degree(record.axis)) for record in records)


def _of(planned: Sequence[Traffic], axis: str, group: Sequence[int], plan: Plan) -> list[Traffic]:
    """The records of a group."""
    stages = {plan.mesh.coordinates(rank)["pp"] for rank in group}
    # Where a group has ranks of several stages, each stage has a record of the same collectives.
    stage = min(stages)
    return [t for t in planned if t.axis == axis and (t.verb in SENDS or t.stage in (None, stage))]


def _sent(planned: Sequence[Traffic], axis: str, group: Sequence[int], plan: Plan) -> float:
    return _bytes(_of(planned, axis, group, plan), plan)


def _times(planned: Sequence[Traffic], axis: str, group: Sequence[int], plan: Plan) -> int:
    return sum(record.times for record in _of(planned, axis, group, plan))


def _arrival(call: _Call) -> float:
    """When the last rank arrived."""
    return max(ran.begin for ran in call.seen.values())


def _wire_s(call: _Call, found: Sequence[RankSteps]) -> float:
    """Seconds from the last arrival to the end: the mean of the ranks that waited for the end, else of all.

    A rank that did not wait may have seen the end late. Of a message, only the rank that receives sees the end.
    """
    receiving = {rank: ran for rank, ran in call.seen.items() if ran.kind == RECEIVE} or call.seen
    waited = {rank: ran for rank, ran in receiving.items() if intersection([(ran.begin, ran.end)], found[rank].waiting)}
    ends = [ran.end for ran in (waited or receiving).values()]
    return max(0.0, statistics.fmean(ends) - _arrival(call)) / 1e6


def _skew_s(call: _Call) -> float:
    """Seconds from the first arrival to the last."""
    return (_arrival(call) - min(ran.begin for ran in call.seen.values())) / 1e6
