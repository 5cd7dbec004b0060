"""In: an evaluated study. Out: its table of points, its fits, and what is odd about it.
Does not evaluate it (the room study/ does) and does not draw (study_figures.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from codescent.base.amounts import of_seconds, three_digits
from codescent.base.counted import counted
from codescent.report.content import NO_CELL, Answer, Cell, Column, Table
from codescent.report.findings import few
from codescent.report.run_tables import interval, number, rate, share, size
from codescent.report.style import PARTS
from codescent.results import Interval
from codescent.study.result import Kind, Measured, Point, PointState, Study

KEPT = {
    Kind.STRONG: "the same global batch on more and more",
    Kind.WEAK: "the same batch per rank on more and more",
    Kind.THREADS: "the same work on more and more",
    Kind.GRID: "points beside a baseline",
}


def about(study: Study) -> str:
    """What was studied, in a sentence."""
    states = Counter(point.state for group in study.groups for point in group.points)
    number = states.total()
    points = ", ".join(f"{states[state]} {state}" for state in PointState if states[state])
    what = KEPT[study.kind] + (f" {study.unit}" if study.kind is not Kind.GRID else "")
    return f"A study of kind {study.kind}: {what}. {counted(number, 'point')}: {points}."


def points(study: Study) -> Table:
    """A row for each point, with all that was measured."""
    columns = [
        Column("point"),
        Column("state"),
        Column(study.unit),
        Column("repeats"),
        Column("step", "median of the repeats, and half of the 95 % interval"),
        Column("computing", "the same for forward and backward alone"),
        Column("speed-up", "times the baseline"),
        Column("compute speed-up", "for forward and backward alone"),
        Column("efficiency", "speed-up / growth of the workers"),
        Column("GFLOP/s", "all ranks"),
        Column("mfu", "share of the measured peak"),
        *(Column(PARTS[name][0], "share of a step") for name in ("communication_s", "bubble_s")),
        Column("serial share", "that Amdahl's law gives this point (Karp and Flatt)"),
        Column("memory", "peak, the fullest rank"),
        Column("load", "largest load of the machine per core"),
        Column("marks"),
    ]
    rows = [_row(point) for group in study.groups for point in group.points]
    baselines = dict.fromkeys(group.baseline for group in study.groups)
    return Table(columns, rows, f"Baseline: {'; '.join(baselines)}.")


def _row(point: Point) -> list[Cell]:
    whole = sum(point.parts_s.values())
    marks = "; ".join([*point.marks, *([point.why] if point.why else [])])
    return [
        Cell(point.name),
        Cell(str(point.state), odd=point.state is not PointState.DONE),
        number(point.workers, f"{point.workers}"),
        number(point.repeats, f"{point.repeats}"),
        interval(point.step_s.total),
        interval(point.step_s.compute),
        _times(point.speed_up.total),
        _times(point.speed_up.compute),
        _share(point.efficiency),
        NO_CELL if point.flops_per_s.total is None else rate(point.flops_per_s.total.value / 1e9, ""),
        NO_CELL if point.mfu is None else share(point.mfu.value),
        *(share(point.parts_s.get(name, 0.0) / whole if whole else None) for name in ("communication_s", "bubble_s")),
        share(point.serial_share),
        size(point.memory_bytes),
        number(point.load, f"{point.load:.2f}" if point.load is not None else ""),
        Cell(marks, odd=bool(point.marks)),
    ]


def _times(found: Interval | None) -> Cell:
    return NO_CELL if found is None else number(found.value, f"{three_digits(found.value)}x")


def _share(found: Measured) -> Cell:
    return NO_CELL if found.total is None else share(found.total.value)


def fits(study: Study) -> Iterator[Table]:
    """A row for each law that was fitted to each group."""
    columns = [Column("points"), Column("law"), Column("parameters", "with 95 % interval"), Column("what it says")]
    rows = []
    for group in study.groups:
        for fit in group.fits:
            given = "; ".join(f"{name} {_parameter(found)}" for name, found in fit.parameters.items())
            rows.append([Cell(group.label or study.name), Cell(fit.law), Cell(given), Cell(fit.said)])
    if rows:
        yield Table(columns, rows, "Laws of scaling, fitted to the speed-up.")


def _parameter(found: Interval) -> str:
    return f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"


def oddities(study: Study) -> Iterator[Answer]:
    """Points that are missing or marked."""
    said = []
    for group in study.groups:
        for point in group.points:
            if point.state is not PointState.DONE:
                said.append((point.name, f"{point.state}{f': {point.why}' if point.why else ''}"))
            elif point.marks:
                time = f" ({of_seconds(point.step_s.total.value)})" if point.step_s.total else ""
                said.append((point.name, f"{'; '.join(point.marks)}{time}"))
    yield Answer("Which points are missing or marked?", few(said, "point"))
