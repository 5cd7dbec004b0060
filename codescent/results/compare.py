"""In: runs of two sides, A and B. Out: how much longer a step of B takes, in which part, each with an interval.
Does not print, and does not compare configs, machines and losses (differences.py does)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter, itemgetter

import numpy as np

from codescent.base.errors import UserError
from codescent.results import student
from codescent.results.run import Run, default_warmup
from codescent.results.statistics import LEVEL, Interval, Values
from codescent.results.typical import ENOUGH, StepSeconds, rows_of

SMALLEST = 0.01
"""Smallest change that is shown, as a share of A's step. Where the same program lies in memory already changes its
speed by such amounts (Mytkowicz et al. 2009), and that stays the same during a run."""

FEWEST_PAIRS, FEWEST_RUNS = 5, 3
"""Fewest pairs of runs, and fewest runs of a side, of which each is one sample. A pair counts for two runs, but pairs
do not see what both of their runs saw of the machine."""

BLOCKS = 6
"""Blocks of a run, where its blocks are the samples. Steps are correlated: many short blocks would seem independent,
and give intervals that are too narrow (Schmeiser 1982)."""

BESIDE = 0.8
"""Share of the shorter run's time that two runs must have in common to count as side by side."""


STEP, MEAN = "step_s", "mean_step_s"

Sample = Mapping[str, float]
"""Mean seconds of STEP, MEAN and each part in some steps."""


class Way(StrEnum):
    """What the samples are."""

    PAIRS = "pairs"  # of a run of A and a run of B, one after the other or side by side
    RUNS = "runs"
    BLOCKS = "blocks"  # of steps


@dataclass(frozen=True)
class PartChange:
    """How a part of the step, or the step, changes from A to B.

    Attributes:
        part: its name in ranks.csv; "bubble_s" and "communication_s" for the two kinds of waiting.
        a_s, b_s: mean seconds on each side.
        share: b_s - a_s as a share of A's step, with its interval.
    """

    part: str
    a_s: float
    b_s: float
    share: Interval

    @property
    def shown(self) -> bool:
        """Whether the interval lies on one side of 0, and the change is not too small to matter."""
        return (self.share.low > 0 or self.share.high < 0) and abs(self.share.value) >= SMALLEST


@dataclass(frozen=True)
class Times:
    """The step times of two sides.

    Attributes:
        way: what the samples are.
        beside: whether the runs trained side by side.
        samples: their number in A and in B.
        warmup: steps that were left out after the begin of each run.
        scale: factor of B's seconds: tokens of a step in A / in B.
        step: the typical step.
        mean: the mean step; other than the typical one, it changes if only some steps are slower.
        parts: of the typical step. The intervals of all parts that are large enough to matter hold together.
        rank: that waits least in A and in B: its parts are shown. None: the parts are those of rank 0.
    """

    way: Way
    beside: bool
    samples: tuple[int, int]
    warmup: int
    scale: float
    step: PartChange
    mean: PartChange
    parts: Sequence[PartChange]
    rank: tuple[int, int] | None

    @property
    def has_interval(self) -> bool:
        """Whether there were enough steps for an interval."""
        return not math.isnan(self.step.share.low)

    @property
    def cause(self) -> PartChange | None:
        """The part that explains most of what is shown; None: nothing is shown."""
        shown = [part for part in self.parts if part.shown]
        if self.step.shown:
            sign = math.copysign(1, self.step.share.value)
            return max(self.parts, key=lambda part: (part.shown, sign * part.share.value))
        return max(shown, key=lambda part: abs(part.share.value), default=None)


def times(a: Sequence[Run], b: Sequence[Run], warmup: int | None = None) -> Times:
    """Compare the times of a step.

    The samples are pairs of runs, if at least `FEWEST_PAIRS` were taken in turns or side by side. Of fewer pairs side
    by side they are blocks of the same seconds. Else they are runs, if each side has `FEWEST_RUNS`, or blocks of steps.

    Args:
        a: at least one run.
        b: likewise.
        warmup: steps to leave out; None: `default_warmup`.

    Raises:
        UserError: a run has no step after the warm-up, or a file is damaged.
    """
    warmup = default_warmup([*a, *b]) if warmup is None else warmup
    scale = _tokens_of_step(a) / _tokens_of_step(b)
    scale = scale if math.isfinite(scale) else 1.0
    of_a, of_b = _steps(a, warmup), _steps(b, warmup)
    _refuse_empty([*a, *b], [*of_a, *of_b], warmup)
    return of_rows(of_a, [replace(rows, seconds=rows.seconds * scale) for rows in of_b], warmup, scale)


