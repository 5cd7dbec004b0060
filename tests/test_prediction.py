"""In: runs with run.cluster. Out: prediction.json, and lines of what was predicted and measured.
Does not check a price: test_price.py does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import called, codescent, make_project

from codescent.planner.prediction import beside


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
    assert "\nmemory: predicted " in done.stdout
    weights = next(line for line in done.stdout.splitlines() if line.startswith("  weights: predicted "))
    assert weights.endswith(": +0.0 %")


@pytest.mark.parametrize("words", [(), ("parallel.ranks=2",)])
def test_a_cluster_that_is_not_there_is_said_before_a_run_begins(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A run of days without the prediction that was asked for."""
    make_project(tmp_path)
    done = called(tmp_path, "train", "run.toml", "run.cluster=h100", "run.name=one", *words)
    assert done.returncode == 2
    assert 'error: run.cluster: cluster "h100": there is no such file' in done.stderr
    assert not (tmp_path / "runs/one").exists()


def test_the_first_steps_do_not_count_and_parts_without_a_number_are_left_out() -> None:
    """A median of two slow first steps; a division by nothing."""
    stage = {"weights": 1.0, "gradients": 0.0, "optimizer": 2.0, "total": 4.0}
    row = {"peak_bytes": 2, "weights_bytes": 1, "gradients_bytes": 0, "optimizer_bytes": None, "reserved_bytes": None}
    lines = list(beside({"step_s": 1.0, "memory_bytes": [stage]}, [9.0, 9.0, 9.0, 2.0, 2.0], {0: row}))
    assert lines == [
        "step: predicted 1.00 s, measured 2.00 s: -50.0 %",
        "memory: predicted 4 bytes, measured 2 bytes: +100 %",
        "  weights: predicted 1 bytes, measured 1 bytes: +0.0 %",
    ]
    assert list(beside({"step_s": 1.0, "memory_bytes": [stage]}, [], {})) == []


def test_on_a_device_the_peak_of_tensors_is_compared_with_tensors_of_the_same_stage() -> None:
    """A context that only the prediction has; the fullest stage of the one beside another one of the other."""
    first = {"weights": 8.0, "gradients": 0.0, "optimizer": 0.0, "total": 9.0, "device": 1.0, "fragments": 0.0}
    last = {**first, "weights": 4.0, "total": 7.0, "device": 2.0, "fragments": 1.0}
    row = {"peak_bytes": 5, "weights_bytes": 4, "gradients_bytes": 0, "optimizer_bytes": 0, "reserved_bytes": 6}
    lines = list(beside({"step_s": 1.0, "memory_bytes": [first, last]}, [], {0: {**row, "peak_bytes": 3}, 1: row}))
    assert lines == [
        "memory: predicted 4 bytes, measured 5 bytes: -20.0 %",
        "  weights: predicted 4 bytes, measured 4 bytes: +0.0 %",
    ]
