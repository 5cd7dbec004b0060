"""In: an opened run. Out: the metrics of the run as columns for drawing, with marks for skipped and resumed steps.
Does not draw (curves.py does). A run that still trains can be read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codescent.results import Run, State
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


def of_run(run: Run, name: str) -> Curves:
    """The metrics of a run that may still be training. Raises UserError: a file of the run folder is damaged."""
    given = run.columns
    finite = {column: np.where(np.abs(given[column]) < LARGEST, given[column], math.nan) for column in COLUMNS}
    steps, step_s, losses = finite["step"], given["step_s"], given["train_loss"]
    # A row stands for the steps since the last row, whose durations are unknown: log.metrics_every may be 100.
    seconds = np.cumsum(np.diff(steps, prepend=0.0) * np.where(np.abs(step_s) < LARGEST, step_s, 0.0))
    begun = [event.get("step") for event in run.events if event.get("kind") == "resume"]
    return Curves(
        name,
        state="" if run.state is State.DONE else f" (not ended: step {run.steps:,})",
        columns={**finite, SECONDS: seconds},
        skipped=[float(step) for step in steps[~(np.abs(losses) < LARGEST)]],
        resumed=[float(step) for step in begun if isinstance(step, int) and 0 < step <= run.steps],
    )
