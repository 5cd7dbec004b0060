"""In: runs with run.cluster. Out: prediction.json, and lines of what was predicted and measured.
Does not check a price: test_price.py does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from reported import STEP_S, of_rank, plan_of
from runs import called, codescent, make_project

from codescent.cost.time_parts import NAMES
from codescent.planner.beside import beside
from codescent.planner.measured import MeasuredStep, measured_step
from codescent.planner.prediction import problem_of
from codescent.record.memory import COLUMNS
from codescent.results import open_run


def test_a_run_ends_with_what_was_predicted_beside_what_was_measured(tmp_path: Path) -> None:
    """A prediction that is made after the run, or of another plan."""
    make_project(tmp_path)
    done = codescent(tmp_path, "train", "run.toml", "run.cluster=laptop", "train.num_steps=6", "run.name=one")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs/one/prediction.json").read_text())
    assert found["cluster"] == "laptop"
    assert "predicted on laptop: " in done.stdout
    assert done.stdout.index("predicted on laptop: ") < done.stdout.index("step 6/6")
    assert "\nstep: predicted " in done.stdout
    assert "\n  computing: predicted " in done.stdout
    assert "\nmemory: predicted " in done.stdout
    assert "\nThe step is predicted " in done.stdout
    weights = next(line for line in done.stdout.splitlines() if line.startswith("  weights: predicted "))
    assert weights.endswith(": +0.0 %")
    step = next(line for line in done.stdout.splitlines() if line.startswith("step: predicted "))
    table = called(tmp_path, "report", "runs/one", "--markdown").stdout
    (row,) = (line for line in table.splitlines() if line.startswith("| step | "))
    cells = [cell.strip(" *") for cell in row.strip("|").split("|")]
    assert step == f"step: predicted {cells[1]}, measured {cells[3]}: {cells[4]}", "a report says what the run has said"
    said = next(line for line in done.stdout.splitlines() if line.startswith("The step is predicted "))
    assert said in table.replace("\\", "")


@pytest.mark.parametrize("words", [(), ("parallel.ranks=2",)])
def test_a_cluster_that_is_not_there_is_said_before_a_run_begins(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A run of days without the prediction that was asked for."""
    make_project(tmp_path)
    done = called(tmp_path, "train", "run.toml", "run.cluster=h100", "run.name=one", *words)
    assert done.returncode == 2
    assert 'error: run.cluster: cluster "h100": no such file' in done.stderr
    assert not (tmp_path / "runs/one").exists()


STAGE = {"weights": 1.0, "gradients": 0.0, "optimizer": 2.0, "activations": 0.0, "logits": 0.0, "gathered": 0.0}
PARTS = dict.fromkeys(NAMES, 0.0)
ROW: dict[str, Any] = dict.fromkeys(COLUMNS) | {"peak_bytes": 2, "most_weights_bytes": 1, "most_gradients_bytes": 0}


def predicted(*stages: dict[str, float], **parts: float) -> dict[str, Any]:
    """A prediction of a second, with a band of half of it to twice as much."""
    found = {**PARTS, "products_s": 1.0, **parts}
    return {
        "step_s": sum(found.values()),
        "band_s": [0.5, 2.0],
        "parts": found,
        "memory_bytes": list(stages),
        "band_bytes": [[1.0, 9.0] for _ in stages],
    }


def test_parts_without_a_number_are_left_out() -> None:
    """A division by nothing; a part that nobody has measured, as if it were nothing."""
    stage = {**STAGE, "device": 1.0, "fragments": 0.0}
    found = MeasuredStep(2.0, {"forward_s": 0.5, "backward_s": 1.25, "other_s": 0.25}, 0, ROW)
    lines = list(beside(predicted(stage), found))
    assert lines[:5] == [
        "step: predicted 1.00 s, measured 2.00 s: -50.0 %",
        "  computing: predicted 1.00 s, measured 1.75 s: -42.9 %",
        "  the rest: predicted 0 s, measured 250 ms: -100 %",
        "memory: predicted 4 bytes, measured 2 bytes: +100 %",
        "  weights: predicted 1 bytes, measured 1 bytes: +0.0 %",
    ]
    assert lines[5].startswith(
        "The step is predicted 50 % too short, inside of its band. The part that errs most is comp"
    )
    assert "The device computes more slowly" in lines[5]
    assert len(lines) == 6
    assert list(beside(predicted(stage), MeasuredStep(None))) == []


def test_where_the_memory_is_highest_is_said_if_both_sides_know_it() -> None:
    """The place of a rank of another stage as if it were that of the prediction; an older file that ends a run."""
    stage = {**STAGE, "device": 1.0, "fragments": 0.0}
    peak = {"stage": 0, "at": "backward 1", "said": "backward pass of micro-batch 1"}
    found = MeasuredStep(None, {}, 1, {**ROW, "peak_step": 3, "peak_at": "forward 2"})
    assert list(beside({**predicted(stage, stage), "peak": peak}, found))[-1] == (
        "  highest: predicted in stage 0, backward 1; measured in stage 1, forward 2 (step 3)"
    )
    for one in (predicted(stage, stage), {**predicted(stage, stage), "peak": None}):
        assert not any("highest" in line for line in beside(one, found))