def of_rows(of_a: Sequence[StepSeconds], of_b: Sequence[StepSeconds], warmup: int, scale: float) -> Times:
    """As `times`, for rows of the runs of each side. `scale`: by which B's are multiplied already."""
    of_a, of_b = (sorted(side, key=attrgetter("begin")) for side in _alike(of_a, of_b))
    pairs = _pairs(of_a, of_b)
    beside = bool(pairs) and all(_beside(one, other) for one, other in pairs)
    if beside:
        pairs = [_common(one, other) for one, other in pairs]
        of_a, of_b = [one for one, _ in pairs], [other for _, other in pairs]
    way, paired, cut_a, cut_b = _samples(of_a, of_b, pairs, beside=beside)
    left, right = ([_sample(rows) for rows in side] for side in (cut_a, cut_b))
    change = partial(_change, left, right, paired=paired, serial=way is Way.BLOCKS)
    parts = [name for name in left[0] if name not in (STEP, MEAN)]
    matter = sum(_matters(left, name) or _matters(right, name) for name in parts)
    together = 1 - (1 - LEVEL) / max(1, matter)  # Bonferroni
    every_rank = all(rows.every_rank for rows in (*of_a, *of_b))
    return Times(
        way=way,
        beside=beside,
        samples=(len(left), len(right)),
        warmup=warmup,
        scale=scale,
        step=change(STEP, LEVEL),
        mean=change(MEAN, LEVEL),
        parts=tuple(change(name, together) for name in parts),
        rank=(of_a[0].pace, of_b[0].pace) if every_rank else None,
    )


def _tokens_of_step(runs: Sequence[Run]) -> float:
    """Mean tokens of a step of the first of the runs; NaN: unknown."""
    columns = runs[0].columns
    return float(columns["tokens"][-1] / columns["step"][-1]) if len(columns["step"]) else math.nan


def _steps(runs: Sequence[Run], warmup: int) -> list[StepSeconds]:
    """The rows of the runs of one side, in order of time."""
    found = [rows_of(run, warmup) for run in runs]
    if all(len(rows) and rows.seconds.shape[1] == found[0].seconds.shape[1] for rows in found):
        pace = int(np.argmin(np.mean([rows.waiting for rows in found], axis=0)))  # one rank for the whole side
        found = [replace(rows, pace=pace) for rows in found]
    return found


def _refuse_empty(runs: Sequence[Run], rows: Sequence[StepSeconds], warmup: int) -> None:
    """Raise UserError for the runs whose steps all belong to the warm-up."""
    if empty := [run.folder.path for run, of_run in zip(runs, rows, strict=True) if not len(of_run)]:
        raise UserError(*(f"{path}: no step is left after a warm-up of {warmup}: lower --warmup" for path in empty))


def _alike(a: Sequence[StepSeconds], b: Sequence[StepSeconds]) -> tuple[Sequence[StepSeconds], Sequence[StepSeconds]]:
    """Rows with the same columns: where a run has no seconds of each pass, those of the others are added up."""
    if all("forward_s" in rows.columns for rows in (*a, *b)) or not any("forward_s" in r.columns for r in (*a, *b)):
        return a, b
    return [_with_compute(rows) for rows in a], [_with_compute(rows) for rows in b]


def _with_compute(rows: StepSeconds) -> StepSeconds:
    """The rows with one column for both passes, and without a bubble."""
    if "compute_s" in rows.columns:
        return rows
    forward = rows.columns.index("forward_s")
    names = (*rows.columns[:forward], "compute_s", *rows.columns[forward + 2 :])
    both = rows.seconds[..., forward] + rows.seconds[..., forward + 1]
    seconds = np.insert(np.delete(rows.seconds, [forward, forward + 1], axis=2), forward, both, axis=2)
    return replace(rows, columns=names, seconds=seconds, every_rank=False)


