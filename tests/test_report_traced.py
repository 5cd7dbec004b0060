"""In: profiles written by hand. Out: a recorded step as boxes; without a usable profile the reason, and means.
Does not record a profile: test_profile_runs does."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported import make_run, plan_of
from test_report_profile import Made, block, write

from codescent.cost.doing import Doing
from codescent.report.content import Timeline
from codescent.report.sections import report, timelines
from codescent.report.summary import summaries
from codescent.report.traced import traced
from codescent.results import open_run
from codescent.trace.ranks import file_of, folder_of

WORDS = ("parallel.pp=2",)


def two_stages(rank: int) -> Made:
    begin = 10.0 * rank
    events = [
        block("load 0", begin, begin + 1),
        block("forward 0", begin + 2, begin + 30),
        block("waiting", begin + 2, begin + 10),
        block("backward 0", 50, 70),
        block("aten::mm", 51, 60, "cpu_op"),
        block("my own range", 50, 60),
        block("step", 90, 95),
    ]
    return events, []


def test_a_recorded_step_takes_the_place_of_the_means(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, *WORDS)
    write(run.path, two_stages, 2)
    walk, why = traced(run.path, plan_of(2, *WORDS))
    assert why == ""
    assert walk is not None
    assert walk.title == "recorded, step 5", "of two steps the later one is taken"
    assert walk.step_s == pytest.approx(0.1)
    found = [(box.rank, box.kind, box.start_s, box.length_s, box.number) for box in walk.boxes if box.kind != "load"]
    for rank in (0, 1):
        begin = 0.01 * rank
        assert [box for box in found if box[0] == rank] == [
            (rank, "forward", pytest.approx(begin + 0.010), pytest.approx(0.020), 0),
            (rank, Doing.MESSAGE, pytest.approx(begin + 0.002), pytest.approx(0.008), None),
            (rank, "backward", pytest.approx(0.050), pytest.approx(0.020), 0),
            (rank, "step", pytest.approx(0.090), pytest.approx(0.005), None),
        ]
    (forward, waits) = [box.what for box in walk.boxes if box.rank == 0 and "forward" in box.what]
    assert forward.startswith("rank 0: forward 0, 10.0 ms to 30.0 ms (20.0 ms). Sends: send over pp[0,1]")
    assert waits.startswith("rank 0: message in forward 0, 2.00 ms to 10.0 ms")
    shown = [item for item in timelines(summaries([open_run(run.path)])) if isinstance(item, Timeline)]
    assert [walk.title for walk in shown[0].walks] == ["computed from the Plan", "recorded, step 5"]


def test_a_profile_that_cannot_be_used_is_named_and_the_means_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, *WORDS)
    plan = plan_of(2, *WORDS)
    assert traced(run.path, plan) == (None, "")
    write(run.path, two_stages, 2, device="cuda")
    assert "of CUDA devices" in traced(run.path, plan)[1]
    write(run.path, two_stages, 2)
    file = file_of(folder_of(run.path, 1), 1)
    file.write_bytes(file.read_bytes()[:-40])
    assert "Its profile cannot be read" in traced(run.path, plan)[1]
    (section,) = [section for section in report([open_run(run.path)]).sections if section.name == "timeline"]
    (timeline,) = section.items
    assert isinstance(timeline, Timeline)
    assert timeline.walks[-1].title == "measured"
    assert "Its profile cannot be read" in timeline.caption
    file.write_bytes(b"x" * 9_000_000)
    assert "too large for a page" in traced(run.path, plan)[1]
    file.unlink()
    assert traced(run.path, plan) == (None, "")