def test_on_a_device_the_peak_of_tensors_is_compared_with_tensors_of_the_same_stage() -> None:
    """A context that only the prediction has; the fullest stage of the one beside another one of the other."""
    first = {**STAGE, "weights": 8.0, "optimizer": 0.0, "device": 1.0, "fragments": 0.0}
    last = {**first, "weights": 4.0, "device": 2.0, "fragments": 1.0}
    row = {**ROW, "peak_bytes": 5, "most_weights_bytes": 4, "reserved_bytes": 6}
    assert list(beside(predicted(first, last), MeasuredStep(None, {}, 1, row))) == [
        "memory: predicted 4 bytes, measured 5 bytes: -20.0 %",
        "  weights: predicted 4 bytes, measured 4 bytes: +0.0 %",
    ]


def test_the_steps_before_and_the_warm_up_do_not_count() -> None:
    """A median with slow first steps, or with those of the layout before a continuation; another stage's memory."""
    plan = plan_of(2, "parallel.pp=2")
    steps, seconds = list(range(1, 31)), [31.0 - step for step in range(1, 31)]
    rows = [row for step in (10, 20, 25, 30) for row in (slow(step, 0), slow(step, 1))]
    memory = {0: {**ROW, "peak_bytes": 7}, 1: {**ROW, "peak_bytes": 8}, 2: {**ROW, "peak_bytes": 99}}
    found = measured_step(steps, seconds, rows, memory, plan, first_step=10)
    assert found.step_s == 8.0, "of the steps 16 to 30"
    assert (found.stage, found.memory) == (1, memory[1]), "rank 2 is of an earlier layout"
    assert found.parts_s["forward_s"] == pytest.approx(8.0 * of_rank(30, 5, 1, 1.2)["forward_s"] / STEP_S)
    assert sum(found.parts_s.values()) == pytest.approx(8.0)
    assert measured_step([1.0], [3.0], [], {}, plan).step_s == 3.0
    assert measured_step([1.0, math.inf], [3.0, 3.0], [], {}, plan).step_s == 3.0, "a damaged number of a step"
    assert measured_step([1.0], [3.0], [{**slow(1, rank), "steps": 0} for rank in (0, 1)], {}, plan).parts_s == {}
    assert measured_step([], [], [], {}, plan).step_s is None


def slow(step: int, rank: int) -> dict[str, float]:
    """A row of ranks.csv: rank 1 computes longest."""
    return of_rank(step, 10 if step < 25 else 5, rank, 1.0 + 0.2 * rank)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step_s": "fast"}, "step_s: given 'fast'; must be a number"),
        ({"step_s": -1.0}, "step_s: must be above 0"),
        ({"step_s": 5e-324}, "step_s: must be above 0"),
        ({"tokens_per_s": [3]}, "tokens_per_s: given '[3]'; must be a number"),
        ({"band_s": [1, 10**400]}, "band_s: given [1, 1000"),  # an integer that no float holds
        ({"parts": PARTS | {"host_s": 10**400}}, "parts: host_s: given 1000"),
        ({"band_s": [1]}, "band_s: given [1]; must be two numbers"),
        ({"band_s": [2, 1]}, "band_s: given [2, 1]; must be two numbers"),
        ({"band_bytes": [[1, None]]}, "band_bytes 0: given [1, None]; must be two numbers"),
        ({"parts": []}, "parts: given []; must be an object"),
        ({"parts": PARTS | {"host_s": "x"}}, "parts: host_s: given x; must be a number, at least 0"),
        ({"parts": PARTS | {"data_s": "x"}}, "parts: data_s: given x; must be a number, at least 0"),
        ({"memory_bytes": []}, "memory_bytes, band_bytes: must be lists of 1 stage, as the plan has"),
        ({"memory_bytes": [{}]}, "memory_bytes 0: weights: given None; must be a number"),
        ({"peak": [3]}, "peak: not a JSON object"),
        ({"peak": {"stage": 0, "at": 7}}, "peak: at: given '7'; must be a text"),
        ({"peak": {"stage": 0, "at": "step"}}, "peak: has no said"),
        ({"memory_bytes": [3]}, "memory_bytes: given '[3]'; must be a list of objects"),
    ],
)
def test_what_is_no_prediction_is_said(change: dict[str, Any], problem: str) -> None:
    """A traceback of a report, in the middle of a table."""
    whole = {**predicted({**STAGE, "device": 0.0, "fragments": 0.0}), "cluster": "laptop"}
    whole["memory_bytes"][0]["total"] = 3.0
    assert problem_of(whole, 1) == ""
    earlier = {name: part for name, part in whole["parts"].items() if name != "data_s"}
    assert problem_of({**whole, "parts": earlier}, 1) == "", "versions without this part"
    assert problem_of({**whole, **change}, 1).startswith(problem)
    assert problem_of({}, 1).startswith("has no cluster, no step_s")


@pytest.mark.slow
def test_a_run_that_goes_on_has_a_prediction_of_its_own_plan_or_none(tmp_path: Path, forker: Forker) -> None:
    """The memory of one layout beside the prediction of another; a median over both."""
    make_project(tmp_path)
    words, found = ["run.cluster=laptop"], []
    for steps in (4, 6, 8):
        keys = (f"train.num_steps={steps}", "optimizer.decay_steps=20", *words)
        run = open_run(forker.train(tmp_path, "one", 1, *keys, resume=steps > 4).path)
        found.append((run.first_step, run.prediction is not None))
        words = ["run.cluster=laptop"] if steps == 4 else ["run.cluster=auto"]
    assert found == [(0, True), (4, True), (6, False)]
