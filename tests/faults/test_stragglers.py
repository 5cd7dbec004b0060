"""In: ranks whose steps take different times. Out: their launcher names the slow one, and the part that is slow.
The small ranks write their times by hand; the run with a slow rank has a processor quota, and is slow."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hanging import RANK, events, until
from runs import make_project, start, started_by
from test_launch_local import Launch

from codescent.base.page import Page, Took
from codescent.launch.stragglers import LEAST_S, LEAST_STEPS, Stragglers
from codescent.record import RunFolder

pytestmark = pytest.mark.timeout(180)
SETUP = """
from codescent.launch import stragglers
stragglers.LEAST_S = 0.2
local.LOOK_EVERY_S = 0.05
"""
STEPS = """
READING, COMPUTING = {parts}[rank]
for step in range(4, {steps}):
    own.took(READING, COMPUTING)
    own.at(step + 0.5, STAGES[rank], "forward")
    time.sleep(0.05)
    if step == 20:
        ready(slowest=own.pages.slowest)
wait_for("go")
own.at(float("inf"))
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    RunFolder.create(tmp_path / "run", "", {})
    started: list[Launch] = []

    def start(program: str) -> Launch:
        started.append(Launch(tmp_path, 3, RANK + program, SETUP))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize(
    ("parts", "part", "factor"),
    [
        ("[(0.0, 0.1), (0.0, 0.4), (0.0, 0.1)]", "arithmetic", 4.0),
        ("[(0.01, 0.1), (0.21, 0.11), (0.01, 0.1)]", "reading", 2.91),
    ],
)
def test_f17_a_slow_rank_is_named_with_its_part(
    launch: Callable[[str], Launch], parts: str, part: str, factor: float
) -> None:
    """Fault: nobody names the rank that slows all others, within 20 steps; or the wrong part is blamed."""
    run = launch("STAGES = [0, 0, 0]" + STEPS.format(parts=parts, steps=24))
    line = until(run, "codescent: rank 1 of 3 (pid ").splitlines()[-1]
    assert re.search(rf"is \d\.\d times slower than the others: its {part} takes 0\.\d+ s a step, the others", line)
    run.let("go")
    code, _, err = run.end()
    assert (code, err) == (0, ""), "it is named once"
    (event,) = events(run, "straggler")
    assert (event["rank"], event["part"], event["factor"]) == (1, part, factor)
    assert event["step"] <= 24
    assert run.read("rank-0")["slowest"] == f"rank 1 {factor:.1f}x slower ({part})", "step 20 shows it"


def test_ranks_of_other_stages_are_no_measure(launch: Callable[[str], Launch]) -> None:
    """Fault: a pipeline whose stages differ, as they must, has a straggler."""
    run = launch("STAGES = [0, 1, 2]" + STEPS.format(parts="[(0, 0.1), (0, 0.4), (0, 0.1)]", steps=24))
    run.let("go")
    assert run.end() == (0, "", "")
    assert events(run, "straggler") == []


def test_a_pause_of_one_window_is_no_straggler_and_one_that_recovers_is_none_any_more() -> None:
    """Fault: any pause of the machine is told; or the step lines name a rank for ever that is quick again."""
    found, took, now_s, told = Stragglers(), {0: Took(), 1: Took()}, 0.0, []
    for slow in (1, 1, 3, 1, 3, 3, 3, 1, 1, 3, 3):  # times as long as rank 0 takes, in each window
        for rank, seconds in ((0, 0.5), (1, 0.5 * slow)):
            steps = took[rank].steps + LEAST_STEPS
            took[rank] = Took(steps, 0.0, took[rank].computing_s + LEAST_STEPS * seconds)
        now_s += LEAST_S
        new = found.look({rank: Page(took=one) for rank, one in took.items()}, now_s)
        told.append((new is not None, found.current is not None))
    quiet, begins, goes_on = (False, False), (True, True), (False, True)
    assert told == [quiet, quiet, quiet, quiet, quiet, begins, goes_on, quiet, quiet, quiet, begins]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="quotas are those of Linux's cgroups")
def test_f17_a_rank_with_a_fifth_of_a_processor(tmp_path: Path) -> None:
    """Fault: in a real run the parts on the pages do not show which rank is slow: waiting counts as work."""
    group = Path("/sys/fs/cgroup/cpu") / f"codescent-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("20000")
    except OSError as error:
        pytest.skip(f"no cpu cgroup of version 1 can be made here: {error}")
    try:
        make_project(tmp_path)
        sizes = ["model.hidden_dim=64", "model.seq_len=128", "train.global_batch_size=16"]
        words = ["run.toml", "run.name=a", "parallel.ranks=2", "train.num_steps=100000", "train.eval_every=0", *sizes]
        run = start(tmp_path, "train", *words, "log.every=5")
        metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
        while not metrics.exists() or metrics.stat().st_size < 5_000:
            assert run.poll() is None
            time.sleep(0.1)
        (group / "cgroup.procs").write_text(str(started_by(run.pid)[1].pid))
        events = tmp_path / "runs" / "a" / "events.jsonl"
        while '"straggler"' not in events.read_text():
            assert run.poll() is None
            time.sleep(0.1)
        run.terminate()
        _, err = run.communicate(timeout=100)
    finally:
        group.rmdir()
    (event, *_) = [one for one in RunFolder.open(events.parent).read_events() if one["kind"] == "straggler"]
    assert (event["rank"], event["part"]) == (1, "arithmetic"), err
    assert re.search(r"codescent: rank 1 of 2 \(pid \d+ on .*\) is \d+\.\d times slower than the others", err)
