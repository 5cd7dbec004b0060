"""In: run folders of real runs, and rows of numbers. Out: what results/ reads from them: state, keys, parts, intervals.
Does not check how long anything takes."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from forker import Forker
from reported import make_run, of_rank
from runs import make_project

from codescent.base.errors import UserError
from codescent.cost.bubble import bubble_s
from codescent.record import RunFolder
from codescent.record.ranks import write
from codescent.results import (
    PARTS,
    State,
    bootstrap,
    default_warmup,
    differing,
    median_of_many,
    open_run,
    open_runs,
    parts_of_ranks,
    rate,
    spread,
    stopped_by_signals,
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    make_project(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(project: Path, forker: Forker) -> RunFolder:
    """A run of six steps on a pipeline of two stages, with rows of ranks.csv at the steps 2, 4 and 6."""
    words = ("parallel.pp=2", "train.microbatch_size=2", "train.num_steps=6", "train.eval_every=3", "log.every=2")
    return forker.train(project, "pipeline", 2, *words)


def test_a_run_is_read(pipeline: RunFolder) -> None:
    run = open_run(pipeline.path)
    assert (run.name, run.state, run.why, run.num_ranks) == ("pipeline", State.DONE, "", 2)
    assert run.keys["train.num_steps"] == 6
    assert run.plan is not None
    assert run.plan.mesh.pp == 2
    assert list(run.columns["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(np.isfinite(run.columns["val_loss"])) == [False, False, True] * 2
    assert len(run.after(2, "step_s")) == 4


def test_the_parts_of_a_pipeline_have_a_bubble_and_sum_to_the_step(pipeline: RunFolder) -> None:
    run = open_run(pipeline.path)
    found = parts_of_ranks(run, warmup=2)
    assert [(parts.rank, parts.steps) for parts in found] == [(0, 4), (1, 4)]
    assert parts_of_ranks(run, warmup=1) == found, "a row about a step of the warm-up is left out whole"
    assert parts_of_ranks(run, warmup=6) == []
    assert run.plan is not None
    stages = [{"forward_s": parts.forward_s, "backward_s": parts.backward_s} for parts in found]
    for parts, bubble in zip(found, bubble_s(run.plan.schedule, stages), strict=True):
        assert sum(getattr(parts, name) for name in PARTS) == pytest.approx(parts.step_s, rel=0.01)
        assert parts.bubble_s == pytest.approx(min(bubble, parts.exposed_comm_s))
    assert max(parts.bubble_s for parts in found) > 0, "a stage that is much slower than the other does not wait"


def test_states_are_those_of_the_last_event(project: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", '[run]\nname = "run"\n', {})

    def state() -> tuple[State, str]:
        run = open_run(folder.path)
        return run.state, run.why

    assert state() == (State.UNFINISHED, "")
    folder.event("start", step=0)
    assert state() == (State.UNFINISHED, "")
    folder.event("stop", step=3)
    assert state() == (State.STOPPED, "")
    folder.event("resume", step=3)
    folder.event("error", problems=["the disk is full", "and slow"])
    assert state() == (State.FAILED, "the disk is full; and slow")
    folder.event("resume", step=3)
    folder.event("end", step=9)
    folder.event("logger_failed", logger="a:b", call="event", problem="", given_up=True)
    assert state() == (State.DONE, "")
    assert open_run(folder.path).columns["step"].size == 0


def test_what_all_commands_ask_of_a_run(tmp_path: Path) -> None:
    """Warm-up, hosts, threads beside cores; the peak of memory, which may be lower after a continuation."""
    facts = {"cores": 2, "num_threads": 2}
    folder = make_run(tmp_path / "run", 3, "parallel.dp_replicate=3", "train.global_batch_size=12", environment=facts)
    last = [of_rank(60, 20, rank, 1.0) | {"peak_memory_bytes": 2**20 * (rank + 1)} for rank in range(3)]
    write(folder.path, last)
    run = open_run(folder.path)
    assert (run.steps, run.hosts, run.crowd) == (40, ["node0", "node0", "node1"], (4, 2))
    assert run.peak_memory_bytes == [2**30 + rank * 2**20 for rank in range(3)]
    assert default_warmup([run]) == 5
    long = open_run(make_run(tmp_path / "long", steps=240, environment={"device": "cuda"}).path)
    assert (default_warmup([long]), default_warmup([long, run]), default_warmup([])) == (24, 5, 5)
    assert long.crowd is None
    (folder.path / "ranks.csv").unlink()
    (folder.path / "environment.json").unlink()
    older = open_run(folder.path)
    assert (older.peak_memory_bytes, older.hosts, older.crowd) == ([2**30], ["", "", ""], None)


def test_a_row_of_ranks_counts_as_many_times_as_it_has_steps(tmp_path: Path) -> None:
    """One step at twice the speed, after rows of 40 steps: (40 x 0.06 + 0.03) / 41 s of passes."""
    folder = make_run(tmp_path / "run", 1)
    write(folder.path, [of_rank(41, 1, 0, 0.5)])
    (parts,) = parts_of_ranks(open_run(folder.path))
    assert (parts.steps, parts.compute_s) == (41, pytest.approx((40 * 0.06 + 0.03) / 41))


def test_a_plan_whose_lists_cannot_be_walked_is_named(pipeline: RunFolder, tmp_path: Path) -> None:
    plan = json.loads((pipeline.path / "plan.json").read_text())
    whole = plan["schedule"]["programs"][0]
    for verb in ("forward", "send_activation"):
        plan["schedule"]["programs"][0] = [at for at in whole if at["verb"] != verb]
        folder = RunFolder.create(tmp_path / verb, "", plan)
        with pytest.raises(UserError, match=r"plan\.json: not a plan"):
            _ = open_run(folder.path).plan


def test_folders_that_are_no_runs_are_named_together(pipeline: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        open_runs([tmp_path, pipeline.path, tmp_path / "nothing"])
    assert len(error.value.problems) == 2
    assert len(open_runs([pipeline.path, pipeline.path / ".." / "pipeline"])) == 1


def test_keys_that_differ(tmp_path: Path) -> None:
    one, two = (
        '[run]\nname = "a"\n[train]\nnum_steps = 3\n',
        '[run]\nname = "b"\n[train]\nnum_steps = 4\nz_loss = 0.1\n',
    )
    runs = [open_run(RunFolder.create(tmp_path / str(n), text, {}).path) for n, text in enumerate((one, two))]
    assert differing(runs) == {"train.num_steps": [3, 4], "train.z_loss": [None, 0.1]}
    assert differing(runs[:1]) == {}


def test_the_bootstrap_has_the_interval_of_the_normal_mean() -> None:
    """For n values with deviation s the 95 % interval of the mean is 2 x 1.96 s / sqrt(n) wide."""
    values = np.random.default_rng(1).normal(10, 2, 400)
    found = bootstrap(values, statistic=lambda drawn: drawn.mean(axis=-1))
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert found == bootstrap(values, statistic=lambda drawn: drawn.mean(axis=-1)), (
        "the same numbers, the same interval"
    )
    assert found.contains(10)
    assert not found.contains(11)


def test_a_ratio_of_two_samples() -> None:
    found = bootstrap([2.0, 2.0, 2.0], [1.0, 1.0], statistic=lambda a, b: np.median(a, axis=-1) / np.median(b, axis=-1))
    assert found == (2.0, 2.0, 2.0)


def test_two_samples_are_drawn_by_themselves() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = bootstrap(values, values, statistic=lambda a, b: np.median(a, axis=-1) / np.median(b, axis=-1))
    assert found.value == 1
    assert found.low < 0.6 < 1.6 < found.high


def test_a_rate_is_the_median_work_over_the_median_time() -> None:
    """The median of 10 / 1 and 10 / 3 is 6.7; what is done in the median time of 2 s is 5 a second."""
    found = rate([10.0, 10.0], [1.0, 3.0])
    assert found.value == 5
    assert (found.low, found.high) == (pytest.approx(10 / 3), pytest.approx(10))
    assert rate([10.0, 30.0], [1.0, 3.0]) == (10, 10, 10), "work and time of a repeat are drawn together"


def test_the_interval_of_many_values_is_that_of_the_bootstrap() -> None:
    values = np.random.default_rng(2).gamma(2.0, 1.0, 400)
    found, drawn = median_of_many(values), bootstrap(values)
    assert found.value == drawn.value
    assert found.high - found.low == pytest.approx(drawn.high - drawn.low, rel=0.2)
    assert median_of_many(values[:20]) == bootstrap(values[:20])


def test_one_value_has_no_interval() -> None:
    found = bootstrap([3.0])
    assert found.value == 3.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.contains(1e9)
    assert spread([3.0]) == 0.0
    assert spread([1.0, 2.0, 4.0]) == 1.5
    with pytest.raises(ValueError, match="without numbers"):
        bootstrap([])


def test_a_hangup_that_nohup_ignores_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SystemExit, match="143"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stopped_by_signals(), pytest.raises(SystemExit, match="129"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
