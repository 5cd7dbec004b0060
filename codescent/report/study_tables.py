"""In: an evaluated study. Out: its table of points, its fits, and what is odd about it.
Does not evaluate it (the room study/ does) and does not draw (study_figures.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_number, three_digits
from codescent.base.counted import counted
from codescent.report.content import NO_CELL, Answer, Cell, Column, Said, Table, Words
from codescent.report.findings import few, odd
from codescent.report.run_tables import interval, number, share, size
from codescent.report.style import PARTS
from codescent.report.summary import Summary
from codescent.results import Interval
from codescent.study.result import Measured, Point, PointState, Study
from codescent.study.words import KIND_WORDS, states_said


def about(study: Study) -> str:
    """What was studied, in a sentence."""
    number = sum(len(group.points) for group in study.groups)
    config = f" Base config: {study.config}." if study.config else ""
    return f"A study of {KIND_WORDS[study.kind]}. {counted(number, 'point')}: {states_said(study)}.{config}"


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
        _giga(point.flops_per_s.total),
        NO_CELL if point.mfu is None else share(point.mfu.value),
        *(share(point.parts_s.get(name, 0.0) / whole if whole else None) for name in ("communication_s", "bubble_s")),
        share(point.serial_share),
        size(point.memory_bytes),
        number(point.load, f"{point.load:.2f}" if point.load is not None else ""),
        Cell(marks, odd=bool(point.marks)),
    ]


def _giga(found: Interval | None) -> Cell:
    return NO_CELL if found is None else number(found.value / 1e9, of_number(found.value / 1e9))


def _times(found: Interval | None) -> Cell:
    return NO_CELL if found is None else number(found.value, f"{three_digits(found.value)}x")


def _share(found: Measured) -> Cell:
    return NO_CELL if found.total is None else share(found.total.value)


def fits(study: Study) -> Iterator[Table | Words]:
    """A row for each law that was fitted to each group; then why others were not."""
    columns = [Column("points"), Column("law"), Column("parameters", "with 95 % interval"), Column("what it says")]
    rows: list[list[Cell]] = []
    without: dict[str, list[str]] = {}
    for group in study.groups:
        for fit in group.fits:
            label = group.label or study.name
            if fit.parameters:
                given = "; ".join(f"{name} {_parameter(found)}" for name, found in fit.parameters.items())
                rows.append([Cell(label), Cell(fit.law), Cell(given), Cell(fit.said)])
            else:
                without.setdefault(f"{fit.law}: {fit.said}", []).append(label)
    if rows:
        yield Table(columns, rows, "Laws of scaling, fitted to the speed-up.")
    if without:
        yield Words([f"Not fitted, {said} ({', '.join(labels)})." for said, labels in without.items()], listed=True)


def _parameter(found: Interval) -> str:
    interval = "" if math.isnan(found.low) else f" ({found.low:.3g} to {found.high:.3g})"
    return f"{found.value:.3g}{interval}"


def answers(study: Study, known: Sequence[Summary]) -> list[Answer]:
    """What a reader wants to know of a study first."""
    return [
        Answer("What does the study say?", [("", said) for said in study.paragraphs]),
        Answer("Which points are the fastest?", list(_fastest(study))),
        Answer("Which points are missing or marked?", few(list(_marked(study)), "point")),
        Answer("What is odd in its runs?", few(list(odd(known))) if known else []),
    ]


def _fastest(study: Study) -> Iterator[Said]:
    """The three fastest points."""
    points = [point for group in study.groups for point in group.points if point.tokens_per_s is not None]
    baselines = {group.baseline for group in study.groups}
    points.sort(key=lambda point: -point.tokens_per_s.value if point.tokens_per_s else 0.0)
    for point in points[:3]:
        assert point.tokens_per_s is not None
        gain = point.speed_up.total
        times = f", {three_digits(gain.value)} times its baseline" if gain and point.name not in baselines else ""
        yield point.name, f"{of_number(point.tokens_per_s.value)} tokens/s{times}."


def _marked(study: Study) -> Iterator[Said]:
    """Points that are missing or marked."""
    for group in study.groups:
        for point in group.points:
            if point.state is not PointState.DONE:
                yield point.name, f"{point.state}{f': {point.why}' if point.why else ''}"
            else:
                yield from ((point.name, mark) for mark in point.marks)
