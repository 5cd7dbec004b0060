"""In: points with predictions; real runs with run.cluster. Out: the predicted curve, and where the two part.
Does not check a price (test_price.py does) and does not check how long anything takes."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from runs import called, make_project

from codescent.cost.time_parts import NAMES
from codescent.report.predicted import points_table
from codescent.report.study_figures import pictures
from codescent.results import PARTS
from codescent.study import Kind, PointState, Study
from codescent.study.evaluate import Taken, evaluated
from codescent.study.repeat import Repeat
from codescent.study.table import rows_of


def prediction(computing_s: float, messages_s: float) -> dict[str, Any]:
    """Of a step of 1,000 tokens."""
    parts = {**dict.fromkeys(NAMES, 0.0), "products_s": computing_s, "between_s": messages_s}
    step_s = computing_s + messages_s
    held = {"total": 2.0**30, "device": 0.0, "fragments": 0.0}
    return {
        "cluster": "here", "step_s": step_s, "band_s": [0.9 * step_s, 1.2 * step_s], "parts": parts,
        "tokens_per_s": 1000 / step_s, "memory_bytes": [held], "device_kind": "cpu",
    }  # fmt: skip


def taken(ranks: int, predicted: Mapping[str, Any] | None, computing_s: float, messages_s: float) -> Taken:
    """A point with one repeat, which is measured so."""
    parts = {**dict.fromkeys(PARTS, 0.0), "forward_s": computing_s, "communication_s": messages_s}
    repeat = Repeat(computing_s + messages_s, tokens=1000.0, flops=1e9, compute_s=computing_s, parts_s=parts,
                    busiest_s=parts)  # fmt: skip
    return Taken({"ranks": ranks}, ranks, PointState.DONE, repeats=[repeat], prediction=predicted)


def study_of(*points: Taken, kind: Kind = Kind.STRONG) -> Study:
    return evaluated("s", kind, {"ranks": 1}, points)


def test_where_they_part_the_part_of_the_step_is_named() -> None:
    """The part that errs most at every point, instead of the one whose error grows."""
    study = study_of(
        taken(1, prediction(1.0, 0.0), 3.0, 0.0),
        taken(2, prediction(0.5, 0.1), 1.5, 0.3),
        taken(4, prediction(0.25, 0.1), 0.75, 0.5),
    )
    assert study.paragraphs[-1] == (
        "Predicted and measured part at 4 ranks: it takes 3.57 times what is predicted, and 1 rank takes 3.00 times. "
        "The part of the step that does so is messages: predicted 100 ms, measured 500 ms."
    )


def test_a_constant_factor_is_no_parting() -> None:
    study = study_of(taken(1, prediction(1.0, 0.0), 2.0, 0.0), taken(2, prediction(0.5, 0.1), 1.0, 0.25))
    assert study.paragraphs[-1] == (
        "Predicted and measured stay together: each point takes 2.00 to 2.08 times what is predicted."
    )
    assert not any("redicted" in said for said in study_of(taken(1, None, 1, 0), taken(2, None, 1, 0)).paragraphs)


def test_of_a_grid_the_point_that_is_furthest_is_named() -> None:
    points = [taken(1, prediction(1.0, 0.0), 1.0, 0.0), taken(2, prediction(1.0, 0.0), 1.3, 0.0)]
    points.append(taken(3, prediction(1.0, 0.0), 0.5, 0.0))
    assert "part at ranks=3: it takes 0.500 times" in study_of(*points, kind=Kind.GRID).paragraphs[-1]


def test_curves_and_tables_have_the_prediction_of_points_without_a_repeat_too() -> None:
    """A prediction that needs a measurement; a speed-up beside another baseline."""
    failed = Taken({"ranks": 4}, 4, PointState.OUT_OF_MEMORY, "no memory", prediction=prediction(0.25, 0.25))
    study = study_of(taken(1, prediction(1.0, 0.0), 2.0, 0.0), taken(2, prediction(0.5, 0.3), 1.0, 0.2), failed)
    one, two, four = (point.predicted for point in study.groups[0].points)
    assert one is not None
    assert two is not None
    assert four is not None
    assert (two.step_s, two.compute_s, four.speed_up, four.efficiency) == (0.8, 0.5, 2.0, 0.5)
    assert (one.speed_up, two.flops_per_s, four.flops_per_s) == (1.0, 1e9 / 0.8, None)
    (table,) = points_table(study)
    assert [[cell.text for cell in row][1:5] for row in table.rows] == [
        ["1.00 s", "900 ms to 1.20 s", "2.00 s", "-50.0 %"],
        ["800 ms", "720 to 960 ms", "1.20 s", "-33.3 %"],
        ["500 ms", "450 to 600 ms", "–", "–"],
    ]
    assert [row["predicted_s"] for row in rows_of(failed, [])] == [0.5]
    drawn = {picture.name: picture for picture in pictures(study)}
    for name in ("time", "time_compute", "speed_up", "efficiency", "flops", "overhead"):
        assert "Pale lines: predicted" in drawn[name].caption, name
        (axes,) = drawn[name].draw().axes
        pale = next(line for line in axes.lines if line.get_label() == "predicted")
        assert len(pale.get_xdata()) == (2 if name == "flops" else 3), name


STUDY = """
[study]
name = "tiny"
config = "run.toml"
kind = "grid"
repeats = 1
steps = 3
warmup = 1
baseline = { batch = 4 }
[set]
run.cluster = "laptop"
[axes]
batch = [4, 8]
"""


def test_each_point_of_a_study_with_run_cluster_has_its_prediction(tmp_path: Path, forker: Forker) -> None:
    """A prediction that stays on the machine of the run; a column of study.csv that is empty."""
    make_project(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    words = ["run.cluster=laptop", "train.num_steps=4", "log.every=1", "train.eval_every=0", "log.sample_tokens=0"]
    words += ["checkpoint.last=false"]
    for batch in (4, 8):
        forker.train(tmp_path, f"batch{batch}", 1, f"train.global_batch_size={batch}", *words)
    done = called(tmp_path, "study", "study.toml", "--collect", "runs/batch4", "runs/batch8")
    assert done.returncode == 0, done.stderr
    for point in ("batch-4", "batch-8"):
        copied = json.loads((tmp_path / f"study-runs/tiny/{point}/1/prediction.json").read_text())
        with (tmp_path / "study-runs/tiny/study.csv").open() as file:
            rows = {row["point"]: row for row in csv.DictReader(file)}
        assert float(rows[point.replace("-", "=")]["predicted_s"]) == pytest.approx(copied["step_s"])
    assert "predicted  predicted " in done.stdout
    assert "Predicted and measured " in done.stdout
    page = called(tmp_path, "report", "study-runs/tiny", "--markdown")
    assert "Predicted on laptop, before the runs of each point" in page.stdout
