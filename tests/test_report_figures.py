"""In: studies of known numbers. Out: figures with a line for each group, intervals, marks, and the reason for each gap.
Does not judge beauty: people have looked at the figures."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from codescent.report import study_figures, study_tables
from codescent.report.content import Picture, Table, Words
from codescent.report.curves import POINTS, thinned
from codescent.report.page import VARIABLES, inline_svg
from codescent.report.style import COLOURS, PALETTE, PARTS
from codescent.results import PARTS as PART_NAMES
from codescent.results import Interval
from codescent.study import Fit, Group, Kind, Point, PointQuantity, PointState, Study
from codescent.study.marks import Mark, MarkKind, mark

NAN = float("nan")


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for kind in (UserWarning, RuntimeWarning):  # of matplotlib and numpy
            warnings.simplefilter("error", kind)
        yield


def point(workers: int, batch: int, seconds: float, *marks: Mark) -> Point:
    """A point whose computation has 0.8 of the time."""
    times = 8.0 / seconds

    def both(value: float, compute: float) -> PointQuantity:
        return PointQuantity(Interval(value, 0.9 * value, 1.2 * value), Interval(compute, NAN, NAN))

    return Point(
        name=f"ranks={workers} batch={batch}",
        axes={"ranks": workers, "batch": batch},
        workers=workers,
        state=PointState.DONE,
        repeats=3,
        step_s=both(seconds, 0.8 * seconds),
        speed_up=both(times, times),
        efficiency=both(times / workers, times / workers),
        flops_per_s=both(1e9 / seconds, 2e9 / seconds),
        tokens_per_s=Interval(100 / seconds, NAN, NAN),
        mfu=Interval(0.3, 0.2, 0.4),
        parts_s={name: seconds / len(PART_NAMES) for name in PART_NAMES},
        memory_bytes=2**30 * workers,
        marks=marks,
    )


REFUSED = Point("ranks=8 batch=4", {"ranks": 8, "batch": 4}, 8, PointState.REFUSED, "4 samples for 8 ranks; take 8")
LOST = Point("ranks=4 batch=8", {"ranks": 4, "batch": 8}, 4, PointState.OUT_OF_MEMORY, "it needs 9 GiB")
FITTED = Fit("Amdahl", {"serial share": Interval(0.1, 0.05, 0.2)}, "10 % is serial", {1: 1.0, 2: 1.8, 8: 4.7})
SHORT = Fit("Gustafson", {}, "too few points")
STUDY = Study(
    "little",
    Kind.STRONG,
    [
        Group(
            "batch=4",
            [point(1, 4, 8.0), point(2, 4, 3.5, mark(MarkKind.SUPER_LINEAR)), REFUSED],
            "ranks=1 batch=4",
            [FITTED, SHORT],
        ),
        Group("batch=8", [point(1, 8, 8.0), point(2, 8, 5.0), LOST, point(8, 8, 2.0)], "ranks=1 batch=8", [SHORT]),
    ],
    ["It scales."],
)


def pictures(study: Study) -> dict[str, Picture]:
    return {picture.name: picture for picture in study_figures.pictures(study)}


def test_a_study_has_a_figure_for_each_quantity() -> None:
    found = pictures(STUDY)
    both = [f"{name}{end}" for name in ("time", "speed_up", "efficiency", "flops") for end in ("", "_compute")]
    assert list(found) == [*both, "mfu", "overhead", "parts", "memory"]
    units = {
        "time": "seconds of a step", "speed_up": "speed-up (times the baseline)", "efficiency": "efficiency (%)",
        "flops": "GFLOP/s, all ranks", "overhead": "% of a step", "memory": "GiB, the fullest rank",
    }  # fmt: skip
    for name, unit in units.items():
        (axes,) = found[name].draw().axes
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("ranks", unit)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8"]
    (axes,) = found["parts"].draw().axes
    assert axes.get_xlabel() == "seconds of a step"
    assert len(axes.patches) == 5 * len(PART_NAMES)


def test_labels_of_short_steps_differ() -> None:
    """Also on the page, which shortens the coordinates of a figure."""
    points = [point(1, 4, 0.015), point(2, 4, 0.0105), point(4, 4, 0.009)]
    found = pictures(replace(STUDY, groups=[Group("", points, points[0].name, [])]))
    for name in ("time", "time_compute", "efficiency"):
        figure = found[name].draw()
        figure.canvas.draw()
        (axes,) = figure.axes
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert len(set(labels)) == len(labels)
        on_page = re.findall(r"<text[^>]*>([^<]+)</text>", inline_svg(found[name]))
        assert set(labels[1:-1]) <= set(on_page), "those at the ends may be outside the axes"
        assert ("time" in name) == axes.get_ylabel().startswith("milliseconds of a step")
    small = Picture("small", "", "", lambda: _figure_of(0.0004, 0.0008))
    assert {"0.00040", "0.00065", "0.00080"} <= set(re.findall(r"<text[^>]*>([^<]+)</text>", inline_svg(small)))


def _figure_of(low: float, high: float) -> Figure:
    figure = Figure()
    figure.add_subplot().plot([low, high], [low, high])
    return figure


def test_overhead_is_all_but_computation() -> None:
    (axes,) = pictures(STUDY)["overhead"].draw().axes
    (line, *_) = (bar.lines[0] for bar in axes.containers)
    assert line.get_ydata()[0] == pytest.approx(100 * 5 / 7), "the passes are two of seven equal parts"


def test_a_fit_to_single_repeats_has_no_interval() -> None:
    single = replace(FITTED, parameters={"serial share": Interval(0.1, NAN, NAN)})
    table = next(iter(study_tables.fits(replace(STUDY, groups=[replace(STUDY.groups[0], fits=[single])]))))
    assert isinstance(table, Table)
    assert table.rows[0][2].text == "serial share 0.1"


def test_lines_have_the_numbers_intervals_gaps_and_marks() -> None:
    (axes,) = pictures(STUDY)["time"].draw().axes
    lines = {line.get_label(): line for line in axes.lines}
    containers = {bar.get_label(): bar for bar in axes.containers}
    assert list(containers) == ["batch=4", "batch=8"]
    first, second = (containers[name].lines[0] for name in containers)
    assert np.array_equal(first.get_ydata(), [8, 3.5, NAN], equal_nan=True), "a gap, not a line across it"
    assert np.array_equal(second.get_ydata(), [8, 5, NAN, 2], equal_nan=True)
    assert [line.get_color() for line in (first, second)] == list(PALETTE[:2])
    ends = containers["batch=4"].lines[2][0].get_segments()
    assert [tuple(end[:, 1]) for end in ends[:2]] == [pytest.approx((7.2, 9.6)), pytest.approx((3.15, 4.2))]
    crosses = [(line.get_xdata()[0], line.get_color()) for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [(8.0, PALETTE[0]), (4.0, PALETTE[1])]
    assert "ideal" not in lines
    said = pictures(STUDY)["time"].caption
    assert said == (
        "Bars: 95 % interval. Crosses, missing: ranks=8 batch=4: refused (4 samples for 8 ranks); "
        "ranks=4 batch=8: out of memory (it needs 9 GiB)."
    )


def test_speed_up_has_the_ideal_line_the_law_and_stars() -> None:
    picture = pictures(STUDY)["speed_up"]
    (axes,) = picture.draw().axes
    (ideal,) = [line for line in axes.lines if line.get_label() == "ideal"]
    assert np.allclose(ideal.get_ydata(), ideal.get_xdata())
    assert [list(line.get_xdata()) for line in axes.lines if line.get_linestyle() == ":"] == [[1, 2, 8]]
    stars = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "*"]
    assert stars == [(2.0, pytest.approx(8 / 3.5))]
    assert "Against ranks=1 batch=4; ranks=1 batch=8." in picture.caption
    assert "Dotted: Amdahl's law, fitted. Stars: super-linear (ranks=2 batch=4)." in picture.caption
    (axes,) = pictures(STUDY)["speed_up_compute"].draw().axes
    assert not [line for line in axes.lines if line.get_marker() == "*"], "its computation is not marked"


def test_many_workers_are_on_logarithmic_axes_and_the_ideal_stays_straight() -> None:
    far = Group("", [point(2**n, 8, 8.0 / 2**n) for n in range(7)], "ranks=1 batch=8")
    (axes,) = pictures(replace(STUDY, groups=[far]))["speed_up"].draw().axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (axes,) = pictures(replace(STUDY, groups=[far]))["efficiency"].draw().axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")


def test_points_without_workers_are_bars() -> None:
    points = [replace(point(1, batch, 1.0 / batch), workers=None) for batch in (1, 2)]
    lost = replace(LOST, workers=None)
    study = replace(STUDY, kind=Kind.GRID, groups=[Group("", [*points, lost], points[0].name)])
    found = pictures(study)
    (axes,) = found["time"].draw().axes
    assert [patch.get_width() for patch in axes.patches] == [1.0, 0.5, 0.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1, 1", "1, 2", "4, 8"]
    assert found["time"].caption.startswith("Names: ranks, batch. ")
    assert found["parts"].caption.startswith("Names: ranks, batch. ")
    assert "ranks=4 batch=8: out of memory" in found["time"].caption
    assert found["memory"].draw().axes


def test_a_study_without_numbers_has_no_figures_but_its_table() -> None:
    study = replace(STUDY, groups=[Group("", [REFUSED, LOST], "ranks=1")])
    assert pictures(study) == {}
    table, marks = study_tables.tables(study)
    assert isinstance(table, Table)
    assert isinstance(marks, Words)
    assert [row[1].text for row in table.rows] == ["refused", "out of memory"]
    assert all(row[1].odd for row in table.rows)


def test_the_tables_of_a_study() -> None:
    times, rates, marks = study_tables.tables(STUDY)
    assert isinstance(times, Table)
    assert isinstance(rates, Table)
    assert isinstance(marks, Words)
    row = dict(zip([column.title for column in times.columns], times.rows[1], strict=True))
    assert (row["point"].text, row["speed-up"].text, row["efficiency"].text) == ("ranks=2 batch=4", "2.3x", "115 %")
    assert (row["step"].text, row["marks"].text) == ("3.50 s ± 15 %", "1")
    assert marks.paragraphs[0] == "1. ranks=2 batch=4: super-linear"
    row = dict(zip([column.title for column in rates.columns], rates.rows[1], strict=True))
    assert (row["point"].text, row["GFLOP/s"].text) == ("ranks=2 batch=4", "0.29")
    fits = list(study_tables.fits(STUDY))
    assert isinstance(fits[0], Table)
    assert [cell.text for cell in fits[0].rows[0]] == [
        "batch=4", "Amdahl", "serial share 0.1 (0.05 to 0.2)", "10 % is serial",
    ]  # fmt: skip
    assert isinstance(fits[1], Words)
    assert fits[1].paragraphs == ["Not fitted, Gustafson: too few points (batch=4, batch=8)."]
    answers = {answer.question: answer.sentences for answer in study_tables.answers(STUDY, [])}
    assert answers["Which points are the fastest?"][0] == ("ranks=8 batch=8", "50.0 tokens/s, 4.0 times its baseline.")
    assert ("ranks=4 batch=8", "out of memory: it needs 9 GiB") in answers["Which points are missing or marked?"]


def test_figures_of_a_page_have_its_colours_and_names_of_their_own() -> None:
    found = pictures(STUDY)
    texts = {name: inline_svg(found[name]) for name in ("time", "speed_up", "parts")}
    for text in texts.values():
        assert text.startswith("<svg viewBox=")
        assert "#000000" not in text
        assert "var(--ink)" in text
        assert "DejaVu" not in text
    names = [{part.split('"')[0] for part in text.split(' id="')[1:]} for text in texts.values()]
    assert not names[0] & names[1]
    used = {*PALETTE, *COLOURS.values(), *(colour for _, colour in PARTS.values())}
    assert {colour.lower() for colour in used} <= set(VARIABLES)


def test_thinned_curves_keep_their_extremes() -> None:
    values = np.random.default_rng(3).normal(size=100_000)
    values[50_000:50_500] = NAN
    at = thinned(values)
    assert POINTS // 2 < len(at) <= POINTS
    assert {0, len(values) - 1, int(np.nanargmax(values)), int(np.nanargmin(values))} <= set(at)
    assert sorted(at) == list(at)
    assert list(thinned(values[:5])) == [0, 1, 2, 3, 4]
