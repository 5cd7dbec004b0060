"""In: every kind of figure, at two widths. Out: each says what it shows and what was run, and nothing in it is cut.
Does not judge what the data say: test_plot.py, test_report_figures.py and test_report_predicted.py do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from reported import make_run, plan_of, predicted_run
from test_report_figures import LOST, REFUSED, STUDY, point

from codescent.cost.lengths import Lengths
from codescent.cost.simulate import simulate
from codescent.plan import FlopFormula
from codescent.report import ran, study_figures
from codescent.report.content import Picture, Timeline
from codescent.report.curves import draw
from codescent.report.frame import standing
from codescent.report.metrics import of_run
from codescent.report.rate_figure import RateCurve, draw_rates
from codescent.report.run_figures import step_picture
from codescent.report.sections import report
from codescent.report.step_picture import sheet
from codescent.report.width_figure import draw_widths
from codescent.results import open_runs
from codescent.study import Group, Kind, Study
from codescent.study.widths import PlaceSizes

NARROW, WIDE = 3.6, 11.0
LONG = "a_run_with_a_rather_long_name_that_says_what_it_is_and_$1$_more"
MACHINE = {"processor": "a processor", "cores": 64, "device": "cpu", "torch": "2.13.0", "codescent": "0.1.0"}
WHAT = replace(
    STUDY, machine=MACHINE, config="default", models=("gpt2: num_layers=4, hidden_dim=128, 1,000 parameters",),
    formula=FlopFormula.EXECUTED,
)  # fmt: skip
OVERRIDES = "optimizer.schedule=wsd optimizer.warmup_steps=100 optimizer.learning_rate=0.001 train.num_steps=1000"


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for kind in (UserWarning, RuntimeWarning):  # also: a layout for which there is no room
            warnings.simplefilter("error", kind)
        yield


def many() -> Study:
    """Nine lines with long names, of which each misses a point for a reason of its own."""
    groups = []
    for batch in range(9):
        label = f"layout=dp_shard=ranks, zero_stage=2 batch={batch} train.compile=blocks"
        points = [replace(point(workers, batch, 8.0 / workers), name=f"ranks={workers} {label}") for workers in (1, 2)]
        lost = replace(REFUSED, name=f"ranks=8 {label}", why=f"{batch} samples cannot be divided among 8 ranks")
        groups.append(Group(label, [*points, lost], points[0].name))
    return replace(WHAT, groups=groups)


def grid() -> Study:
    """Bars with long names, and a missing one."""
    axes = {"layout": "dp_shard=ranks, zero_stage=2, offload=optimizer", "train.compile": "blocks"}
    points = [replace(point(1, 4, 1.0 / n), name=f"a {n}", axes={**axes, "batch": n}, workers=None) for n in (1, 2)]
    lost = replace(LOST, workers=None, axes={**axes, "batch": 8})
    return replace(WHAT, kind=Kind.GRID, groups=[Group("", [*points, lost], points[0].name)])


def pictures_of(study: Study) -> list[Picture]:
    config = ran.of_study(study)
    return [replace(picture, config=config) for picture in study_figures.pictures(study)]


def figures(folder: Path, width_in: float) -> Iterator[tuple[str, Figure]]:
    """One figure of each kind, of a width."""
    for study, names in ((WHAT, ()), (many(), ("time", "speed_up")), (grid(), ("time", "flops_compute", "parts"))):
        for picture in pictures_of(study):
            if not names or picture.name in names:
                yield f"{study.kind} {len(study.groups)} {picture.name}", standing(picture, width_in)
    make_run(folder / "one", 2, "parallel.dp_shard=2", slower={1: 1.3})
    make_run(folder / LONG, 4, "parallel.pp=2")
    predicted_run(folder / "guess", 2, "parallel.dp_shard=2")
    runs = open_runs([folder / "one", folder / LONG, folder / "guess"])
    found = report(runs)
    steps = [item for section in found.sections for item in section.items if isinstance(item, Timeline)]
    for picture in [*found.pictures, *(step_picture(step, f"step {n}") for n, step in enumerate(steps))]:
        yield picture.name, standing(picture, width_in)
    curves = [of_run(runs[1], f"{LONG} {LONG} {n}") for n in range(9)]
    for x in (None, "time"):
        yield f"plot {x}", draw(curves, x, "what was run", 2 * width_in)
    rates = [RateCurve(f"default {OVERRIDES}", "wsd", 3, [1, 2, 3], [0.1, 0.2, 0.1])] * 9
    yield "rates", draw_rates(rates, width_in)
    places = [PlaceSizes(f"block {n}", mup, {64: 1.0, 128: 1.7}) for mup in (False, True) for n in range(12)]
    yield "widths", draw_widths(places, 4, "what was run", 2 * width_in)


def boxes(figure: Figure) -> dict[str, Bbox]:
    """Where texts, legends and axes are, in pixels, from the top."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = {text.get_text(): text.get_window_extent(renderer) for text in figure.texts}
    found |= {f"legend {n}": legend.get_window_extent(renderer) for n, legend in enumerate(figure.legends)}
    found["axes"] = Bbox.union([axes.get_tightbbox(renderer) for axes in figure.axes])
    return dict(sorted(found.items(), key=lambda item: -item[1].y1))