def _pairs(a: Sequence[StepSeconds], b: Sequence[StepSeconds]) -> list[tuple[StepSeconds, StepSeconds]]:
    """Each run of A with a run of B that began next to it; none if the runs were not taken in turns."""
    order = sorted([(rows.begin, side, rows) for side, some in enumerate((a, b)) for rows in some], key=itemgetter(0))
    couples = [order[number : number + 2] for number in range(0, len(order), 2)]
    if not all(sorted(side for _, side, _ in couple) == [0, 1] for couple in couples):
        return []
    of_sides = [sorted(couple, key=itemgetter(1)) for couple in couples]
    return [(one[2], other[2]) for one, other in of_sides]


def _beside(one: StepSeconds, other: StepSeconds) -> bool:
    """Whether two runs trained at the same time."""
    common = min(one.at[-1], other.at[-1]) - max(one.at[0], other.at[0])
    return bool(common > 0 and common >= BESIDE * min(one.at[-1] - one.at[0], other.at[-1] - other.at[0]))


def _common(one: StepSeconds, other: StepSeconds) -> tuple[StepSeconds, StepSeconds]:
    """The rows of the time in which both trained."""
    begin, end = max(one.at[0], other.at[0]), min(one.at[-1], other.at[-1])
    return one.between(begin, end), other.between(begin, end)


def _samples(
    a: Sequence[StepSeconds],
    b: Sequence[StepSeconds],
    pairs: Sequence[tuple[StepSeconds, StepSeconds]],
    *,
    beside: bool,
) -> tuple[Way, bool, list[StepSeconds], list[StepSeconds]]:
    """What the samples are; whether sample i of A belongs to sample i of B; the samples of A and of B."""
    if len(pairs) >= FEWEST_PAIRS:
        return Way.PAIRS, True, [one for one, _ in pairs], [other for _, other in pairs]
    if beside:
        cut = [(_cut(one, one, other), _cut(other, one, other)) for one, other in pairs]
        left, right = ([block for blocks in side for block in blocks] for side in zip(*cut, strict=True))
        if min(map(len, (*left, *right))) >= ENOUGH // BLOCKS:
            return Way.BLOCKS, True, left, right
    if min(len(a), len(b)) >= FEWEST_RUNS:
        return Way.RUNS, False, list(a), list(b)
    left, right = ([block for rows in side for block in _blocks(rows)] for side in (a, b))
    return Way.BLOCKS, False, left, right


def _blocks(rows: StepSeconds) -> list[StepSeconds]:
    """Blocks of equally many rows; the run itself, if it has too few."""
    return rows.blocks(np.array_split(np.arange(len(rows)), BLOCKS)) if len(rows) >= ENOUGH else [rows]


def _cut(rows: StepSeconds, one: StepSeconds, other: StepSeconds) -> list[StepSeconds]:
    """The rows in blocks that are the same spans of time in two runs."""
    edges = np.linspace(max(one.at[0], other.at[0]), min(one.at[-1], other.at[-1]), BLOCKS + 1)
    number = np.clip(np.searchsorted(edges, rows.at, side="right") - 1, 0, BLOCKS - 1)
    return rows.blocks([np.flatnonzero(number == block) for block in range(BLOCKS)])


def _sample(rows: StepSeconds) -> Sample:
    typical = rows.typical()
    return {STEP: sum(typical.values()), MEAN: rows.mean_step_s(), **typical}


def _matters(samples: Sequence[Sample], name: str) -> bool:
    """Whether a part is large enough for a change that is shown."""
    return bool(_values(samples, name).mean() >= SMALLEST * _values(samples, STEP).mean())


def _change(
    a: Sequence[Sample], b: Sequence[Sample], name: str, level: float, *, paired: bool, serial: bool
) -> PartChange:
    """The change of a part: mean of the pairs' changes, or change of the means."""
    whole = MEAN if name == MEAN else STEP
    left, right, of_step = (_values(side, key) for side, key in ((a, name), (b, name), (a, whole)))
    if paired:
        share = student.mean((right - left) / of_step, level, serial=serial)
    else:
        step_s = of_step.mean()
        share = student.difference(left / step_s, right / step_s, level, serial=serial)
    return PartChange(name, float(left.mean()), float(right.mean()), share)


def _values(samples: Sequence[Sample], name: str) -> Values:
    return np.array([sample[name] for sample in samples])
