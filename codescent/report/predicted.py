"""In: the numbers of runs with a prediction. Out: predicted beside measured: tables, figures, what errs most.
Does not predict and does not compare (planner/ does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from codescent.base.amounts import of_bytes, of_change, of_seconds, of_share
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.plan import Plan
from codescent.planner.bands import Band
from codescent.planner.beside import MEMORY, ComparedPart, errs_most, memory, memory_band, said_of, times
from codescent.planner.measured import MeasuredStep
from codescent.report.bars import MOST_BARS, bars_figure, bytes_axis, seconds_axis, shortened
from codescent.report.content import NO_CELL, Cell, Column, Item, Picture, Table, Words
from codescent.report.frame import legend_above
from codescent.report.run_tables import number, seconds, size
from codescent.report.style import BLUE, PICTURE_IN, SKY, TEXT_GREY
from codescent.report.summary import Summary
from codescent.study.result import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BY_PART = 3
"""Runs whose parts are shown; of more, the whole step and the whole memory."""
SMALLEST = 0.01
"""A part of less than this share of the predicted whole has no bars."""
PREDICTED = Column("predicted", "before the first step: prediction.json")
BAND = Column("8 of 10", "between which numbers 8 of 10 such predictions would be measured")
ERROR = Column("error", "predicted / measured, less one")
MOST = Column("errs most", "which part of a step, and by how much")
OF_MEMORY = (Column("memory, predicted"), Column("memory, measured", "of the fullest rank"), ERROR)


@dataclass(frozen=True)
class PredictedRun:
    """A run that was predicted. `prediction`: as JSON (planner/prediction.py)."""

    name: str
    prediction: Mapping[str, Any]
    found: MeasuredStep

    @cached_property
    def times(self) -> list[ComparedPart]:
        """The step and its parts."""
        return times(self.prediction, self.found.step_s, self.found.parts_s)

    @cached_property
    def memory(self) -> list[ComparedPart]:
        """The memory of the fullest rank and its parts."""
        return memory(self.prediction, self.found.stage, self.found.memory)

    @property
    def band_s(self) -> Band:
        """Of the step."""
        return Band(*self.prediction["band_s"])

    @property
    def band_bytes(self) -> Band:
        """Of the memory."""
        return memory_band(self.prediction, self.found.stage, self.memory[0])

    @property
    def said(self) -> str:
        """How far it errs, and where."""
        return said_of(self.times, self.prediction["band_s"])


def items(known: Sequence[Summary], study: Study | None) -> Iterator[Item]:
    """Tables and figures of the runs that were predicted; of a study `points_table` and its figures say it.

    Raises UserError, with all of them: damaged predictions.
    """
    if study is not None:
        return
    found, problems = list[PredictedRun](), list[str]()
    for one in known:
        try:
            prediction, plan = one.run.prediction, one.run.plan
            if prediction is not None and plan is not None:
                found.append(_predicted(one, prediction, plan))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    if not found:
        return
    yield Words([_about(found)])
    if len(found) > MOST_BY_PART:
        yield from _of_many(found)
        return
    yield Table(*_by_part(found, [one.times for one in found], [one.band_s for one in found], seconds, of_seconds))
    several = len(found) > 1
    yield Words([f"{one.name}: {one.said}" if several else one.said for one in found if one.said], listed=several)
    sizes = [one.memory for one in found]
    yield Table(*_by_part(found, sizes, [one.band_bytes for one in found], size, of_bytes))
    yield _bars("predicted_time", "Time of a step, predicted and measured", found, is_memory=False)
    yield _bars("predicted_memory", "Memory, predicted and measured", found, is_memory=True)


def _predicted(one: Summary, prediction: Mapping[str, Any], plan: Plan) -> PredictedRun:
    return PredictedRun(one.name, prediction, one.run.measured(plan, one.warmup_wanted))


def _about(found: Sequence[PredictedRun]) -> str:
    """On what was predicted, and what is compared."""
    clusters = ", ".join(dict.fromkeys(one.prediction["cluster"] for one in found))
    fitted = dict.fromkeys(str(one.prediction.get("fitted_on") or "") for one in found)
    constants = "; ".join(f"fitted on {text}" if text else "not fitted" for text in fitted)
    return (
        f"Predicted on {clusters} before the first step, with constants that were {constants}. Measured: the median "
        "step after the warm-up, with the parts of the stage that computes longest; the memory of the fullest rank."
    )


def _by_part(
    found: Sequence[PredictedRun],
    compared: Sequence[Sequence[ComparedPart]],
    bands: Sequence[Band],
    cell: Callable[[float | None], Cell],
    words: Callable[[float], str],
) -> tuple[list[Column], list[list[Cell]]]:
    """Columns and rows: the whole of each run with its band, then its parts. `cell`, `words`: of a number."""
    several = [Column("run")] if len(found) > 1 else []
    rows = []
    for one, parts, band in zip(found, compared, bands, strict=True):
        for part in parts:
            is_whole = part is parts[0]
            name = [Cell(one.name)] if several else []
            shown = Cell(band.words(words)) if is_whole else NO_CELL
            error = _error(part, odd=is_whole and _is_outside(part, band))
            rows.append([*name, Cell(part.name), cell(part.predicted), shown, cell(part.measured), error])
    return [*several, Column("part"), PREDICTED, BAND, Column("measured"), ERROR], rows


def _is_outside(one: ComparedPart, band: Band) -> bool:
    return one.measured is not None and not band.low <= one.measured <= band.high


def _error(part: ComparedPart, *, odd: bool = False) -> Cell:
    return number(part.error, "" if part.error is None else of_change(part.error), odd=odd)


def _of_many(found: Sequence[PredictedRun]) -> Iterator[Item]:
    """A row for each run."""
    rows = []
    for one in found:
        held = one.memory[0]
        error = _error(held, odd=_is_outside(held, one.band_bytes))
        rows.append(
            [Cell(one.name), *_step_cells(one.times, one.band_s), size(held.predicted), size(held.measured), error]
        )
    yield Table([Column("run"), PREDICTED, BAND, Column("measured"), ERROR, MOST, *OF_MEMORY], rows)
    known = [one for one in found if one.times[0].error is not None]
    if known:
        worst = max(known, key=lambda one: abs(one.times[0].error or 0.0))
        yield Words([f"Furthest off of {counted(len(known), 'run')} is {worst.name}. {worst.said}"])
    yield _bars("predicted_time", "Time of a step, predicted and measured", found, is_memory=False)
    yield _bars("predicted_memory", "Memory, predicted and measured", found, is_memory=True)


def _step_cells(compared: Sequence[ComparedPart], band: Band) -> list[Cell]:
    """Predicted, its band, measured, error, and what errs most."""
    step, most = compared[0], errs_most(compared)
    part = NO_CELL if most is None else Cell(f"{most.name}, by {of_seconds(abs(most.missing))}")
    cells = [seconds(step.predicted), Cell(band.words(of_seconds)), seconds(step.measured)]
    return [*cells, _error(step, odd=_is_outside(step, band)), part]


class Bars(NamedTuple):
    """A row of a figure. `band`: of the predicted number; None: it has none."""

    name: str
    one: ComparedPart
    band: Band | None


def _rows(found: Sequence[PredictedRun], *, is_memory: bool) -> tuple[list[Bars], bool]:
    """A row for each part, or for each of many runs; whether parts are too small for one."""
    rows, is_many, small = list[Bars](), len(found) > MOST_BY_PART, False
    for run in found:
        compared = run.memory if is_memory else run.times
        for part in compared[:1] if is_many else compared:
            name = run.name if is_many else part.name if len(found) == 1 else f"{shortened(run.name, 22)}: {part.name}"
            band = run.band_bytes if is_memory else run.band_s
            if max(part.predicted, part.measured or 0.0) >= SMALLEST * compared[0].predicted:
                rows.append(Bars(name, part, band if part is compared[0] else None))
            else:
                small = True
    return rows, small


def _bars(name: str, title: str, found: Sequence[PredictedRun], *, is_memory: bool) -> Picture:
    """Two bars in each row, the predicted one above the measured one."""
    rows, small = _rows(found, is_memory=is_memory)
    shown = rows[:MOST_BARS]
    caption = "Above: predicted. Below: measured."
    if small:
        caption += f" Parts of less than {of_share(SMALLEST)} are left out."
    if any(row.band for row in shown):
        caption += " The line at a predicted bar: where 8 of 10 such runs are measured."
    if any(row.one.measured is None for row in shown):
        caption += " Without a lower bar: not measured."
    if len(shown) < len(rows):
        caption += f" The first {len(shown)} of {len(rows)}."

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure, axes = bars_figure([row.name for row in shown], Figure, width_in)
        longest = max(max(row.one.predicted, row.one.measured or 0.0) for row in shown)
        scale, unit = (bytes_axis if is_memory else seconds_axis)(longest)
        places = range(len(shown))
        predicted = [row.one.predicted * scale for row in shown]
        axes.barh([at - 0.19 for at in places], predicted, color=SKY, height=0.36, label="predicted")
        measured = [(row.one.measured or 0.0) * scale for row in shown]
        axes.barh([at + 0.19 for at in places], measured, color=BLUE, height=0.36, label="measured")
        for at, row in enumerate(shown):
            if row.band is not None:
                ends = [row.band.low * scale, row.band.high * scale]
                axes.plot(ends, [at - 0.19] * 2, "|-", color=TEXT_GREY, lw=1.2, ms=6)
        axes.set_xlim(left=0)
        axes.set_xlabel(unit, fontsize=9)
        legend_above(figure, *axes.get_legend_handles_labels())
        return figure

    return Picture(name, title, caption, draw)


def points_table(study: Study) -> Iterator[Table]:
    """A row for each point of a study that was predicted."""
    points = [point for group in study.groups for point in group.points]
    known = [(point, point.predicted) for point in points if point.predicted is not None]
    if not known:
        return
    columns = [Column("point"), PREDICTED, BAND, Column("measured"), ERROR, MOST, *OF_MEMORY]
    rows = [
        [
            Cell(point.name),
            *_step_cells(one.compared, one.band_s),
            size(one.memory_bytes),
            size(point.memory_bytes),
            _error(ComparedPart(MEMORY, one.memory_bytes, point.memory_bytes)),
        ]
        for point, one in known
    ]
    clusters = ", ".join(dict.fromkeys(one.cluster for _, one in known))
    yield Table(columns, rows, f"Predicted on {clusters}, before the runs of each point.")
