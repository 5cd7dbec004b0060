"""In: the points of a group, and the groups beside it. Out: the batch with which a point would keep 80 % efficiency.
Does not evaluate points. The question is that of isoefficiency (Grama, Gupta & Kumar 1993)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from codescent.base.amounts import of_measured, of_share
from codescent.study.result import Group, Kind, Point, Study

KEPT = 0.8
"""The efficiency to keep."""

NOT_PER_SAMPLE = ("tp", "cp", "pp")
"""Axes of the mesh whose communication or waiting grows with the batch."""


MOST_APART = 3.0
"""A batch is not named if the intervals of the times allow one this many times as large."""


class LinearStepTime(NamedTuple):
    """Seconds of a step with a batch of B tokens: fixed_s + per_token_s x B."""

    fixed_s: float
    per_token_s: float


def batch_that_keeps(small: LinearStepTime, large: LinearStepTime, growth: float, kept: float = KEPT) -> float:
    """Tokens of a global batch with which `growth` times as many workers keep an efficiency; infinite: none does.

    Efficiency with batch B is small(B) / (growth x large(B)); solved for B. 0: any batch does.
    """
    gain_s = small.per_token_s - kept * growth * large.per_token_s
    lack_s = kept * growth * large.fixed_s - small.fixed_s
    if gain_s <= 0:
        return math.inf if lack_s > 0 else 0.0
    return max(0.0, lack_s / gain_s)


def line_of_parts(point: Point) -> LinearStepTime | None:
    """A point's line out of one batch: passes and data grow with the batch, all else does not; None: unknown."""
    if not (point.parts_s and point.tokens):
        return None
    parts = point.parts_s
    grows_s = parts["forward_s"] + parts["backward_s"] + parts["data_s"]
    return LinearStepTime(sum(parts.values()) - grows_s, grows_s / point.tokens)


def line_of_batches(points: Sequence[Point]) -> LinearStepTime | None:
    """A line through points that differ only in their batch; None: one batch, or the time does not grow with it."""
    known = [(point.tokens, point.step_s.total.value) for point in points if point.tokens and point.step_s.total]
    tokens, seconds = ([pair[index] for pair in known] for index in (0, 1))
    if len(set(tokens)) < 2:
        return None
    slope, fixed = np.polyfit(tokens, seconds, 1)
    # disturbed times may fall with the batch
    return LinearStepTime(max(0.0, float(fixed)), float(slope)) if slope > 0 else None


def said_of(study: Study, group: Group, baseline: Point, point: Point) -> str:
    """Which batch would keep the efficiency at a point, in a sentence; or why it cannot be said.

    Args:
        study: of the point; groups that differ only in their batch are used.
        group: of the point.
        baseline: of the group.
        point: with an efficiency below KEPT.
    """
    unit = study.unit
    where = f"Which batch would keep {of_share(KEPT)} at {point.workers} {unit} cannot be said"
    if any(point.mesh.get(axis, 1) > 1 for axis in NOT_PER_SAMPLE):
        return f"{where}: what this layout sends grows with the batch."
    if not (point.tokens and point.workers and baseline.workers):
        return f"{where}: the tokens of a step are not known."
    growth = point.workers / baseline.workers
    alike = [one for one in study.groups if _but_batch(one.points[0]) == _but_batch(group.points[0])]
    small = line_of_batches([one for of in alike for one in of.points if one.workers == baseline.workers])
    large = line_of_batches([one for of in alike for one in of.points if one.workers == point.workers])
    how = "by the times of all batches here"
    if small is None or large is None:
        if unit == "threads":
            return f"{where}: that needs times of several batches, which grow with the batch."
        small, large, how = line_of_parts(baseline), line_of_parts(point), "by computation and communication here"
    if small is None or large is None:
        return f"{where}: the parts of a step are not known."
    if study.kind is Kind.WEAK:  # the baseline has 1 / growth of the batch: p small(B / p) = p fixed_s + per_token_s B
        small = small._replace(fixed_s=growth * small.fixed_s)
    tokens = batch_that_keeps(small, large, growth)
    ends = [batch_that_keeps(a, b, growth) for a in _ends(small, baseline) for b in _ends(large, point)]
    if math.isinf(tokens):
        most = small.per_token_s / (growth * large.per_token_s)
        where = f"No batch would keep {of_share(KEPT)} at {point.workers} {unit}"
        return f"{where}: computation alone reaches {of_share(most)}."
    if max(ends) > MOST_APART * max(tokens, 1.0):
        return f"{where}: the repeats spread too much."
    needed = of_measured(tokens, (max(ends) - min(ends)) / 2)
    return (
        f"{of_share(KEPT)} at {point.workers} {unit} would need about {needed} tokens a step instead of "
        f"{point.tokens:,.0f} ({how})."
    )


def _ends(line: LinearStepTime, point: Point) -> list[LinearStepTime]:
    """A line with all times of its point at the ends of their interval; the line itself without one."""
    seconds = point.step_s.total
    if seconds is None or math.isnan(seconds.low):
        return [line]
    factors = (seconds.low / seconds.value, seconds.high / seconds.value)
    return [LinearStepTime(line.fixed_s * factor, line.per_token_s * factor) for factor in factors]


def _but_batch(point: Point) -> dict[str, str]:
    """The axes of a point without those that a line goes along."""
    moving = ("batch", "tokens", "ranks", "threads", "nodes")
    return {name: str(value) for name, value in point.axes.items() if name not in moving}
