"""In: run folders with rows of metrics. Out: `codescent plot` draws each run, or refuses in one sentence.
Does not judge beauty: people have looked at the pictures."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import called

from codescent.record import RunFolder
from codescent.report.curves import POINTS, coinciding, draw, smooth
from codescent.report.metrics import SECONDS, Curves, of_run
from codescent.report.rate_figure import RateCurve, draw_rates
from codescent.report.style import PALETTE
from codescent.results import open_run

NAN = math.nan


def row(step: int, loss: float, **more: float | None) -> dict[str, Any]:
    """A row of metrics: a step takes 2 s and 10 tokens."""
    shared = {"learning_rate": 1e-3, "grad_norm": 1.0, "tokens": 10 * step, "tokens_per_s": 5.0, "step_s": 2.0}
    return {"step": step, "train_loss": loss, **shared, **more}


def falling(steps: int, more: float = 0.0) -> list[dict[str, Any]]:
    """Rows of a loss that falls from 6 to 3, with a validation loss in each tenth step."""
    losses = {step: 3.0 + 3.0 / step + more for step in range(1, steps + 1)}
    return [row(step, loss, val_loss=None if step % 10 else loss + 0.1) for step, loss in losses.items()]


def make(path: Path, rows: list[dict[str, Any]], *, ends: bool = True, resumed: tuple[int, ...] = ()) -> RunFolder:
    folder = RunFolder.create(path, "", {})
    folder.event("start", step=0)
    for each in rows:
        folder.metrics(each)
    for step in resumed:
        folder.event("resume", step=step)
    if ends:
        folder.event("end", step=len(rows))
    return folder


def read(folder: RunFolder, name: str) -> Curves:
    return of_run(open_run(folder.path), name)


def labels(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for kind in (UserWarning, RuntimeWarning):  # of matplotlib and numpy
            warnings.simplefilter("error", kind)
        yield


def test_runs_are_drawn_over_steps_tokens_and_time(tmp_path: Path) -> None:
    make(tmp_path / "ended", falling(120))
    make(tmp_path / "_$1$", falling(80, 1.0), ends=False)
    for name in ("a.svg", "b.PNG"):
        done = called(
            tmp_path, "plot", "ended", "_$1$", "ended/", "--out", name
        )  # a run that is named twice is drawn once
        assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{name}: 2 runs\n")
    said = labels(tmp_path / "a.svg")
    assert said[said.index("ended") + 1] == "_$1$ (not ended: step 80)"
    titles = {"loss": 3, "learning rate": 1, "gradient norm, before clipping": 1, "speed, all ranks": 1}
    titles |= {"Training of 2 runs": 1, "nats per token, or the unit of the task": 3, "(no unit)": 2, "tokens/s": 1}
    axes = {"step": 4, "tokens": 1, "training time (minutes)": 1}
    assert {name: said.count(name) for name in titles | axes} == titles | axes
    pixels = (matplotlib.image.imread(tmp_path / "b.PNG", format="png") * 255).round().astype(int)
    seen = [int(colour[1:], 16) in pixels[:, :, :3] @ [1 << 16, 1 << 8, 1] for colour in PALETTE[:4]]
    assert seen == [True, True, False, False]


@pytest.mark.parametrize(
    ("over", "axis"), [("steps", "step"), ("tokens", "tokens"), ("time", "training time (minutes)")]
)
def test_one_axis_can_be_chosen(tmp_path: Path, over: str, axis: str) -> None:
    make(tmp_path / "run", falling(100))
    assert called(tmp_path, "plot", "run", "--x", over, "--out", "a.svg").returncode == 0
    said = labels(tmp_path / "a.svg")
    assert (said.count("loss"), said.count(axis)) == (1, 4)


def test_an_earlier_picture_is_replaced_and_equal_runs_give_equal_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", falling(40), ends=False)
    for name in ("a.svg", "a.png"):
        drawn = []
        for _ in range(2):
            assert called(tmp_path, "plot", "run", "--x", "steps", "--out", name).returncode == 0
            drawn.append((tmp_path / name).read_bytes())
        assert drawn[0] == drawn[1]
    folder.metrics(row(41, 3.0))
    assert called(tmp_path, "plot", "run", "--x", "steps", "--out", name).returncode == 0
    assert (tmp_path / name).read_bytes() != drawn[0]


def test_what_cannot_be_drawn_is_refused_in_one_sentence_each(tmp_path: Path) -> None:
    make(tmp_path / "run", falling(20))
    make(tmp_path / "empty", [])
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "other.png").write_bytes(b"\x89PNG of somebody else")
    os.mkfifo(tmp_path / "pipe.svg")
    before = {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")}
    for words, said in (
        (("run", "--out", "a.pdf"), ["--out a.pdf: the name must end in .png or .svg"]),
        (("run", "--out", "no/a.png"), ["--out no/a.png: there is no folder no"]),
        (("run", "--out", "folder.png"), ["--out folder.png: is a folder; give the name of a file"]),
        (("run", "--out", "pipe.svg"), ["--out pipe.svg: is a device or a pipe, not a file; give another name"]),
        (
            ("run", "--out", "other.png"),
            ["--out other.png: is there already, and `codescent plot` has not written it; give another name"],
        ),
        (
            ("absent", "run/config.toml", "--out", "a"),
            [
                "--out a: the name must end in .png or .svg",
                "absent: no such run folder",
                "run/config.toml: is a file, not a run folder",
            ],
        ),
        (("empty", "--out", "a.png"), ["no row of metrics to draw: a run has one after its first step"]),
    ):
        done = called(tmp_path, "plot", *words)
        assert (done.returncode, done.stdout) == (2, "")
        lines = [line for line in done.stderr.splitlines() if "left out" not in line]
        assert lines == [f"error: {problem}" for problem in said]
    assert {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")} == before


def test_without_matplotlib_the_line_that_mends_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run", falling(20))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = called(tmp_path, "plot", "run", "--out", "a.png")
    assert done.stderr == 'error: --out a.png: a picture needs matplotlib: pip install "codescent[plots]"\n'
    assert done.returncode == 2


def test_a_run_without_rows_is_left_out_beside_others(tmp_path: Path) -> None:
    make(tmp_path / "run", falling(20))
    make(tmp_path / "empty", [])
    done = called(tmp_path, "plot", "empty", "run", "--out", "a.png")
    assert (done.returncode, done.stdout) == (0, "a.png: 1 run\n")
    assert done.stderr == "empty: has no row of metrics yet, and is left out\n"


def test_all_in_the_folder_of_the_runs_can_be_given(tmp_path: Path) -> None:
    """A learning-rate range test writes its files beside the run folders. Events may follow the end of a run."""
    make(tmp_path / "run", falling(20)).event("logger_failed", call="end")
    for end in ("csv", "png"):
        (tmp_path / f"run-learning-rate.{end}").touch()
    done = called(tmp_path, "plot", *sorted(path.name for path in tmp_path.iterdir()), "--out", "a.svg")
    assert (done.returncode, done.stdout) == (0, "a.svg: 1 run\n"), done.stderr
    assert not [label for label in labels(tmp_path / "a.svg") if "not ended" in label]


def test_what_is_read_of_a_run(tmp_path: Path) -> None:
    rows = [row(2, 5.0, val_loss=4.0), row(4, NAN, grad_norm=math.inf), row(7, 3.0)]
    found = read(make(tmp_path / "run", rows, ends=False, resumed=(2, 4)), "run")
    assert list(found.columns["step"]) == [2, 4, 7]
    assert list(found.columns[SECONDS]) == [4, 8, 14]  # two steps a row, then three
    assert list(found.columns["tokens"]) == [20, 40, 70]
    assert np.array_equal(found.columns["train_loss"], [5, NAN, 3], equal_nan=True)
    assert np.array_equal(found.columns["grad_norm"], [1, NAN, 1], equal_nan=True)
    assert np.array_equal(found.columns["val_loss"], [4, NAN, NAN], equal_nan=True)
    assert (found.skipped, found.resumed, found.state) == ([4], [2, 4], " (not ended: step 7)")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(1, 3.0)], ["lines: each row"]),
        ([row(step, 3.0 + step) for step in range(1, 6)], ["lines: each row"]),
        ([row(1, NAN, grad_norm=NAN), row(2, math.inf, grad_norm=NAN)], ["no finite value"] * 4),
        ([{"step": 1}], ["no finite value"] * 5),
        ([row(step, 3.0 if step % 7 else NAN) for step in range(1, 300)], ["x: loss not finite, step skipped"]),
        ([row(1, 1e99), row(2, 1e308, tokens=10**18, step_s=1e12), row(10**17, -1e99)], ["lines: each row"]),
        ([row(step, 10.0 ** (-step / 100)) for step in range(1, 300)], ["$\\mathdefault{10^{-1}}$"]),
    ],
    ids=["one", "few", "nothing finite", "nothing", "gaps", "huge", "many decades"],
)
def test_runs_with_little_to_draw(tmp_path: Path, rows: list[dict[str, Any]], said: list[str]) -> None:
    run = read(make(tmp_path / "run", rows), "run")
    figure = draw([run])
    figure.savefig(tmp_path / "a.png")
    texts = [text.get_text() for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels(which="both"))]
    texts += [part for text in figure.texts for part in text.get_text().split("; ")]
    assert [texts.count(each) >= said.count(each) for each in said] == [True] * len(said)


def test_runs_with_the_same_losses_are_both_seen(tmp_path: Path) -> None:
    runs = [read(make(tmp_path / name, falling(100, more)), name) for name, more in (("a", 0), ("b", 1e-6), ("c", 1.0))]
    ((one, two, most, rows),) = coinciding(runs)
    assert (one, two, rows) == (0, 1, 100)
    assert most == pytest.approx(1e-6, rel=1e-3)
    figure = draw(runs)
    widths = [line.get_linewidth() for line in figure.legends[0].get_lines()]
    assert widths[0] > 2 * widths[1]
    assert widths[1] == widths[2]
    assert "b has the losses of a (broad line): in 100 rows at most 1.0e-06 apart" in "\n".join(
        text.get_text() for text in figure.texts
    )


def test_equal_runs_are_named_and_those_left_out_are_counted(tmp_path: Path) -> None:
    """Fault: equal runs are 0.0e+00 apart, and of many the caption names three without a word on the others."""
    runs = [read(make(tmp_path / name, falling(100)), name) for name in "abcdef"]
    said = " ".join(" ".join(text.get_text() for text in draw(runs).texts).split())
    for name in "bcd":
        assert f"{name} has the losses of a (broad line): in 100 rows equal" in said
    assert said.endswith("not named: 2 runs with the losses of an earlier one")


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_steps_are_whole_numbers(tmp_path: Path, steps: int) -> None:
    """Fault: an axis has a step 1.5."""
    figure = draw([read(make(tmp_path / "run", falling(steps)), "run")], "steps")
    rates = draw_rates([RateCurve("a", "cosine", steps, [*range(1, steps + 1)], [0.1] * steps)])
    for axes in (*figure.axes, *rates.axes):
        assert all(tick == round(tick) for tick in axes.get_xticks())
        assert len(axes.get_xticks()) > 1


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_letters_that_the_font_lacks_are_said_once(tmp_path: Path, name: str) -> None:
    """Fault: boxes in place of letters, and a warning of matplotlib for each of them. An SVG has the letters."""
    made = [make(tmp_path / f"\u8bad\u7ec3{number}", falling(20)).path.name for number in range(2)]
    done = called(tmp_path, "plot", *made, "--out", name)
    line = "pictures: the font lacks letters of a name, and shows boxes in their place; an .svg has the letters\n"
    assert (done.returncode, done.stderr) == (0, line if name == "a.png" else "")
    if name == "a.svg":
        assert set(made) <= set(labels(tmp_path / name))


def test_losses_that_differ_at_one_step_do_not_coincide(tmp_path: Path) -> None:
    rows = falling(100)
    rows[50]["train_loss"] += 0.5
    runs = [read(make(tmp_path / name, of), name) for name, of in (("a", falling(100)), ("b", rows))]
    assert coinciding(runs) == []


def test_a_long_run_makes_no_larger_picture(tmp_path: Path) -> None:
    figures = [draw([read(make(tmp_path / str(steps), falling(steps)), "run")]) for steps in (1000, 4000)]
    points = [max(len(line.get_xdata()) for axes in figure.axes for line in axes.lines[:1]) for figure in figures]
    assert POINTS // 2 < min(points) <= max(points) <= POINTS


@given(st.lists(st.floats(-1e6, 1e6) | st.just(NAN), min_size=1, max_size=400))
def test_smoothed_values_are_means_without_nan(values: list[float]) -> None:
    found, rows = smooth(np.array(values))
    half = (rows - 1) // 2
    for index, value in enumerate(found):
        window = [
            v for v in values[max(0, index - half) if index >= half else 0 : index + min(half, index) + 1] if v == v
        ]
        assert value == pytest.approx(sum(window) / len(window), abs=1e-6) if window else math.isnan(value)


def test_a_logarithmic_axis_shows_whole_schedules(tmp_path: Path) -> None:
    runs = []
    for name, peak in (("low", 1e-3), ("high", 0.1)):
        rates = [peak * step / 10 for step in range(1, 11)] + [peak / 30 ** (step / 40) for step in range(1, 41)]
        folder = make(tmp_path / name, [row(step, 3.0, learning_rate=rate) for step, rate in enumerate(rates, 1)])
        runs.append(read(folder, name))
    panel = next(axes for axes in draw(runs, None).axes if axes.get_title(loc="left") == "learning rate")
    low, high = panel.get_ylim()
    assert panel.get_yscale() == "log"
    assert low < 1e-3 / 30
    assert high > 0.1


def drawn_rates(folder: Path, *words: str) -> list[str]:
    done = called(folder, "plot", "--schedule", *words, "--out", "rates.svg")
    assert (done.returncode, done.stderr) == (0, "")
    return labels(folder / "rates.svg")


def test_schedules_of_configs_are_drawn_without_a_run(tmp_path: Path) -> None:
    """Each override belongs to the config before it: else all curves would be the last one."""
    found = drawn_rates(tmp_path, "default", "default", "optimizer.schedule=wsd")
    assert {"Learning rate of each step", "learning rate (no unit)"} <= set(found)
    assert "default: cosine, 2.97e-05 at step 1, 0.003 until step 101, 0.0001 at step 1,100" in found
    said = "wsd, 2.97e-05 at step 1, 0.003 until step 991, 0.000113 at step 1,100"
    assert f"default optimizer.schedule=wsd: {said}" in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.svg"]


def test_rates_of_scaled_workers_and_of_one_step_are_drawn(tmp_path: Path) -> None:
    words = ("gpt2_124m", "optimizer.scale_learning_rate=sqrt", "parallel.ranks=4")
    assert any("0.0012 until step 2,001" in label for label in drawn_rates(tmp_path, *words))
    assert any("at step 1, " in label for label in drawn_rates(tmp_path, "default", "train.num_steps=1"))


def test_schedules_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    done = called(
        tmp_path, "plot", "--schedule", "optimizer.schedule=wsd", "default", "train.num_epochs=2", "--out", "a"
    )
    assert done.returncode == 2
    assert [line.partition(": ")[2][:40] for line in done.stderr.splitlines()] == [
        "--out a: the name must end in .png or .s"
    ]
    done = called(
        tmp_path, "plot", "--schedule", "optimizer.schedule=wsd", "default", "train.num_epochs=2", "--out=a.png"
    )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "error: --schedule optimizer.schedule=wsd: is an override; give it behind a config"
    assert second.startswith("error: train.num_epochs = 2: the steps are unknown until the data is prepared")
    done = called(tmp_path, "plot", "run", "--schedule", "default", "--x", "time", "--out", "a.png")
    assert done.stderr.splitlines() == [
        "error: --schedule: draws configs; leave out the runs, or give configs behind --schedule alone",
        "error: --x: is for runs; a schedule is drawn over steps",
    ]
    assert called(tmp_path, "plot", "--out", "a.png").stderr == (
        "error: RUN: give the folder of a run, or --schedule and a config\n"
    )
