"""In: stages, virtual stages, a schedule. Out: which parts of a model are alike; the passes that are in flight at the
fullest moment of a stage.
Does not know seconds or bytes (bounds.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from codescent.cost.transfers import link_of
from codescent.plan import Verb
from codescent.plan.pipeline import SCHEDULES
from codescent.planner.search.depths import Depths

SINGLE = 3
"""Kinds of depths of a model whose blocks are all alike: embedding, block, head."""


@dataclass(frozen=True, eq=False)
class StageCut:
    """A model in virtual stages.

    Attributes:
        stages, chunks: number of stages, and of chunks on each.
        parts: the different parts. Parts that are alike stand for each other.
        virtual: of each virtual stage the index in `parts`.
        numbers: by stage: how often it has each part.
        counts: by stage: how many depths of each kind it has.
        full: the stages that may hold most: the first one, the last one, and the first one with most blocks.
        least_blocks: of a stage.
        fullest: of the first stage with most blocks: its parts with blocks, how often it has each, their blocks.
    """

    stages: int
    chunks: int
    parts: tuple[range, ...]
    virtual: tuple[int, ...]
    numbers: tuple[Mapping[int, int], ...]
    counts: tuple[tuple[int, ...], ...]
    full: tuple[int, ...]
    least_blocks: int
    fullest: tuple[tuple[int, int, int], ...]

    @cached_property
    def alike(self) -> Mapping[int, int]:
        """How often the model has each part."""
        return Counter(self.virtual)

    @cached_property
    def unlike(self) -> Collection[int]:
        """The first stage, the last one, and those that are not like the next one."""
        return {0, *(at for at, one in enumerate(self.numbers) if one not in self.numbers[at + 1 : at + 2])}

    @cached_property
    def hops(self) -> Mapping[int, int]:
        """By link (cost/transfers.py): messages of a micro-batch on its way to the last virtual stage and back."""
        there = (link_of(at % self.stages, self.stages, forward=True) for at in range(len(self.virtual) - 1))
        back = (link_of(at % self.stages, self.stages, forward=False) for at in range(1, len(self.virtual)))
        return Counter([*there, *back])

    def again(self, schedule: str, microbatches: int) -> list[Again]:
        """By part: the least of its virtual stages."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.parts]
        for stage in range(self.stages):
            runs = forward_runs(schedule, stage, self.stages, microbatches, self.chunks)
            for number, part in zip(runs, self.virtual[stage :: self.stages], strict=True):
                found[part].append((number, microbatches - number))
        return [Again.least(set(each), microbatches) for each in found]

    def flying(self, schedule: str, stage: int, microbatches: int) -> Mapping[int, int]:
        """By part: forward passes of a stage that are in flight, where most of them are."""
        by_chunk = in_flight(schedule, stage, self.stages, microbatches, self.chunks)
        found: dict[int, int] = {}
        for number, part in zip(by_chunk, self.virtual[stage :: self.stages], strict=True):
            found[part] = found.get(part, 0) + number
        return found


class Again(NamedTuple):
    """How often a pass gathers weights that stay from a forward pass to the backward pass behind it: at least the share
    of micro-batches.

    Attributes:
        forward, backward, first, last: the passes of `search_sent.Sending`.
    """

    forward: float
    backward: float
    first: float
    last: float

    @classmethod
    def least(cls, runs: Collection[tuple[int, int]], microbatches: int) -> Again:
        """Of some stages. `runs`: how often forward passes gather, and backward passes.

        What is gathered once in a step is gathered with the first, or with the last pass. Else all passes count as the
        mean of them.
        """
        each = [[number / microbatches if number > 1 else 0.0 for number in some] for some in zip(*runs)]
        ends = [[1.0 if number == 1 else number / microbatches for number in some] for some in zip(*runs)]
        forward, backward, first, last = (min(some) for some in (*each, *ends))
        return cls(forward, backward, first, last)


def cut_of(depths: Depths, bounds: Sequence[tuple[int, int]], stages: int) -> StageCut:
    """The cut of a model at these bounds: [first, end) of each virtual stage."""
    parts: dict[range, int] = {}
    virtual = tuple(parts.setdefault(_alike(depths, range(*bound)), len(parts)) for bound in bounds)
    numbers = [Counter(virtual[stage::stages]) for stage in range(stages)]
    each = [depths.counts(part) for part in parts]
    counts = [
        tuple(sum(times * each[part][kind] for part, times in one.items()) for kind in range(len(depths.first)))
        for one in numbers
    ]
    blocks = [sum(one[1:-1]) for one in counts]
    most = blocks.index(max(blocks))
    full = sorted({0, stages - 1, most})
    fullest = tuple((part, times, inner) for part, times in numbers[most].items() if (inner := sum(each[part][1:-1])))
    chunks = len(bounds) // stages
    of_stages = tuple(numbers), tuple(counts), tuple(full), min(blocks), fullest
    return StageCut(stages, chunks, tuple(parts), virtual, *of_stages)


def _alike(depths: Depths, part: range) -> range:
    """The first part that is like this one. Where blocks are of several kinds, each part is like itself alone."""
    inner = part.start > 0 and depths.last not in part
    return range(1, 1 + len(part)) if inner and len(depths.first) == SINGLE else part


@lru_cache(maxsize=4096)
def in_flight(schedule: str, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """By chunk: forward passes whose backward pass has not ended, where most of them are in flight."""
    held, most, number, highest = [0] * chunks, [0] * chunks, 0, 0
    if chunks > 1:  # the fullest moment comes before the third group of micro-batches
        microbatches = min(microbatches, 3 * stages)
    for at in SCHEDULES[schedule](stage, stages, microbatches, chunks):
        if at.verb is not Verb.BACKWARD_WEIGHT:
            change = 1 if at.verb is Verb.FORWARD else -1
            held[at.chunk] += change
            number += change
            if number > highest:
                most, highest = list(held), number
    return tuple(most)


@lru_cache(maxsize=4096)
def forward_runs(schedule: str, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """By chunk: how often a forward pass comes first, or behind a backward pass of the chunk.

    A backward pass that comes behind another one is the rest of as many as there are micro-batches.
    """
    found, behind_forward = [0] * chunks, [False] * chunks
    for at in SCHEDULES[schedule](stage, stages, microbatches, chunks):
        forward = at.verb is Verb.FORWARD
        if forward and not behind_forward[at.chunk]:
            found[at.chunk] += 1
        if forward or at.verb is Verb.BACKWARD:
            behind_forward[at.chunk] = forward
    return tuple(found)
