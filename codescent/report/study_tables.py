"""In: an evaluated study. Out: its table of points, its fits, and what is odd about it.
Does not evaluate it (the room study/ does) and does not draw (study_figures.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_measured, of_measured_share
from codescent.base.counted import counted
from codescent.report.content import NO_CELL, Cell, Column, KeyQuestion, Said, Table, Words
from codescent.report.findings import few, odd
from codescent.report.run_tables import interval, number, share, size
from codescent.report.style import PARTS
from codescent.report.summary import Summary
from codescent.results import Interval
from codescent.study.result import Point, PointState, Study
from codescent.study.words import KIND_WORDS, Folded, efficiency_of, folded, states_said, times


def about(study: Study) -> str:
    """What was studied, in a sentence."""
    number = sum(len(group.points) for group in study.groups)
    config = f" Base config: {study.config}." if study.config else ""
    return f"A study of {KIND_WORDS[study.kind]}. {counted(number, 'point')}: {states_said(study)}.{config}"


def tables(study: Study) -> Iterator[Table | Words]:
    """Two tables with a row for each point, each as wide as a small screen; then the marks, which the rows number."""
    points = [point for group in study.groups for point in group.points]
    marks = _marked(study)
    baselines = dict.fromkeys(group.baseline for group in study.groups)
    several = len({point.repeats for point in points}) > 1
    marked = [Column("marks", "numbers of the list below")] if marks else []
    repeats = [Column("repeats")] if several else []
    columns = [
        Column("step", "median of the repeats, and half of the 95 % interval"),
        Column("computing", "the same for forward and backward alone"),
        Column("speed-up", "times the baseline"),
        Column("compute speed-up", "for forward and backward alone"),
        Column("efficiency", "speed-up / growth of the workers"),
        Column("serial share", "that Amdahl's law gives this point (Karp and Flatt)"),
    ]
    caption = f"Baseline: {'; '.join(baselines)}."
    if not several:
        caption += f" {counted(points[0].repeats, 'repeat')} of each point."
    yield Table(
        [Column("point"), Column("state"), Column(study.unit), *repeats, *columns, *marked],
        [[*_whose(point, several), *_times_of(point), *_marks_of(point, marks)] for point in points],
        caption,
    )
    by = f", FLOPs by {study.formula.said}" if study.formula is not None else ""
    rates = [
        Column("tokens/s", "tokens of a step / median time, all ranks"),
        Column("GFLOP/s", f"all ranks{by}"),
        Column("mfu", f"share of the measured peak{by}"),
        *(Column(PARTS[name][0], "share of a step") for name in ("communication_s", "bubble_s")),
        Column("memory", "peak, the fullest rank"),
        Column("load", "largest load of the machine per core"),
    ]
    done = [point for point in points if point.step_s.total is not None]
    if done:
        yield Table([Column("point"), *rates], [[Cell(point.name), *_rates_of(point)] for point in done])
    if marks:
        yield Words([f"{at}. {one.about}: {one.mark}" for at, one in enumerate(marks, 1)])


def _whose(point: Point, several: bool) -> list[Cell]:
    state = Cell(str(point.state), odd=point.state is not PointState.DONE)
    repeats = [number(point.repeats, f"{point.repeats}")] if several else []
    return [Cell(point.name), state, number(point.workers, f"{point.workers}"), *repeats]


def _times_of(point: Point) -> list[Cell]:
    return [
        interval(point.step_s.total),
        interval(point.step_s.compute),
        _times(point.speed_up.total),
        _times(point.speed_up.compute),
        _efficiency(point.speed_up.total, point.efficiency.total),
        _share(point.serial_share),
    ]


def _rates_of(point: Point) -> list[Cell]:
    whole = sum(point.parts_s.values())
    return [
        _measured(point.tokens_per_s, 1.0),
        _measured(point.flops_per_s.total, 1e-9),
        _share(point.mfu),
        *(share(point.parts_s.get(name, 0.0) / whole if whole else None) for name in ("communication_s", "bubble_s")),
        size(point.memory_bytes),
        number(point.load, f"{point.load:.2f}" if point.load is not None else ""),
    ]


def _marks_of(point: Point, marks: Sequence[Folded]) -> list[Cell]:
    """The numbers of the marks that a point has; no cell if no point has one."""
    own = [str(at) for at, one in enumerate(marks, 1) if point.name in one.points]
    return [Cell(", ".join(own), odd=bool(own))] if marks else []


def _times(found: Interval | None) -> Cell:
    return NO_CELL if found is None else number(found.value, f"{times(found)}x")


def _efficiency(gain: Interval | None, found: Interval | None) -> Cell:
    return NO_CELL if found is None else number(found.value, efficiency_of(gain, found))


def _share(found: Interval | None) -> Cell:
    return NO_CELL if found is None else number(found.value, of_measured_share(found.value, found.half))


def _measured(found: Interval | None, scale: float) -> Cell:
    return NO_CELL if found is None else number(found.value, of_measured(found.value * scale, found.half * scale))


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


def answers(study: Study, known: Sequence[Summary]) -> list[KeyQuestion]:
    """What a reader wants to know of a study first."""
    return [
        KeyQuestion("What does the study say?", [("", said) for said in study.paragraphs]),
        KeyQuestion("Which points are the fastest?", list(_fastest(study))),
        KeyQuestion(
            "Which points are missing or marked?", few([(one.about, one.mark) for one in _marked(study)], "point")
        ),
        KeyQuestion("What is odd in its runs?", few(list(odd(known))) if known else []),
    ]


def _fastest(study: Study) -> Iterator[Said]:
    """The three fastest points."""
    points = [point for group in study.groups for point in group.points if point.tokens_per_s is not None]
    baselines = {group.baseline for group in study.groups}
    points.sort(key=lambda point: -point.tokens_per_s.value if point.tokens_per_s else 0.0)
    for point in points[:3]:
        assert point.tokens_per_s is not None
        gain, speed = point.speed_up.total, of_measured(point.tokens_per_s.value, point.tokens_per_s.half)
        than = f", {times(gain)} times its baseline" if gain and point.name not in baselines else ""
        yield point.name, f"{speed} tokens/s{than}."


def _marked(study: Study) -> list[Folded]:
    """The marks of points, and why points are missing; each once."""
    found = []
    for group in study.groups:
        for point in group.points:
            missing = f"{point.state}{f': {point.why}' if point.why else ''}"
            marks = point.marks if point.state is PointState.DONE else [missing]
            found += [(point.name, mark) for mark in marks]
    return folded(found)
