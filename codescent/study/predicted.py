"""In: points with the prediction of their runs. Out: predicted beside measured of each; where the two part, in words.
Does not predict: each run writes prediction.json before its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.amounts import of_number, of_seconds
from codescent.planner.bands import Band
from codescent.planner.beside import held_bytes, times
from codescent.results import Interval
from codescent.study.result import Group, Kind, Point, PredictedPoint, Study
from codescent.study.words import short_name

APART = 1.15
"""Predicted and measured part where their ratio differs from that of the first point by more than this factor."""


def predicted_point(
    prediction: Mapping[str, Any],
    of_baseline: Mapping[str, Any] | None,
    step_s: Interval | None,
    parts_s: Mapping[str, float],
    flops: float | None,
    grown: float | None,
) -> PredictedPoint:
    """What was predicted of a point.

    Args:
        prediction: of its runs (planner/prediction.py).
        of_baseline: that of the baseline; None: it has none.
        step_s: measured; None: no repeat is done.
        parts_s: of the median step, on the stage that computes longest; empty: unknown.
        flops: model FLOPs of a step; None: unknown.
        grown: workers of the point / those of the baseline; None: unknown.
    """
    compared = times(prediction, None if step_s is None else step_s.value, parts_s)
    tokens_per_s = float(prediction.get("tokens_per_s") or math.nan)
    base = math.nan if of_baseline is None else float(of_baseline.get("tokens_per_s") or math.nan)
    speed_up = tokens_per_s / base
    return PredictedPoint(
        cluster=prediction["cluster"],
        step_s=compared[0].predicted,
        band_s=Band(*prediction["band_s"]),
        compared=compared,
        speed_up=speed_up if math.isfinite(speed_up) else None,
        efficiency=speed_up / grown if grown and math.isfinite(speed_up) else None,
        flops_per_s=flops / compared[0].predicted if flops else None,
        memory_bytes=held_bytes(prediction),
    )


def sentences(study: Study) -> Iterator[str]:
    """For each group: where prediction and measurement part, and which part of the step does; or that they do not."""
    for group in study.groups:
        known = [point for point in group.points if point.predicted and _ratio(point)]
        if study.kind is Kind.GRID:
            known.sort(key=lambda point: point.name != group.baseline)  # the others stay in order
        if len(known) > 1:
            yield f"{group.label}: {_said(study, group, known)}" if group.label else _said(study, group, known)


def _ratio(point: Point) -> float:
    """Measured over predicted; 0: one of them is not known."""
    step = point.predicted.compared[0] if point.predicted else None
    return (step.measured or 0.0) / step.predicted if step and step.predicted else 0.0


def _said(study: Study, group: Group, known: Sequence[Point]) -> str:
    first, rest = known[0], known[1:]
    start, limit = _ratio(first), math.log(APART)
    apart = {point.name: abs(math.log(_ratio(point) / start)) for point in rest}
    beyond = [point for point in rest if apart[point.name] > limit]
    ratios = [_ratio(point) for point in known]
    if not beyond:
        ends = dict.fromkeys(map(of_number, (min(ratios), max(ratios))))
        return f"Predicted and measured stay together: each point takes {' to '.join(ends)} times what is predicted."
    point = beyond[0] if study.kind is not Kind.GRID else max(beyond, key=lambda one: apart[one.name])
    name, from_name = (
        one.name if study.kind is Kind.GRID else short_name(one, group, study.unit) for one in (point, first)
    )
    return (
        f"Predicted and measured part at {name}: it takes {of_number(_ratio(point))} times what is predicted, and "
        f"{from_name} takes {of_number(start)} times. {_part(first, point)}"
    )


def _part(first: Point, point: Point) -> str:
    """The part of the step whose error grows most, relative to the predicted step."""
    shares = [_missing(one) for one in (first, point)]
    if not all(shares):
        return "Which part of the step does so is not known: the parts were not measured."
    sign = math.copysign(1.0, _ratio(point) - _ratio(first))
    names = {**shares[0], **shares[1]}
    name = max(names, key=lambda part: sign * (shares[1].get(part, 0.0) - shares[0].get(part, 0.0)))
    assert point.predicted is not None
    found = next((one for one in point.predicted.compared[1:] if one.name == name), None)
    if found is None:
        return f"The part of the step that does so is {name}: the first point alone has it."
    numbers = f"predicted {of_seconds(found.predicted)}, measured {of_seconds(found.measured)}"
    return f"The part of the step that does so is {name}: {numbers}."


def _missing(point: Point) -> dict[str, float]:
    """By part: measured less predicted, relative to the predicted step. They sum to the ratio less one."""
    assert point.predicted is not None
    parts = point.predicted.compared[1:]
    if any(part.measured is None for part in parts):
        return {}
    return {part.name: part.missing / point.predicted.step_s for part in parts}
