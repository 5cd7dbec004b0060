"""In: what depths compute and send. Out: the least seconds of the passes through a part of the model.
Does not know stages and schedules (bounds.py does). walk.py has the formula of one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from codescent.clusters.cluster import Software
from codescent.planner.search.computing import Computing, PassTime
from codescent.planner.search.cuts import Again, StageCut
from codescent.planner.search.depths import SOME, Depths
from codescent.planner.search.sent import BACKWARD, FORWARD, LAST, NONE, DepthSent, Seconds, Sending
from codescent.planner.search.walk import Copies, PassMessages, walk


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


class BlockTime(NamedTuple):
    """Seconds of a pass through a block, at least.

    Attributes:
        computing_s: all that it waits for beside weights and gradients.
        before: by link: its weights are gathered.
        rest: all else that it sends.
    """

    computing_s: float
    before: Seconds
    rest: Seconds

    def of(self, blocks: int, gathers: float) -> float:
        """Of so many blocks, of which so many are gathered."""
        each_s = zip(self.before, self.rest, strict=True)
        links_s = (gathers * before_s + blocks * rest_s for before_s, rest_s in each_s)
        return max(blocks * self.computing_s, *links_s)


BACK = BACKWARD, LAST
NO_MESSAGE, NOTHING_COPIED = DepthSent(), Copies()


class Passes:
    """The passes of a layout through parts of the model, each computed once.

    `sending`: None: nothing is sent. `whole`: there is one part, which is the model. `exact`: see `walk`.
    """

    def __init__(
        self,
        depths: Depths,
        computing: Computing,
        sending: Sending | None,
        software: Software,
        *,
        whole: bool,
        exact: bool = True,
    ) -> None:
        self.depths, self.software, self.sending, self.whole, self.exact = depths, software, sending, whole, exact
        self.passes = computing.forward, computing.backward
        self._found: dict[tuple[range, Again], PartTimes] = {}

    def of(self, part: range, again: Again) -> PartTimes:
        """The seconds of a part. `again`: see `StageCut.again`."""
        key = part, again
        if key not in self._found:
            self._found[key] = self._times(part, again)
        return self._found[key]

    def _times(self, part: range, again: Again) -> PartTimes:
        counts = self.depths.counts(part)
        totals = [_total(one, counts) for one in self.passes]
        if self.sending is None:
            forward_s, backward_s = (one.total_s for one in totals)
            return PartTimes(forward_s, backward_s, forward_s, backward_s, 0.0, 0.0, 0.0)
        sent = self._all(part, self.sending) if self.whole else self._chunk(counts, self.sending, again)
        ends = self.depths.kind[part[0]], self.depths.kind[part[-1]]
        forward, backward, first, last = (
            walk(
                totals[at in BACK],
                self.passes[at in BACK][ends[at in BACK]],
                self.passes[at in BACK][ends[at not in BACK]],
                sums._replace(slows=not self.sending.together),
                self.software,
                fits=self._fits[at][counts[-1]],
                exact=self.exact,
            )
            for at, sums in enumerate(sent)
        )
        gathers_s = first.opening_s - forward.opened_s - first.shorter_s
        return PartTimes(
            forward.least_s, backward.all_s, first.least_s, last.least_s, last.left_s, gathers_s, forward.most_s
        )

    @cached_property
    def block_s(self) -> float:
        """What messages add, at least, to a block that is not the last one of its chunk."""
        (first, end), *others = self.depths.runs[1:-1]
        if others or end - first < SOME or not (self._fits[FORWARD][0] and self._fits[BACKWARD][0]):
            return 0.0  # parts may hide more of a link that is busy for longer than a block computes
        none = Again(0.0, 0.0, 0.0, 0.0)
        two, three = (self.of(range(first, first + number), none) for number in (SOME - 1, SOME))
        more_s = three.forward + three.backward - two.forward - two.backward
        return max(0.0, more_s - sum(one[self.depths.kind[first]].total_s for one in self.passes))

    def busy_s(self, cut: StageCut, stays: Sequence[Again], microbatches: int) -> float:
        """For so long the blocks of the fullest stage compute, or keep their busiest link busy, at least.

        What the last backward pass sends may come later. `stays`: by part of the cut.
        """
        found_s, (forward, backward) = 0.0, self._block
        for part, number, blocks in cut.fullest:
            forward_s = forward.of(blocks, blocks - 1 + stays[part].forward)
            backward_s = backward.of(blocks, blocks - 1 + stays[part].backward)
            each_s = microbatches * forward_s + (microbatches - 1) * backward_s + blocks * backward.computing_s
            found_s += number * each_s
        return found_s

    @cached_property
    def _block(self) -> tuple[BlockTime, BlockTime]:
        """A forward and a backward pass through any block."""
        assert self.sending is not None
        found = []
        for at in (FORWARD, BACKWARD):
            computed = self.passes[at in BACK][1:-1]
            sent = [self.sending.passes[at][depth] for depth, _ in self._blocks]
            rest = [
                _total_s([(1.0, one.after), (1.0, time.within), (1.0, time.beside)])
                for one, time in zip(sent, computed, strict=True)
            ]
            computing_s = min((one.total_s for one in computed), default=0.0)
            found.append(BlockTime(computing_s, _least_s([one.before for one in sent]), _least_s(rest)))
        return found[FORWARD], found[BACKWARD]

    @cached_property
    def _fits(self) -> list[tuple[bool, bool]]:
        """By pass: whether the messages of each block take no longer than it computes; of blocks and the head.

        The embedding's weights are gathered before all others, and its gradients leave behind all others.
        """
        assert self.sending is not None
        found = []
        for at, sent in enumerate(self.sending.passes):
            computed = self.passes[at in BACK][1:-1]
            least_s = min(one.device_s for one in computed) - max(max(one.beside) for one in computed)
            blocks = [sent[depth] for depth in self.depths.some if 0 < depth < self.depths.last]
            some = [*blocks, sent[self.depths.last]]
            most_s = [
                max(max(one.before) for one in those) + max(max(one.after) for one in those) for those in (blocks, some)
            ]
            found.append((most_s[0] <= least_s, most_s[1] <= least_s))
        return found

    def _all(self, part: range, sending: Sending) -> list[PassMessages]:
        """Of the whole model: what each depth sends is known."""
        numbers, found = Counter(map(self.depths.like, part)), []
        for at, sent in enumerate(sending.passes):
            first, second, *_, other, last = [*map(self.depths.like, part)][:: -1 if at in BACK else 1]
            aside = sent[other if at in BACK else first].after
            each = [(number, sent[depth]) for depth, number in numbers.items() if depth]
            each.append((1, sent[0]))
            sums = _sums(each, each, sent[first].before, sent[second].before, sent[last].after, aside)
            copied_s = sum(number * one.copied_s for number, one in each)
            copies = Copies(copied_s, copied_s, sent[first].copied_s, sent[last].copied_s, sent[last].copied_s)
            found.append(sums._replace(copies=copies))
        return found

    def _chunk(self, counts: tuple[int, ...], sending: Sending, again: Again) -> list[PassMessages]:
        """Of a chunk of a pipeline. Its root and its last block stay from a forward pass to the backward pass behind
        it."""
        found = []
        for at, sent in enumerate(sending.passes):
            blocks = [(number, *self._blocks[kind]) for kind, number in enumerate(counts[1:-1]) if number]
            begin = self._stays(0, 0, at, again) if counts[0] else NO_MESSAGE
            end = self._stays(self.depths.last, self.depths.last, at, again) if counts[-1] else NO_MESSAGE
            last = self._stays(blocks[-1][2], blocks[-1][1], at, again) if blocks else NO_MESSAGE
            first = last if sum(counts[1:-1]) == 1 else sent[blocks[0][1]] if blocks else NO_MESSAGE
            each = [(number, sent[depth]) for number, depth, _ in blocks]
            if blocks:
                each += [(-1, sent[blocks[-1][1]]), (1, last)]
            each += [(1, begin), (1, end)]
            computes_last = begin if at in BACK and counts[0] else end if at not in BACK and counts[-1] else last
            copies = self._copies(counts, sent, each, computes_last)
            order = [one for one, number in ((begin, counts[0]), (first, len(blocks))) if number] + [end]
            if at in BACK:
                behind = [one for one, number in ((end, counts[-1]), (last, len(blocks))) if number] + [begin]
                closes, aside = order[0].after, first.after if counts[0] and blocks else NONE
                follows = behind[1].before if counts[-1] and blocks else NONE
                found.append(_sums(each, each, behind[0].before, follows, closes, aside, copies))
            else:
                follows = order[1].before if counts[0] and blocks else NONE
                found.append(_sums(each, (), order[0].before, follows, copies=copies))
        return found

    def _stays(self, depth: int, like: int, at: int, again: Again) -> DepthSent:
        """What a pass sends of a unit that stays, if it is gathered for each micro-batch; else what is sent once.

        `like`: a unit that does not stay, and so is gathered in backward passes, too.
        """
        assert self.sending is not None
        passes = self.sending.passes
        each_s, found = passes[FORWARD][depth].before, passes[at][depth]
        if each_s == NONE:
            return found
        before_s = passes[BACKWARD][like].before if at in BACK and like != depth else each_s
        gathered_s = passes[BACKWARD if at in BACK else FORWARD][depth].copied_s
        copied_s = max(0.0, found.copied_s - (1.0 - again[at]) * gathered_s)
        return found._replace(before=_total_s([(again[at], before_s)]), copied_s=copied_s)

    def _copies(
        self, counts: tuple[int, ...], sent: Mapping[int, DepthSent], each: Each, computes_last: DepthSent
    ) -> Copies:
        """The copies of a chunk. `each`, `computes_last`: without gathers of units that stay. The most has those."""
        ends = [sent[0].copied_s * bool(counts[0]), sent[self.depths.last].copied_s * bool(counts[-1])]
        blocks = [sent[depth].copied_s for depth, _ in self._blocks]
        most_s = sum(ends) + sum(number * one for number, one in zip(counts[1:-1], blocks, strict=True))
        one_s = max(*ends, *blocks)
        return Copies(sum(number * one.copied_s for number, one in each), most_s, one_s, one_s, computes_last.copied_s)

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        """By kind of block: one that does not stay, and one that stays; the same where there is one alone."""
        return [(min(first + 1, end - 1), min(first + SOME, end) - 1) for first, end in self.depths.runs[1:-1]]


def _total(passes: Sequence[PassTime], counts: Sequence[int]) -> PassTime:
    device_s = host_s = beside_s = 0.0
    within, beside = list[tuple[float, Seconds]](), list[tuple[float, Seconds]]()
    for number, one in zip(counts, passes, strict=True):
        if number:
            device_s += number * one.device_s
            host_s += number * one.host_s
            beside_s += number * one.beside_s
            within.append((number, one.within))
            beside.append((number, one.beside))
    return PassTime(device_s, host_s, beside_s, _total_s(within), _total_s(beside))


Each = Sequence[tuple[int, DepthSent]]
"""What so many depths send."""


def _sums(
    gathered: Each,
    left: Each,
    opens: Seconds = NONE,
    follows: Seconds = NONE,
    closes: Seconds = NONE,
    aside: Seconds = NONE,
    copies: Copies = NOTHING_COPIED,
) -> PassMessages:
    """`gathered`: the depths whose weights are gathered. `left`: those whose gradients leave."""
    before = _total_s([(number, one.before) for number, one in gathered])
    after = _total_s([(number, one.after) for number, one in left])
    return PassMessages(opens, follows, before, after, closes, aside, copies=copies)


def _least_s(seconds: Sequence[Seconds]) -> Seconds:
    inside_s, between_s, bus_s = map(min, zip(*seconds, strict=True)) if seconds else NONE
    return inside_s, between_s, bus_s


def _total_s(seconds: Sequence[tuple[float, Seconds]]) -> Seconds:
    inside_s = between_s = bus_s = 0.0
    for number, each_s in seconds:
        if each_s is not NONE:
            inside_s += number * each_s[0]
            between_s += number * each_s[1]
            bus_s += number * each_s[2]
    return inside_s, between_s, bus_s
