"""In: arguments of `codescent plot`. Out: a picture (PNG, SVG) of metrics of runs, or of schedules of configs.
Does not draw (curves.py and rate_figure.py do) and does not write a run folder. It does not import torch."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.base.published import in_words
from codescent.report.metrics import Curves, of_run
from codescent.report.ran import of_runs
from codescent.report.style import PICTURES, marked, no_matplotlib, picture_bytes
from codescent.report.summary import Summary
from codescent.results import Run, open_runs
from codescent.verbs.learning_rate import FILES
from codescent.verbs.picture import no_file, no_replacement
from codescent.verbs.plot_schedule import rate_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "codescent plot"
"""Stands in every picture of this command, which replaces only such files."""


def main(arguments: Namespace) -> int:
    """Draw the runs or the schedules, and say where the picture is."""
    figure, what = _draw_runs(arguments) if arguments.schedule is None else _draw_schedules(arguments)
    out: Path = arguments.out
    suffix = out.suffix.lower()
    content = picture_bytes(figure, suffix, marked(suffix, MARK))
    try:
        replace_file(out, content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {in_words(error)}") from error
    say([f"{out}: {what}"])
    return 0


def _draw_schedules(arguments: Namespace) -> tuple[Figure, str]:
    """The figure of --schedule, and what it shows. Raises UserError: all problems of the arguments and the configs."""
    problems = list(refusals(arguments.out))
    if arguments.runs:
        problems.append("--schedule: draws configs; leave out the runs, or give configs behind --schedule alone")
    if arguments.x is not None:
        problems.append("--x: is for runs; a schedule is drawn over steps")
    try:
        curves = [] if problems else rate_curves(arguments.schedule)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))

    from codescent.report.rate_figure import draw_rates

    return draw_rates(curves), counted(len(curves), "schedule")


def _draw_runs(arguments: Namespace) -> tuple[Figure, str]:
    """The figure of the runs, and what it shows. Raises UserError: all problems of the arguments and the runs."""
    runs: list[Run] = []
    problems = list(refusals(arguments.out))
    if not arguments.runs:
        problems.append("RUN: give the folder of a run, or --schedule and a config")
    try:
        # `runs/*` has files of FILES, too.
        runs = open_runs(path for path in arguments.runs if not path.name.endswith(FILES))
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    curves = list(_read_all(runs))
    if not curves:
        raise UserError("no row of metrics to draw: a run has one after its first step")

    from codescent.report.curves import draw

    config = of_runs([Summary(run, run.name) for run in runs if run.steps])
    return draw(curves, arguments.x, config), counted(len(curves), "run")


def refusals(path: Path) -> Iterator[str]:
    """Yield why the picture cannot be written to `path`."""
    if path.suffix.lower() not in PICTURES:
        yield f"--out {path}: the name must end in .png or .svg"
    elif problem := no_file("--out", path):
        yield problem
    elif (problem := no_replacement(path, MARK, "plot")) or (problem := no_matplotlib()):
        yield f"--out {path}: {problem}"


def _read_all(runs: Sequence[Run]) -> Iterator[Curves]:
    """The curves of each run. A run without a row is left out, and a line says so."""
    names = Counter(run.name for run in runs)
    for run in runs:
        if run.steps:
            yield of_run(run, run.name if names[run.name] == 1 else str(run.folder.path))
        else:
            warn(f"{run.folder.path}: has no row of metrics yet, and is left out")
