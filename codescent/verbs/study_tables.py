"""In: an evaluated study. Out: its tables, fits and sentences, printed for a terminal of 80 columns.
Does not evaluate and writes no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from codescent.base.amounts import of_change, of_measured, of_measured_share, of_seconds, of_share
from codescent.base.console import new_console
from codescent.base.counted import counted
from codescent.base.visible import visible
from codescent.plan import FlopFormula
from codescent.planner.beside import errs_most
from codescent.results import Interval
from codescent.study.points import axes_named
from codescent.study.result import Kind, Point, PointState, Study
from codescent.study.words import KIND_WORDS, efficiency_of, folded, short_name, states_said, times

ENOUGH = 5
"""Repeats from which the interval of a median can be one of 95 %: even smallest to largest of four miss it in 12 %."""
FEW = f"of fewer than {ENOUGH} repeats, intervals are too narrow"

Column = tuple[str, Callable[[Point], str]]


def show(study: Study, source: str) -> None:
    """Print what a study says. `source`: the file with all its numbers."""
    console = new_console()
    _line(console, f"{study.name}: {KIND_WORDS[study.kind]}; {states_said(study)}")
    if study.config:
        _line(console, f"config: {study.config}")
    if study.machine:
        _line(console, f"on {_machine(study)}")
    repeats = sorted({point.repeats for point in _points(study) if point.repeats})
    if repeats:
        of = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        several = f"medians of {of} repeats, with intervals of 95 %"
        said = several if of != "1" else "one value for each point, no intervals"
        _line(console, said)
        if of != "1" and repeats[0] < ENOUGH:
            _line(console, FEW)
        if study.kind is Kind.GRID:
            _line(console, f"a point is: {axes_named(_points(study)[0].axes)}")
        if study.formula is not None:
            hfu = "; papers call this share of the peak HFU" if study.formula is FlopFormula.EXECUTED else ""
            _line(console, f"GFLOP/s and MFU count FLOPs by {study.formula.said}{hfu}")
        _line(console, f"every value is in {source}")
        for title, columns in _tables(study):
            _table(console, study, title, columns)
    _fits(console, study)
    _remarks(console, study)
    for text in study.paragraphs:
        console.print()
        _line(console, text)


def _tables(study: Study) -> list[tuple[str, list[Column]]]:
    """Several small tables: each fits on a terminal of 80 columns. A table of which nothing is known is left out."""
    points, grows = _points(study), study.kind is not Kind.GRID
    grow: list[Column] = [("efficiency", _efficiency), ("serial", lambda point: _measured_share(point.serial_share))]
    grow_alone: list[Column] = [("efficiency", _efficiency_of_computation)]
    time: list[Column] = [
        ("median", lambda point: _seconds(point.step_s.total)),
        ("95 % interval", lambda point: _ends(point.step_s.total)),
        ("speed-up", lambda point: _times(point.speed_up.total)),
        *(grow if grows else []),
    ]
    rate: list[Column] = [
        ("GFLOP/s", lambda point: _giga(point.flops_per_s.total)),
        ("MFU", lambda point: _measured_share(point.mfu)),
        ("tokens/s", lambda point: _rate(point.tokens_per_s)),
        ("MiB", lambda point: f"{point.memory_bytes / 2**20:,.0f}" if point.memory_bytes else ""),
        ("load/core", lambda point: f"{point.load:.2f}" if point.load is not None else ""),
    ]
    computation: list[Column] = [
        ("median", lambda point: _seconds(point.step_s.compute)),
        ("95 % interval", lambda point: _ends(point.step_s.compute)),
        ("speed-up", lambda point: _times(point.speed_up.compute)),
        *(grow_alone if grows else []),
        ("GFLOP/s", lambda point: _giga(point.flops_per_s.compute)),
    ]
    predicted: list[Column] = [
        ("predicted", lambda point: of_seconds(point.predicted.step_s) if point.predicted else ""),
        ("8 of 10", lambda point: point.predicted.band_s.words(of_seconds) if point.predicted else ""),
        ("error", _error),
        ("errs most", _errs_most),
    ]
    known = {
        "time": (time, True),
        "rate of all": (rate, any(point.flops_per_s.total for point in points)),
        "computation": (computation, any(point.step_s.compute for point in points)),
        "of a step": (PARTS, any(point.parts_s for point in points)),
        "predicted": (predicted, any(point.predicted for point in points)),
    }
    return [(name, columns) for name, (columns, is_known) in known.items() if is_known]


def _error(point: Point) -> str:
    error = point.predicted.compared[0].error if point.predicted else None
    return "" if error is None else of_change(error)


def _errs_most(point: Point) -> str:
    most = errs_most(point.predicted.compared) if point.predicted else None
    return "" if most is None else most.name


def _table(console: Console, study: Study, title: str, columns: Sequence[Column]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, overflow="fold")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for group in study.groups:
        if group.label:
            table.add_row(Text(visible(group.label), style="bold"))
        for point in group.points:
            name = visible(short_name(point, group, study.unit))
            if point.step_s.total is None:
                table.add_row(Text(name), str(point.state), *[""] * (len(columns) - 1))
            else:
                table.add_row(Text(f"{name}{' *' * bool(point.marks)}"), *(value(point) for _, value in columns))
        table.add_section()
    console.print()
    console.print(table)


def _fits(console: Console, study: Study) -> None:
    """The laws. What is the same for several groups is said once."""
    said: dict[str, list[str]] = {}
    for group in study.groups:
        for fit in group.fits:
            said.setdefault(f"{fit.law}: {fit.said}", []).append(group.label)
    if said:
        console.print()
    for text, labels in said.items():
        everywhere = len(labels) == len(study.groups)
        _line(console, text if everywhere else f"{', '.join(labels)}: {text}")


def _remarks(console: Console, study: Study) -> None:
    """What a reader must know about points, and why some have no numbers. Equal reasons are said once."""
    points = _points(study)
    marked = [point for point in points if point.marks]
    if marked:
        console.print()
    for one in folded([(point.name, mark) for point in marked for mark in point.marks]):
        _line(console, f"* {one.about}: {one.mark}")
    reasons: dict[str, list[str]] = {}
    for point in points:
        if point.state is not PointState.DONE and point.why:
            reasons.setdefault(f"{point.state}: {point.why}", []).append(point.name)
    if reasons:
        console.print()
    for reason, names in reasons.items():
        shown = "; ".join(names[:4]) + (f" and {counted(len(names) - 4, 'more point')}" if len(names) > 4 else "")
        _line(console, f"{shown}: {reason}")


def _points(study: Study) -> list[Point]:
    return [point for group in study.groups for point in group.points]


def _machine(study: Study) -> str:
    """The machine in a line."""
    known = study.machine
    cores = f", {counted(int(known['cores']), 'core')}" if known.get("cores") else ""
    return f"{known.get('device')} ({known.get('processor')}{cores}), torch {known.get('torch')}"


def _line(console: Console, text: str) -> None:
    console.print(Text(visible(text)), soft_wrap=not console.is_terminal)


def _seconds(found: Interval | None) -> str:
    return of_seconds(found.value) if found else ""


def _ends(found: Interval | None) -> str:
    """Such as "87.1-90.2 ms"; with both units where they differ."""
    if found is None or math.isnan(found.low):
        return ""
    low, high = of_seconds(found.low), of_seconds(found.high)
    same = low.rpartition(" ")[2] == high.rpartition(" ")[2]
    return f"{low.rpartition(' ')[0] if same else low}-{high}"


def _times(found: Interval | None) -> str:
    return times(found) if found else ""


def _share(value: float | None) -> str:
    return "" if value is None else of_share(value)


def _efficiency(point: Point) -> str:
    return efficiency_of(point.speed_up.total, point.efficiency.total)


def _efficiency_of_computation(point: Point) -> str:
    return efficiency_of(point.speed_up.compute, point.efficiency.compute)


def _measured_share(found: Interval | None) -> str:
    return of_measured_share(found.value, found.half) if found else ""


def _rate(found: Interval | None) -> str:
    return of_measured(found.value, found.half) if found else ""


def _giga(found: Interval | None) -> str:
    return "" if found is None else of_measured(found.value / 1e9, found.half / 1e9)


def _part(names: Sequence[str]) -> Callable[[Point], str]:
    def share(point: Point) -> str:
        whole = sum(point.parts_s.values())
        return of_share(sum(point.parts_s[name] for name in names) / whole) if whole else ""

    return share


PARTS: list[Column] = [
    ("compute", _part(("forward_s", "backward_s"))),
    ("comm", _part(("communication_s",))),
    ("bubble", _part(("bubble_s",))),
    ("data", _part(("data_s",))),
    ("optimizer", _part(("optimizer_s",))),
    ("other", _part(("other_s",))),
    ("overhead", lambda point: _share(point.overhead)),
]
"""Which shares of a step its parts take."""
