"""In: stages, virtual stages, a schedule. Out: which parts of a model are alike; the passes that are in flight at the
fullest moment of a stage.
Does not know seconds or bytes (search_bounds.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from codescent.plan import Verb
from codescent.plan.pipeline import SCHEDULES
from codescent.planner.search_depths import Depths

SINGLE = 3
"""Kinds of depths of a model whose blocks are all alike: embedding, block, head."""


@dataclass(frozen=True)
class Cut:
    """A model in virtual stages.

    Attributes:
        stages, chunks: number of stages, and of chunks on each.
        parts: the different parts. Parts that are alike stand for each other.
        virtual: of each virtual stage the index in `parts`.
    """

    stages: int
    chunks: int
    parts: tuple[range, ...]
    virtual: tuple[int, ...]

    def chunks_of(self, stage: int) -> Sequence[int]:
        """The indices in `parts` of the chunks of a stage."""
        return self.virtual[stage :: self.stages]

    @cached_property
    def numbers(self) -> tuple[Mapping[int, int], ...]:
        """By stage: how often it has each part."""
        return tuple(Counter(self.chunks_of(stage)) for stage in range(self.stages))

    def counts(self, stage: int, depths: Depths) -> tuple[int, ...]:
        """How many depths of each kind a stage has."""
        if stage not in self._counts:
            each = [depths.counts(self.parts[number]) for number in self.chunks_of(stage)]
            self._counts[stage] = tuple(map(sum, zip(*each, strict=True)))
        return self._counts[stage]

    def full(self, depths: Depths) -> tuple[int, ...]:
        """The stages that may hold most: the first one, the last one, and the first one with most blocks."""
        if not self._full:
            blocks = [sum(self.counts(stage, depths)[1:-1]) for stage in range(self.stages)]
            self._full.extend(sorted({0, self.stages - 1, blocks.index(max(blocks))}))
        return tuple(self._full)

    @cached_property
    def _full(self) -> list[int]:
        return []

    @cached_property
    def _counts(self) -> dict[int, tuple[int, ...]]:
        return {}


def cut_of(depths: Depths, bounds: Sequence[tuple[int, int]], stages: int) -> Cut:
    """The cut of a model at these bounds: [first, end) of each virtual stage."""
    parts: dict[range, int] = {}
    virtual = tuple(parts.setdefault(_alike(depths, range(*bound)), len(parts)) for bound in bounds)
    return Cut(stages, len(bounds) // stages, tuple(parts), virtual)


def _alike(depths: Depths, part: range) -> range:
    """The first part that is like this one. Where blocks are of several kinds, each part is like itself alone."""
    inner = part.start > 0 and depths.last not in part
    return range(1, 1 + len(part)) if inner and len(depths.first) == SINGLE else part


@lru_cache(maxsize=4096)
def in_flight(schedule: str, stage: int, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """By chunk: forward passes whose backward pass has not ended, where most of them are in flight."""
    held, most = [0] * chunks, [0] * chunks
    if chunks > 1:  # the fullest moment comes before the third group of micro-batches
        microbatches = min(microbatches, 3 * stages)
    for at in SCHEDULES[schedule](stage, stages, microbatches, chunks):
        if at.verb is Verb.FORWARD:
            held[at.chunk] += 1
            if sum(held) > sum(most):
                most = list(held)
        elif at.verb is not Verb.BACKWARD_WEIGHT:
            held[at.chunk] -= 1
    return tuple(most)