@pytest.mark.parametrize("width_in", [NARROW, WIDE])
def test_nothing_is_cut_and_nothing_hides_other_texts(tmp_path: Path, width_in: float) -> None:
    """Fault: a label, a legend or a note leaves the figure, or lies on another one."""
    wrong, kinds = [], 0
    for name, figure in figures(tmp_path, width_in):
        found, kinds = boxes(figure), kinds + 1
        wide, high = figure.bbox.width, figure.bbox.height
        for what, box in found.items():
            if box.x0 < -1 or box.y0 < -1 or box.x1 > wide + 1 or box.y1 > high + 1:
                wrong.append(f"{name}: {what[:40]!r} is cut: {box} in {wide} x {high}")
        for (above, upper), (below, lower) in itertools.pairwise(found.items()):
            if upper.y0 < lower.y1 - 3:
                wrong.append(f"{name}: {above[:40]!r} hides {below[:40]!r} by {lower.y1 - upper.y0}")
        if not all(axes.get_xlabel() or axes.get_shared_x_axes().get_siblings(axes) != [axes] for axes in figure.axes):
            wrong.append(f"{name}: an axis has no label")
    assert kinds > 25
    assert not wrong, "\n".join(wrong)


def test_a_long_title_of_a_simulated_step_is_wrapped() -> None:
    """Fault: the title, the config or the legend of a timeline is cut at the right."""
    simulation = simulate(plan_of(2, "parallel.pp=2").schedule, Lengths().costs)
    figure = sheet(simulation, "llama, 1f1b " * 20, Lengths(), "as long as this " * 20, 9.0, "a config " * 50)
    for what, box in boxes(figure).items():
        assert box.x0 >= 0, what
        assert box.y0 >= 0, what
        assert box.x1 <= figure.bbox.width, what
        assert box.y1 <= figure.bbox.height, what


def test_control_characters_are_wrapped_as_they_are_shown() -> None:
    """Fault: a title is measured before its control characters become four letters each, and is cut at the right."""
    simulation = simulate(plan_of(2, "parallel.pp=2").schedule, Lengths().costs)
    figure = sheet(simulation, "a\x1b" * 200 + "b\nc", Lengths(), "said", 9.0)
    found = boxes(figure)
    assert all(box.x1 <= figure.bbox.width for box in found.values())
    assert figure.texts[0].get_text().replace("\n", "") == r"a\x1b" * 200 + r"b\nc"


def said(picture: Picture) -> str:
    """What stands in a figure outside of its axes, without line breaks."""
    return " ".join(" ".join(text.get_text() for text in standing(picture).texts).split())


def test_a_figure_says_what_it_shows_what_was_run_and_why_points_are_missing() -> None:
    """Fault: a figure is understood with its page alone; two figures have one title."""
    found = {picture.name: picture for picture in pictures_of(WHAT)}
    texts = {name: said(picture) for name, picture in found.items()}
    titles = [picture.title for picture in found.values()]
    assert len(set(titles)) == len(titles)
    assert texts["time"].startswith("Time of a step, in all config default; gpt2: num_layers=4")
    assert texts["time_compute"].startswith("Time of a step, forward and backward alone config default")
    for text in texts.values():
        assert "on a processor with 64 cores, device cpu, torch 2.13.0, codescent 0.1.0" in text
    for name in ("time", "speed_up", "flops", "mfu", "memory"):
        assert "ranks=8 batch=4: refused (4 samples for 8 ranks)" in texts[name]
        (axes,) = found[name].draw().axes
        assert {"refused", "out of memory"} <= {text.get_text() for text in axes.texts}


def test_reasons_that_are_equal_are_said_once() -> None:
    """Fault: many crosses of one reason hide the other reasons, of which a caption has room for six."""
    study = many()
    lost = [replace(group.points[-1], why="no room") for group in study.groups]
    groups = [replace(group, points=[*group.points[:2], one]) for group, one in zip(study.groups, lost, strict=True)]
    groups[-1] = replace(groups[-1], points=[*groups[-1].points[:2], replace(LOST, why="it needs 9 GiB")])
    text = said(pictures_of(replace(study, groups=groups))[0])
    assert text.count("refused (no room)") == 1
    assert " and 5 more: refused (no room); ranks=4 batch=8: out of memory (it needs 9 GiB)." in text


@pytest.mark.parametrize("formula", [*FlopFormula, None])
def test_the_axes_say_how_flops_are_counted(formula: FlopFormula | None) -> None:
    """Fault: two figures with other FLOPs look alike."""
    found = {picture.name: picture for picture in pictures_of(replace(WHAT, formula=formula))}
    words = {
        FlopFormula.DENSE: "(FLOPs: 6NBT)",
        FlopFormula.ATTENTION: "(FLOPs: 6N + attention)",
        FlopFormula.EXECUTED: "(FLOPs: what is executed)",
    }
    for name in ("flops", "flops_compute", "mfu"):
        (axes,) = found[name].draw().axes
        assert [word for word in words.values() if word in axes.get_ylabel()] == ([words[formula]] if formula else [])
