"""In: arguments of `codescent plot`. Out: a picture of the metrics of one or several runs (PNG or SVG).
Does not draw (curves.py does) and does not write a run folder. It does not import torch."""

from __future__ import annotations

import math
from argparse import Namespace
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.base.published import in_words
from codescent.record import RunFolder
from codescent.verbs.learning_rate import FILES
from codescent.verbs.picture import PICTURES, may_replace, no_file, no_matplotlib, picture_bytes

COLUMNS = ("step", "tokens", "train_loss", "val_loss", "learning_rate", "grad_norm", "tokens_per_s")
"""The columns of the metrics that are drawn."""
SECONDS = "seconds"
"""One more column: seconds of training up to a row."""
X_AXES = {"steps": "step", "tokens": "tokens", "time": SECONDS}
"""Value of --x: the column on the horizontal axis."""
MARK = "codescent plot"
"""Stands in every picture of this command, which replaces only such files."""

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
    columns: dict[str, array[float]]
    skipped: list[float]
    resumed: list[float]


def main(arguments: Namespace) -> int:
    """Draw the runs, and say where the picture is."""
    out: Path = arguments.out
    opened, problems = [], list(refusals(out))
    for path in (path for path in arguments.runs if not path.name.endswith(FILES)):  # `runs/*` has them, too
        try:
            opened.append(RunFolder.open(path))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    curves = list(_read_all(opened))
    if not curves:
        raise UserError("no row of metrics to draw: a run has one after its first step")

    from codescent.verbs.curves import draw

    suffix = out.suffix.lower()
    marks = {".png": {"Software": MARK}, ".svg": {"Title": MARK}}
    content = picture_bytes(draw(curves, arguments.x), suffix, marks[suffix])
    try:
        replace_file(out, content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {in_words(error)}") from error
    say([f"{out}: {len(curves)} run{'s' if len(curves) > 1 else ''}"])
    return 0


def refusals(path: Path) -> Iterator[str]:
    """Yield why the picture cannot be written to `path`."""
    if path.suffix.lower() not in PICTURES:
        yield f"--out {path}: the name must end in .png or .svg"
    elif problem := no_file("--out", path):
        yield problem
    elif not may_replace(path, MARK):
        yield f"--out {path}: is there already, and `codescent plot` has not drawn it; give another name"
    elif problem := no_matplotlib():
        yield f"--out {path}: {problem}"


def _read_all(folders: Sequence[RunFolder]) -> Iterator[Curves]:
    """The curves of each run. A run without a row is left out, and a line says so."""
    unique = list({folder.path.resolve(): folder for folder in folders}.values())
    names = Counter(folder.path.resolve().name for folder in unique)
    for folder in unique:
        own = folder.path.resolve().name
        found = read(folder, own if names[own] == 1 else str(folder.path))
        if found.columns["step"]:
            yield found
        else:
            warn(f"{folder.path}: has no row of metrics yet, and is left out")


def read(folder: RunFolder, name: str) -> Curves:
    """Read the metrics of a run that may still be training. Raises UserError: a file of the run folder is damaged."""
    columns = {column: array("d") for column in (*COLUMNS, SECONDS)}
    skipped: list[float] = []
    seconds = before = 0.0
    for row in folder.iter_metrics():
        step = _finite(row["step"], before)
        # A row stands for the steps since the last row, whose durations are unknown: log.metrics_every may be 100.
        seconds += (step - before) * (_finite(row["step_s"], 0.0))
        before = step
        for column in COLUMNS:
            columns[column].append(_finite(row[column], math.nan))
        columns[SECONDS].append(seconds)
        if row["train_loss"] is not None and math.isnan(columns["train_loss"][-1]):
            skipped.append(step)
    events = folder.read_events()
    steps = [event.get("step") for event in events if event.get("kind") == "resume"]
    resumed = [float(step) for step in steps if isinstance(step, int) and 0 < step <= before]
    kinds = [event["kind"] for event in events if event.get("kind") in ("start", "resume", "end")]
    ended = kinds[-1:] == ["end"]  # other events may follow it, such as logger_failed
    return Curves(name, "" if ended else f" (not ended: step {before:,.0f})", columns, skipped, resumed)


def _finite(value: float | None, otherwise: float) -> float:
    """The value as a float; `otherwise` if there is none, or if it is not finite or too large to draw."""
    return float(value) if value is not None and abs(value) < LARGEST else otherwise
