"""In: tiny models at several widths, a study of them. Out: activations grow with the width without mu-P, not with
it; the study's tables, files, exit codes and refusals.
Does not test layouts or learning rates (test_mup does)."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from runs import called, make_project

from codescent.config.load import load
from codescent.study.file import read_study
from codescent.study.shipped import find
from codescent.study.widths import PlaceSizes, judged, width_points
from codescent.train.coordinates import EMBEDDING, LOGITS

STUDY = """
[study]
name = "check"
config = "run.toml"
kind = "widths"
repeats = 1
steps = 6
baseline = {{ "model.hidden_dim" = 32 }}

[set]
optimizer.schedule = "constant"
optimizer.warmup_steps = 0
{more}

[axes]
"model.hidden_dim" = [{widths}]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, more: str = "", widths: str = "32, 128") -> None:
    (folder / "check.toml").write_text(STUDY.format(more=more, widths=widths))


@pytest.mark.parametrize(
    "more",
    [
        'model.kind = "gpt2"',
        'model.kind = "gpt2"\noptimizer.kind = "sgd"\noptimizer.learning_rate = 0.5\noptimizer.max_grad_norm = 0.0',
        'model.kind = "llama"\noptimizer.kind = "muon"\noptimizer.muon_adjust_lr_fn = "original"',
    ],
    ids=["gpt2, AdamW", "gpt2, SGD", "llama, Muon"],
)
def test_activations_grow_without_mup_alone(project: Path, more: str) -> None:
    """Catches: a role without its factor, logits or scores without theirs, a table that mixes both up."""
    write(project, more, "32, 256")
    done = called(project, "study", "check.toml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    power = {(one["place"], one["mup"]): one["power"] for one in found["places"]}
    assert [place for place, mup in power if mup] == [EMBEDDING, "block 1", "block 2", LOGITS]
    assert power[LOGITS if "muon" in more else "block 2", False] > 0.3
    assert max(power[place, True] for place in (EMBEDDING, "block 1", "block 2", LOGITS)) <= 0.2


def test_the_base_is_the_same_with_and_without(project: Path) -> None:
    """Catches: a measurement that changes the run, a base that is not the baseline; what the files have."""
    write(project, 'model.kind = "gpt2"')
    done = called(project, "study", "check.toml")
    assert done.returncode == 0, done.stderr
    assert "With mu-P no activation grows with the width" in done.stdout
    with (project / "study-runs" / "check" / "coordinates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 4 * 6  # widths, parametrizations, places, steps
    sizes = {
        mup: [row["mean_abs"] for row in rows if row["width"] == "32" and row["mup"] == mup]
        for mup in ("true", "false")
    }
    assert sizes["true"] == sizes["false"]
    assert (project / "study-runs" / "check" / "coordinates.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_ends_with_1_if_mup_does_not_hold(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a check that passes whatever it measures."""
    monkeypatch.setattr("codescent.study.widths.GROWS", -1.0)
    write(project, 'model.kind = "gpt2"')
    done = called(project, "study", "check.toml")
    assert done.returncode == 1
    assert "With mu-P activations grow with the width" in done.stdout


@pytest.mark.parametrize(
    ("more", "widths", "words", "said"),
    [
        ("", "32", (), "check: 1 width; needs an axis such as model.hidden_dim = [64, 128]"),
        ("", "64, 128", (), "check: baseline hidden_dim=32: is no point; must be one point, the base of mu-P"),
        ("parallel.ranks = 2", "32, 64", (), "activations are the same on every layout"),
        ("", "32, 64", ("--retry", "failed"), '--retry: kind = "widths" measures its points in this process'),
        ('optimizer.kind = "adam"', "32, 64", (), "optimizer.weight_decay = 0.1: adam adds it to gradients"),
    ],
)
def test_a_wrong_study_is_refused_before_it_measures(
    project: Path, more: str, widths: str, words: tuple[str, ...], said: str
) -> None:
    write(project, more, widths)
    done = called(project, "study", "check.toml", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "study-runs").exists()


def test_a_size_that_is_no_number_is_said() -> None:
    """Catches: NaN that compares as small."""
    places = [PlaceSizes("block 1", mup, {64: 1.0, 128: math.nan if mup else 4.0}) for mup in (False, True)]
    assert [one.grows for one in places] == [True, True]
    assert places[0].power == pytest.approx(2.0)
    assert judged(places) == (
        "Without mu-P activations grow with the width: block 1 has the highest power, 2.00. "
        "With mu-P activations grow with the width: block 1 is no number at some width."
    )


def test_the_shipped_study_has_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = read_study(find(Path("mup")))
    points = width_points(study, study.study.baseline)
    assert [(one.width, one.mup) for one in points] == [(w, mup) for w in (64, 128, 256, 512) for mup in (False, True)]
    assert {one.config.model.mup_base_dim for one in points} == {None, 64}
    assert {one.config.model.mup_base_head_dim for one in points} == {None, 16}
    assert load("default").config.model.mup_base_dim is None
