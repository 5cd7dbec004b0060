"""In: schedules, names of files. Out: pictures and traces that hold every instruction, or one refusal and no file.
Does not judge beauty: people have looked at the pictures."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import matplotlib.image
import pytest
from disks import small_disk
from runs import called, make_project

from codescent.base.errors import UserError
from codescent.cost.simulate import Costs, simulate
from codescent.plan import Plan
from codescent.plan.pipeline import SCHEDULES, pipeline
from codescent.verbs import timeline
from codescent.verbs.timeline import COLOURS, write_timeline


def sizes(name: str) -> tuple[int, int, int]:
    return (4, 8, 2 if name == "interleaved" else 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_picture_has_a_row_for_each_stage_in_the_colours_of_its_verbs(name: str, tmp_path: Path) -> None:
    schedule = pipeline(name, *sizes(name))
    write_timeline(schedule, name, tmp_path / "a.PNG")
    pixels = (matplotlib.image.imread(tmp_path / "a.PNG", format="png")[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert 200 < height < width < 3000
    seen = {tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, 3).tolist()}
    spans = [span for span in simulate(schedule).timeline if span.end_s > span.start_s]
    for verb in {span.instruction.verb for span in spans}:
        assert tuple(int(COLOURS[verb][i : i + 2], 16) for i in (1, 3, 5)) in seen
    assert [path.name for path in tmp_path.iterdir()] == ["a.PNG"]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (8, 32), (4, 400)])
def test_a_picture_stays_of_a_size_that_can_be_opened(p: int, m: int, tmp_path: Path) -> None:
    write_timeline(pipeline("1f1b", p, m), "sizes", tmp_path / "a.png")
    height, width = matplotlib.image.imread(tmp_path / "a.png").shape[:2]
    assert 800 < width < 6000
    assert 200 < height < 1000


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_a_track_for_each_stage_and_every_instruction(name: str, tmp_path: Path) -> None:
    schedule = pipeline(name, *sizes(name))
    costs = Costs(latency_s=0.25, reduce_s=1.5)
    write_timeline(schedule, name, tmp_path / "a.json", costs)
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {stage: f"stage {stage}" for stage in range(4)}
    for stage, program in enumerate(schedule.programs):
        track = [event for event in events if event["ph"] in "Xi" and event["tid"] == stage]
        assert [event["name"] for event in track] == [str(at) for at in program]
        assert [event["cat"] for event in track] == [at.verb for at in program]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0 for event in slices)
    end_us = max(event["ts"] + event["dur"] for event in slices)
    assert end_us == pytest.approx(1000 * simulate(schedule, costs).makespan_s)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.pdf", "must end in .png or .svg (a picture) or .json"),
        ("a", "must end in .png or .svg (a picture) or .json"),
        ("absent/a.png", "there is no folder"),
        ("folder.json", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_planned(tmp_path: Path, name: str, words: str) -> None:
    make_project(tmp_path)
    (tmp_path / "folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = called(tmp_path, "plan", "run.toml", "data.tokenizer=char", "--timeline", name)
    assert done.returncode == 2
    assert not done.stdout
    assert [words in line for line in done.stderr.splitlines()] == [True]
    assert done.stderr.startswith(f"error: --timeline {name}: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_is_no_file_for_a_picture_is_refused_beside_the_problems_of_the_config(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = called(tmp_path, "plan", "run.toml", "train.num_step=3", "--timeline", "a.pdf")
    assert done.returncode == 2
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [" --timeline a.pdf", " command line"]


def test_only_a_timeline_is_replaced_by_a_timeline(tmp_path: Path) -> None:
    (make_project(tmp_path)).rename(tmp_path / "run.json")  # a config may have any name
    (tmp_path / "plan.json").write_text('{"format": 2}')
    (tmp_path / "full.svg").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe.svg")
    (tmp_path / "empty.json").touch()
    before = {path: path.lstat() for path in tmp_path.iterdir() if path.name != "empty.json"}
    for name, said in (
        ("run.json", "this file is not a timeline, and would be lost"),
        ("plan.json", "this file is not a timeline, and would be lost"),
        ("full.svg", "is a device or a pipe, not a file"),
        ("pipe.svg", "is a device or a pipe, not a file"),
    ):
        done = called(tmp_path, "plan", "run.json", "--timeline", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: --timeline {name}: {said}")
    for _ in range(2):
        assert called(tmp_path, "plan", "run.json", "--timeline", "empty.json").returncode == 0
    assert {path: path.lstat() for path in before} == before


def test_without_matplotlib_a_picture_is_refused_and_a_trace_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [problem.split(": ", 2)[1] for problem in timeline.refusals(tmp_path / "a.png")] == [
        "a picture needs matplotlib"
    ]
    assert not list(timeline.refusals(tmp_path / "a.json"))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8192) as disk:
        path = disk / "a.json"
        path.write_text(before := '{"traceEvents": []}')
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            write_timeline(pipeline("1f1b", 8, 32), "full", path)
        assert {file.name: file.read_text() for file in disk.iterdir()} == {"a.json": before}


def test_plan_draws_its_schedule_beside_what_it_prints(tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ("plan", "run.toml", "train.microbatch_size=2")
    done = called(tmp_path, *words, "--json", "--timeline", "a.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(json.loads(done.stdout))
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    drawn = [event["name"] for event in events if event["ph"] in "Xi"]
    assert drawn == [str(at) for at in plan.schedule.programs[0]]
    assert "backward 3" in drawn
    done = called(tmp_path, *words, "--timeline", "a.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout == called(tmp_path, *words).stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
