"""In: a run folder. Out: the metrics of the run as columns for drawing, with marks for skipped and resumed steps.
Does not draw (curves.py does). A run that still trains can be read."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codescent.record import RunFolder
from codescent.results import Run
from codescent.results.statistics import Values

COLUMNS = ("step", "tokens", "train_loss", "val_loss", "learning_rate", "grad_norm", "tokens_per_s")
"""The columns of the metrics that are drawn."""
SECONDS = "seconds"
"""One more column: seconds of training up to a row."""
X_AXES = {"steps": "step", "tokens": "tokens", "time": SECONDS}
"""Value of --x: the column on the horizontal axis."""
LARGEST = 1e100
"""Larger numbers are not drawn: their sums and squares may have no float."""


@dataclass(frozen=True)
class Curves:
    """The metrics of one run.

    Attributes:
        name: the folder's name; its path, if another run has the same name.
        state: " (not ended: step N)"; "" if all steps are done.
        columns: the values of `COLUMNS` and `SECONDS`, one per row of metrics. NaN: no value, or not finite.
        skipped: steps whose training loss is not finite.
        resumed: steps after which the run was resumed.
    """

    name: str
    state: str
    columns: Mapping[str, Values]
    skipped: Sequence[float]
    resumed: Sequence[float]


def read(folder: RunFolder, name: str) -> Curves:
    """Read the metrics of a run that may still be training. Raises UserError: a file of the run folder is damaged."""
    given = {column: array("d") for column in (*COLUMNS, "step_s")}
    skipped: list[float] = []
    for row in folder.iter_metrics():
        for column, values in given.items():
            value = row[column]
            values.append(value if value is not None and abs(value) < LARGEST else math.nan)
        if row["train_loss"] is not None and not abs(row["train_loss"]) < LARGEST:
            skipped.append(given["step"][-1])
    columns = {column: np.array(values, dtype=np.float64) for column, values in given.items()}
    return _curves(name, columns, folder.read_events(), skipped)


def of_run(run: Run, name: str) -> Curves:
    """The same of a run that was opened: its columns are read once."""
    steps, losses = run.columns["step"], run.columns["train_loss"]
    return _curves(name, run.columns, run.events, [float(step) for step in steps[~(np.abs(losses) < LARGEST)]])


def _curves(
    name: str, given: Mapping[str, Values], events: Sequence[Mapping[str, Any]], skipped: Sequence[float]
) -> Curves:
    finite = {column: np.where(np.abs(given[column]) < LARGEST, given[column], math.nan) for column in COLUMNS}
    steps, step_s = given["step"], given["step_s"]
    # A row stands for the steps since the last row, whose durations are unknown: log.metrics_every may be 100.
    seconds = np.cumsum(np.diff(steps, prepend=0.0) * np.where(np.abs(step_s) < LARGEST, step_s, 0.0))
    last = float(steps[-1]) if len(steps) else 0.0
    begun = [event.get("step") for event in events if event.get("kind") == "resume"]
    resumed = [float(step) for step in begun if isinstance(step, int) and 0 < step <= last]
    kinds = [event["kind"] for event in events if event.get("kind") in ("start", "resume", "end")]
    ended = kinds[-1:] == ["end"]  # other events may follow it, such as logger_failed
    state = "" if ended else f" (not ended: step {last:,.0f})"
    return Curves(name, state, {**finite, SECONDS: seconds}, skipped, resumed)
