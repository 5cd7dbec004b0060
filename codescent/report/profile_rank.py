"""In: the trace of a rank. Out: what it did in each step: when it waited, for data or for others, and its collectives.
Does not compare ranks (profile.py does). Holds two numbers for each block and collective, and the union of kernels."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base.device_kinds import kind_of
from codescent.base.errors import UserError
from codescent.base.range_names import NEXT_BATCH, WAITING, collective_of, step_of
from codescent.plan import Collective, Verb
from codescent.trace.chrome import Event
from codescent.trace.intervals import Interval, intersection, seconds, union, without
from codescent.trace.ranks import FLIGHT, RankHead, RankTrace

RECEIVE = "receive"
"""The other end of a SEND between stages."""
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_COMPILED = ("_c10d_functional::wait_tensor",)
_PASS = re.compile(r"(forward|backward)(_input|_weight)? \d+")
_FEW = 1 << 16
_NCCL = {
    "allreduce": Collective.ALL_REDUCE,
    "_allgather_base": Collective.ALL_GATHER,
    "allgather": Collective.ALL_GATHER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "broadcast": Collective.BROADCAST,
    "all_to_all": Collective.ALL_TO_ALL,
    "send": Collective.SEND,
    "recv": RECEIVE,
}
"""Kinds by the "Collective name" of a NCCL kernel in torch's traces."""


@dataclass(frozen=True)
class Ran:
    """A collective of this rank.

    Attributes:
        kind, axis: as in the Plan's traffic; RECEIVE on the rank that receives a message of another stage.
        begin, end: microseconds. It begins when this rank arrives. The end is late if nobody waited for it, where the
            backend does not tell when it is done.
    """

    kind: str
    axis: str
    begin: float
    end: float


@dataclass(frozen=True)
class RankSteps:
    """The recorded steps of a rank. Intervals are results of `union`, and lie within the steps.

    Attributes:
        head: of the file.
        steps: begin and end of each step, by its number.
        waiting: the rank waits for others and computes nothing. On a CPU the blocks that `exposed_comm_s` counts. On
            CUDA: kernels of collectives run, and no other kernel.
        data: it waits for the next batch, or copies it to the device.
        host: on CUDA no kernel runs, and the host is in an operator; on a CPU nothing.
        passes: intervals of forward and of backward passes.
        collectives: in the order in which they begin.
        compiled_s: seconds in which compiled code waited for its collectives.
    """

    head: RankHead
    steps: dict[int, Interval]
    waiting: list[Interval]
    data: list[Interval]
    host: list[Interval]
    passes: dict[str, list[Interval]]
    collectives: list[Ran]
    compiled_s: float

    def per_step(self, intervals: Sequence[Interval]) -> float:
        """Mean seconds of a step in the intervals, which are a result of `union`."""
        return seconds(intervals) / len(self.steps)

    @property
    def step_s(self) -> float:
        """Mean length of a step."""
        return self.per_step(list(self.steps.values()))

    @property
    def waiting_s(self) -> float:
        """Mean seconds of a step in which the rank waits for others."""
        return self.per_step(self.waiting)

    @property
    def data_s(self) -> float:
        """Mean seconds of a step in which the rank waits for data."""
        return self.per_step(self.data)

    @property
    def host_s(self) -> float:
        """Mean seconds of a step in which the device waits for the host."""
        return self.per_step(self.host)

    @property
    def busy_s(self) -> float:
        """Mean seconds of a step in which the rank works: it waits neither for others nor for data nor for its host."""
        return statistics.fmean(self.busy())

    @property
    def usual_busy_s(self) -> float:
        """The median of the same: one step that another program has delayed does not count."""
        return statistics.median(self.busy())

    def busy(self) -> list[float]:
        """Seconds of work of each step."""
        waits = union([*self.waiting, *self.data, *self.host])
        return [seconds(without([step], waits)) for step in self.steps.values()]

    def pass_s(self, name: str) -> float:
        """Mean seconds of a step in passes of a name, without waiting."""
        return self.per_step(without(self.passes[name], self.waiting))


