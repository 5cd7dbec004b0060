"""In: what depths compute and send. Out: the least seconds of the passes through a part of the model.
Does not know stages and schedules (search_bounds.py does). search_walk.py has the formula of one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from codescent.clusters.cluster import Software
from codescent.planner.search_computing import Computing, PassTime
from codescent.planner.search_depths import Depths
from codescent.planner.search_sent import BACKWARD, FIRST, FORWARD, LAST, NONE, Seconds, Sending, Sent
from codescent.planner.search_walk import Walk


class PartTimes(NamedTuple):
    """Seconds of the passes through a part: the least, where nothing else is said.

    Attributes:
        forward, backward: of a micro-batch that is neither the first nor the last one.
        first: the first forward pass.
        last: the last backward pass.
        left: from then on, until the gradients that it has sent have arrived.
        gathers: by how much longer the first forward pass waits for weights than another one.
        most: `forward`, at most.
    """

    forward: float
    backward: float
    first: float
    last: float
    left: float
    gathers: float
    most: float


class _Sends(NamedTuple):
    """What so many depths send that are like one depth. `passes`: in the order of `Sending.passes`."""

    depth: int
    number: int
    passes: tuple[Sent, ...]

    def before(self, at: int) -> Seconds:
        """What one of them gathers in a pass."""
        return self.passes[at].before if self.number else NONE

    def after(self, at: int) -> Seconds:
        """What leaves one of them in a pass."""
        return self.passes[at].after if self.number else NONE


NO_MESSAGE = tuple(Sent() for _ in (FORWARD, BACKWARD, FIRST, LAST))
NOTHING = _Sends(0, 0, NO_MESSAGE)


class Passes:
    """The passes of a layout through parts of the model, each computed once.

    `sending`: None: nothing is sent. `whole`: there is one part, which is the model.
    """

    def __init__(
        self, depths: Depths, computing: Computing, sending: Sending | None, software: Software, *, whole: bool
    ) -> None:
        self.depths, self.computing, self.sending, self.software = depths, computing, sending, software
        self.whole = whole
        self._found: dict[range, PartTimes] = {}

    def of(self, part: range) -> PartTimes:
        """The seconds of a part."""
        if part not in self._found:
            self._found[part] = self._times(part)
        return self._found[part]

    def _times(self, part: range) -> PartTimes:
        if self.sending is None:
            counts = self.depths.counts(part)
            passes = self.computing.forward, self.computing.backward
            forward_s, backward_s = (_total(one, counts).total_s for one in passes)
            return PartTimes(forward_s, backward_s, forward_s, backward_s, 0.0, 0.0, 0.0)
        forward, backward, first, last = self._all(part) if self.whole else self._chunk(part)
        gathers_s = first.opening_s - forward.opened_most_s
        return PartTimes(
            forward.least_s, backward.all_s, first.least_s, last.least_s, last.left_s, gathers_s, forward.most_s
        )

    def _all(self, part: range) -> list[Walk]:
        """Of the whole model: what each depth sends is known."""
        first, *inner, last = part
        begin, opening, closing, end = map(self._sends, (first, inner[0], inner[-1], last))
        blocks = [self._sends(depth, number) for depth, number in Counter(map(self.depths.like, inner)).items()]
        whole, found = [begin, *blocks, end], []
        for at in (FORWARD, BACKWARD, FIRST, LAST):
            if at in (FORWARD, FIRST):
                edges = begin.before(at), opening.before(at), end.after(at), begin.after(at)
            else:
                edges = end.before(at), closing.before(at), begin.after(at), opening.after(at)
            found.append(self._walk(at, part, whole, whole, *edges))
        return found

    def _chunk(self, part: range) -> list[Walk]:
        """Of a chunk of a pipeline. When its root and its last block are gathered again, and the gradients of its first
        unit leave, depends on the schedule. So these count only where they do in any order."""
        counts = self.depths.counts(part)
        begin, end = (self._sends(depth, int(depth in part)) for depth in (0, self.depths.last))
        blocks = [one._replace(number=n) for n, one in zip(counts[1:-1], self._middle, strict=True) if n]
        freed, whole = _without(blocks, -1), [begin, *blocks, end]
        reduced = blocks if begin.number or end.number else _without(blocks, 0)
        first = blocks[0] if blocks else NOTHING
        again = first if sum(counts[1:-1]) > 1 else NOTHING
        opens, others, closes, aside = (first, NOTHING), (again, NOTHING), first, NOTHING
        if begin.number:
            opens, others, closes, aside = (begin, first), (NOTHING, again), begin, first
        return [
            self._walk(FORWARD, part, freed, (), *(one.before(FORWARD) for one in others)),
            self._walk(BACKWARD, part, freed, reduced, aside=aside.after(BACKWARD)),
            self._walk(FIRST, part, whole, (), *(one.before(FIRST) for one in opens)),
            self._walk(LAST, part, freed, whole, closes=closes.after(LAST), aside=aside.after(LAST)),
        ]

    def _walk(
        self,
        at: int,
        part: range,
        gathered: Sequence[_Sends],
        left: Sequence[_Sends],
        opens: Seconds = NONE,
        follows: Seconds = NONE,
        closes: Seconds = NONE,
        aside: Seconds = NONE,
    ) -> Walk:
        is_back, counts = at in (BACKWARD, LAST), self.depths.counts(part)
        passes = self.computing.backward if is_back else self.computing.forward
        ends = (part[-1], part[0]) if is_back else (part[0], part[-1])
        begins, finishes = (passes[self.depths.kind[depth]] for depth in ends)
        # The embedding's weights are gathered before all others, and its gradients leave behind all others.
        most_s = max((max(one.before(at)) for one in gathered if one.depth), default=0.0)
        most_s += max((max(one.after(at)) for one in left if one.depth), default=0.0)
        blocks = [one.device_s for one, number in zip(passes[1:-1], counts[1:-1], strict=True) if number]
        least_more_s, most_more_s = (
            sum(one.number * float(getattr(one.passes[at], name)) for one in left) for name in ("least_s", "most_s")
        )
        return Walk(
            computed=_total(passes, counts),
            begins=begins,
            ends=finishes,
            software=self.software,
            opens=opens,
            follows=follows,
            before=_sum((one.number, one.before(at)) for one in gathered),
            after=_sum((one.number, one.after(at)) for one in left),
            closes=closes,
            aside=aside,
            least_more_s=least_more_s,
            most_more_s=most_more_s,
            fits=most_s <= min(blocks, default=0.0),
        )

    def _sends(self, depth: int, number: int = 1) -> _Sends:
        """What so many depths send that are like one of `Depths.some`."""
        assert self.sending is not None
        return _Sends(depth, number, tuple(one[depth] for one in self.sending.passes))

    @cached_property
    def _middle(self) -> list[_Sends]:
        """By kind of block: what one sends that is neither the first nor the last one of its chunk."""
        return [
            self._sends(first + 1) if end - first > 1 else _Sends(first, 1, NO_MESSAGE)
            for first, end in self.depths.runs[1:-1]
        ]


def _without(blocks: Sequence[_Sends], at: int) -> list[_Sends]:
    """The blocks without the first one (0), or the last one (-1)."""
    found = list(blocks)
    if found:
        found[at] = found[at]._replace(number=found[at].number - 1)
    return found


def _total(passes: Sequence[PassTime], counts: Sequence[int]) -> PassTime:
    device_s = host_s = within_s = beside_s = 0.0
    for number, one in zip(counts, passes, strict=True):
        if number:
            device_s += number * one.device_s
            host_s += number * one.host_s
            within_s += number * one.within_s
            beside_s += number * one.beside_s
    return PassTime(device_s, host_s, within_s, beside_s)


def _sum(seconds: Iterable[tuple[int, Seconds]]) -> Seconds:
    inside_s = between_s = bus_s = 0.0
    for number, each_s in seconds:
        inside_s += number * each_s[0]
        between_s += number * each_s[1]
        bus_s += number * each_s[2]
    return inside_s, between_s, bus_s
