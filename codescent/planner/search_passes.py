"""In: what depths compute and send. Out: the least seconds of the passes through a part of the model.
Does not know stages and schedules (search_bounds.py does), and prices nothing (cost/stage_time.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from codescent.clusters.cluster import Software
from codescent.planner.search_computing import Computing, PassTime
from codescent.planner.search_depths import Depths
from codescent.planner.search_sent import NONE, Seconds, Sending, Sent


class PartTimes(NamedTuple):
    """Least seconds of the passes through a part.

    Attributes:
        forward, backward: of a micro-batch that is neither the first nor the last one.
        first: the first forward pass.
        last: the last backward pass, until it has computed.
        reduced: the last backward pass, until the gradients that it has sent have arrived.
    """

    forward: float
    backward: float
    first: float
    last: float
    reduced: float


@dataclass(frozen=True)
class _Walked:
    """A pass: what its depths compute, and what it sends of weights and gradients.

    Attributes:
        computed: of all depths.
        ends: of the depth that computes last.
        opens: what is gathered before the first one.
        before, after: all that is gathered, and all that leaves.
    """

    computed: PassTime
    ends: PassTime
    opens: Seconds = NONE
    before: Seconds = NONE
    after: Seconds = NONE

    def least_s(self, software: Software, *, waits: bool) -> float:
        """Whichever is longest: what depths compute; that and what messages beside it take from it; the busiest link.

        `waits`: until all that leaves has arrived. Else what the last depth sends may be under way.
        """
        found, taken = self.computed, 1.0 - 1.0 / software.contention
        if "gathers" not in software.overlaps:
            return found.total_s + sum(self.before) + sum(self.after) * waits
        beside_s = [total - first for total, first in zip(self.before, self.opens, strict=True)]
        if waits:
            beside_s = [total + left for total, left in zip(beside_s, self.after, strict=True)]
        slower_s = found.device_s + found.waits_s + taken * max(0.0, max(beside_s) - found.waits_s)
        link_s = [total + left * waits for total, left in zip(self.before, self.after, strict=True)]
        return max(max(self.opens) + max(found.total_s, slower_s), max(link_s), max(self.before) + self.ends.total_s)


class Passes:
    """The passes of a layout through parts of the model, each computed once.

    `whole`: there is one part, which is the model.
    """

    def __init__(
        self, depths: Depths, computing: Computing, sending: Sending, software: Software, *, whole: bool
    ) -> None:
        self.depths, self.computing, self.sending, self.software = depths, computing, sending, software
        self.whole = whole
        self._found: dict[range, PartTimes] = {}

    def of(self, part: range) -> PartTimes:
        """The seconds of a part."""
        if part not in self._found:
            self._found[part] = self._times(part, self._all(part) if self.whole else self._chunk(part))
        return self._found[part]

    def _times(self, part: range, sent: Sequence[tuple[Seconds, Seconds, Seconds]]) -> PartTimes:
        """`sent`: what opens a pass, all that it gathers, all that leaves. Of forward and backward, then of the first
        and the last one."""
        walked = []
        for number, one in enumerate(sent):
            passes, ends = (self.computing.backward, part[0]) if number % 2 else (self.computing.forward, part[-1])
            total = _total(passes, self.depths.counts(part))
            walked.append(_Walked(total, passes[self.depths.kind[ends]], *one))
        forward, backward, first, last = walked
        return PartTimes(
            forward.least_s(self.software, waits=False),
            backward.least_s(self.software, waits=True),
            first.least_s(self.software, waits=False),
            last.least_s(self.software, waits=False),
            last.least_s(self.software, waits=True),
        )

    def _all(self, part: range) -> list[tuple[Seconds, Seconds, Seconds]]:
        """Of the whole model: what each depth sends is known."""
        found = []
        for once in (False, True):
            for sent, begins in ((self.sending.forward, part[0]), (self.sending.backward, part[-1])):
                each = [sent[self.depths.like(depth)] for depth in part]
                found.append((_before([sent[begins]], once=once), _before(each, once=once), _after(each, once=once)))
        return found

    def _chunk(self, part: range) -> list[tuple[Seconds, Seconds, Seconds]]:
        """Of a chunk of a pipeline. When its root and its last block are gathered again, and the gradients of its first
        unit leave, depends on the schedule. So these count only where they do in any order."""
        ends = [depth for depth in (0, self.depths.last) if depth in part]
        blocks = [depth for depth in part if 0 < depth < self.depths.last]
        freed, reduced = blocks[:-1], blocks if ends else blocks[1:]
        forward, backward = self.sending.forward, self.sending.backward
        opens = [0] if 0 in ends else blocks[:1]
        return [
            (
                self._gathered(forward, freed[:1] if 0 not in ends else [], once=False),
                self._gathered(forward, freed, once=False),
                NONE,
            ),
            (NONE, self._gathered(backward, freed, once=False), self._reduced(backward, reduced, once=False)),
            (
                self._gathered(forward, opens, once=True),
                self._gathered(forward, [*ends, *blocks], once=True),
                NONE,
            ),
            (
                NONE,
                self._gathered(backward, freed, once=True),
                self._reduced(backward, [*ends, *blocks], once=True),
            ),
        ]

    def _gathered(self, sent: Mapping[int, Sent], depths: Iterable[int], *, once: bool) -> Seconds:
        return _before([self._middle(sent, depth) for depth in depths], once=once)

    def _reduced(self, sent: Mapping[int, Sent], depths: Iterable[int], *, once: bool) -> Seconds:
        return _after([self._middle(sent, depth) for depth in depths], once=once)

    def _middle(self, sent: Mapping[int, Sent], depth: int) -> Sent:
        """What a depth sends that is neither the first nor the last block of its chunk."""
        first, end = self.depths.runs[self.depths.kind[depth]]
        if depth in (0, self.depths.last):
            return sent[depth]
        return sent[first + 1] if end - first > 1 else Sent()


def _total(passes: Sequence[PassTime], counts: Sequence[int]) -> PassTime:
    device_s, host_s, waits_s = (sum(n * one[at] for n, one in zip(counts, passes, strict=True)) for at in range(3))
    return PassTime(device_s, host_s, waits_s)


def _before(sent: Sequence[Sent], *, once: bool) -> Seconds:
    inside, between, bus = (
        sum(one.before[link] + one.once_before[link] * once for one in sent) for link in range(len(NONE))
    )
    return inside, between, bus


def _after(sent: Sequence[Sent], *, once: bool) -> Seconds:
    inside, between, bus = (
        sum(one.after[link] + one.once_after[link] * once for one in sent) for link in range(len(NONE))
    )
    return inside, between, bus