def read_rank(path: Path) -> RankSteps:
    """Read the file of a rank. Raises UserError: it cannot be read, is damaged, or has no whole step."""
    trace = RankTrace(path)
    reader = _TraceReader(trace.head)
    try:
        for event in trace.events():
            reader.add(event)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged: an event: {type(error).__name__}: {error}") from error
    if not reader.steps:
        raise UserError(f"{path}: has no whole step: the run ended in the first recorded one")
    return reader.found()


class _TraceReader:
    """Collects the events of a trace."""

    def __init__(self, head: RankHead) -> None:
        self.head, self.has_kernels = head, bool(kind_of(head.device).activity)
        self.steps: dict[int, Interval] = {}
        self.waiting, self.data, self.operators = _Union(), _Union(), _Union()
        self.kernels, self.sending, self.compiled = _Union(), _Union(), _Union()
        self.passes = {"forward": _Union(), "backward": _Union()}
        self.flying: dict[object, Event] = {}
        self.collectives: list[Ran] = []

    def add(self, event: Event) -> None:
        """Add an event."""
        kind, category = event.get("ph"), event.get("cat")
        if category == FLIGHT:
            self._fly(event)
        if kind != "X":
            return
        begin = float(event["ts"])
        interval = begin, begin + float(event.get("dur", 0))
        if category == "user_annotation":
            self._range(event["name"], interval)
        elif category in _KERNELS:
            self._kernel(event, interval)
        elif category == "cpu_op":
            if self.has_kernels:
                self.operators.add(interval)
            if event["name"] in _COMPILED:
                self.compiled.add(interval)

    def _range(self, name: str, interval: Interval) -> None:
        if name == WAITING:
            self.waiting.add(interval)
        elif name == NEXT_BATCH or name.startswith(f"{Verb.LOAD} "):
            self.data.add(interval)
        elif (found := _PASS.match(name)) is not None:
            self.passes[found[1]].add(interval)
        elif (number := step_of(name)) is not None:
            self.steps[number] = interval
        elif (both := collective_of(name)) is not None and not self.has_kernels:
            self.collectives.append(Ran(*both, *interval))

    def _fly(self, event: Event) -> None:
        if event["ph"] == "b":
            self.flying[event["id"]] = event
        elif (begun := self.flying.pop(event["id"], None)) is not None:
            both = collective_of(event["name"])
            if both is not None:
                self.collectives.append(Ran(*both, float(begun["ts"]), float(event["ts"])))

    def _kernel(self, event: Event, interval: Interval) -> None:
        if not str(event["name"]).startswith("nccl"):
            self.kernels.add(interval)
            return
        self.sending.add(interval)
        about: dict[str, Any] = event.get("args", {})
        kind = _NCCL.get(str(about.get("Collective name", "")))
        group = str(about.get("Process Group Name", ""))
        if kind is not None:
            self.collectives.append(Ran(kind, self.head.axes.get(group, group), *interval))

    def found(self) -> RankSteps:
        """What was collected."""
        steps = union(self.steps.values())
        computing, sending = self.kernels.all(), self.sending.all()
        waiting = without(sending, computing) if self.has_kernels else self.waiting.all()
        idle = without(steps, union([*computing, *sending])) if self.has_kernels else []
        data = without(intersection(self.data.all(), steps), waiting)
        return RankSteps(
            self.head,
            dict(sorted(self.steps.items())),
            intersection(waiting, steps),
            data,
            without(intersection(idle, self.operators.all()), data),
            {name: intersection(found.all(), steps) for name, found in self.passes.items()},
            sorted(self._within(steps), key=lambda ran: ran.begin),
            seconds(intersection(self.compiled.all(), steps)) / len(self.steps),
        )

    def _within(self, steps: Sequence[Interval]) -> Iterable[Ran]:
        for ran in self.collectives:
            if intersection([(ran.begin, ran.begin + 1e-3)], steps):
                yield ran


class _Union:
    """A union of intervals that come one by one. It is merged whenever it has become large."""

    def __init__(self) -> None:
        self.merged: list[Interval] = []
        self.most = _FEW

    def add(self, interval: Interval) -> None:
        """Add an interval."""
        self.merged.append(interval)
        if len(self.merged) > self.most:
            self.merged = union(self.merged)
            self.most = 2 * len(self.merged) + _FEW

    def all(self) -> list[Interval]:
        """The union."""
        return union(self.merged)
