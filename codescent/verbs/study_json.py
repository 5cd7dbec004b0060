"""In: an evaluated study. Out: what its tables, fits and sentences say, as data for programs.
Does not evaluate and prints nothing. study_tables.py has the same for people."""

from __future__ import annotations

from typing import Any

from codescent.base.json_text import json_value
from codescent.study.result import Point, Study


def study_json(study: Study, source: str) -> dict[str, Any]:
    """A study as JSON data: the fields of study/result.py by their names, seconds and shares as numbers.

    `source`: the file with all its numbers. An interval has value, low and high; null: it has none.
    """
    found: dict[str, Any] = json_value(study)
    for group, of_group in zip(found["groups"], study.groups, strict=True):
        for point, of_point in zip(group["points"], of_group.points, strict=True):
            point |= _derived(of_point)
    return {**found, "source": source}


def _derived(point: Point) -> dict[str, Any]:
    """What the tables show of a point beside its fields."""
    predicted = point.predicted
    error = None if predicted is None or not predicted.compared else predicted.compared[0].error
    return {"overhead": json_value(point.overhead), "prediction_error": json_value(error)}
