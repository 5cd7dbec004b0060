"""In: measured seconds; a run that chooses its threads. Out: the number of threads, what is said, when it looks again.
Does not compare times: benchmarks/threads.py does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from runs import called, make_project

from codescent.base.cores import OUR_THREADS
from codescent.launch.group import Group
from codescent.launch.spin import with_short_spin
from codescent.record import RunFolder
from codescent.train import pace, threads, world
from codescent.train.pace import SlowSteps
from codescent.train.threads import (
    busy_said,
    candidates,
    fastest,
    of_slowest_rank,
    said,
    used_by_others,
)


@pytest.mark.parametrize(
    ("most", "tried"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (16, [1, 8, 12, 15, 16])]
)
def test_numbers_that_are_tried(most: int, tried: list[int]) -> None:
    assert candidates(most) == tried


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 10.0, 2: 5.5}, 2),  # alone on the machine
        ({1: 10.0, 2: 11.0}, 2),  # perhaps noise
        ({1: 10.0, 2: 54.0}, 1),  # beside another program: the figures
        ({1: 16.0, 8: 2.1, 12: 1.5, 15: 1.2, 16: 4.0}, 15),
    ],
)
def test_the_largest_number_that_is_not_clearly_slower(seconds: dict[int, float], chosen: int) -> None:
    assert fastest(seconds) == chosen


def test_ranks_choose_by_the_slowest_of_those_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = [{"1": 9.0, "2": 5.0}, {"1": 9.5, "2": 40.0}, {"1": 9.0, "4": 1.0}]
    monkeypatch.setattr(threads, "together", lambda error, mine: everyone)
    assert of_slowest_rank({1: 9.0, 2: 5.0}) == {1: 9.5, 2: 40.0}
    assert of_slowest_rank({1: 9.0, 4: 1.0}) == {1: 9.0, 4: 1.0}
    assert of_slowest_rank({}) == {}


def test_what_is_said_at_the_start() -> None:
    trial = {"1": 0.01, "2": 0.054}
    (line,) = said({"choice": 1, "most": 2, "trial": trial})
    assert line.startswith("1 thread per rank: the same work takes 5.4 times as long with 2")
    assert "train.num_threads" in line
    assert said({"choice": 2, "most": 2, "trial": {"1": 0.01, "2": 0.005}}) == []
    assert said({"choice": 1, "most": 2, "trial": "as at the beginning"}) == []
    assert said({"choice": 2, "most": 2, "trial": {}}) == []


def test_other_programs_are_said_if_all_threads_are_used() -> None:
    trial: dict[str, Any] = {"choice": 2, "most": 2, "trial": {"1": 0.01, "2": 0.005}}
    (line,) = said({**trial, "others": {"cores": 2, "used": 0.94, "wanted": 2}})
    assert line.startswith("other programs use about 0.9 of 2 cores; 2 threads per rank were still the fastest")
    assert said({**trial, "others": {"cores": 2, "used": 0.3, "wanted": 2}}) == []
    assert said({**trial, "others": {"cores": 8, "used": 5.5, "wanted": 2}}) == []
    (line,) = said({**trial, "choice": 1, "others": {"cores": 2, "used": 1.0, "wanted": 2}})
    assert line.startswith("1 thread per rank: the same work takes")


def test_what_others_use_is_without_the_ranks_on_the_same_cores() -> None:
    shared, own = "one [0, 1, 2, 3]", "two [0, 1]"
    ranks = [(2, (shared, 4, 3.5, 1.5)), (2, (own, 2, 2.0, 1.9)), (2, (shared, 4, 3.6, 1.3))]
    assert used_by_others(ranks) == {"cores": 4, "used": 0.8, "wanted": 4}
    assert used_by_others(ranks[1:2]) == {"cores": 2, "used": 0.1, "wanted": 2}


def test_a_load_is_that_of_the_cores_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick, clock, mine = os.sysconf("SC_CLK_TCK"), iter((10.0, 12.0)), iter((1.0, 2.5))
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2})
    monkeypatch.setattr(threads.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(threads.time, "process_time", lambda: next(mine))

    def count(busy_s: int) -> None:
        """Seconds of user, nice, system, idle, iowait, irq, softirq, steal; guest is a part of user."""
        cores = {
            0: [7 * busy_s, 0, 0, 5],
            1: [busy_s, busy_s, 0, 40, 9 * busy_s],
            2: [0, 0, busy_s, 3 * busy_s, 0, 0, 0, 0, busy_s],
        }
        rows = (f"cpu{core} {' '.join(str(int(s * tick)) for s in (*row, *[0] * 10))}" for core, row in cores.items())
        (tmp_path / "stat").write_text("\n".join(["cpu  9 9 9 9", *rows, "intr 5 0", ""]))

    count(0)
    load = threads.Load()
    count(1)
    name, cores, used, own = load.end()
    assert name.endswith(" [1, 2]")
    assert (cores, used, own) == (2, 1.5, 0.75)


def test_ranks_try_threads_together_and_keep_them_on_unequal_machines(tmp_path: Path, forker: Forker) -> None:
    """Ranks 0 and 1 may use two threads, rank 2 three; on resume the ranks are on each other's machines."""
    make_project(tmp_path)
    first, second, third = forker.call("thread_ranks:chosen", tmp_path, 3, most=[2, 2, 3], kept={})
    assert first == second
    assert list(first["trial"]) == ["1", "2"]
    assert list(third["trial"]) == ["1", "2", "3"]
    for found in (first, third):
        assert found["choice"] == fastest({int(number): seconds for number, seconds in found["trial"].items()})
        assert found["by_most"] == {"2": first["choice"], "3": third["choice"]}
        assert 1 <= found["others"]["wanted"] <= 7
    kept = {"2": 1, "3": 2}
    resumed = forker.call("thread_ranks:chosen", tmp_path, 3, most=[3, 2, 4], kept={"threads": kept})
    assert [one["choice"] for one in resumed[:2]] == [2, 1]
    assert [one["trial"] for one in resumed[:2]] == ["as at the beginning"] * 2
    assert list(resumed[2]["trial"]) == ["1", "2", "3", "4"]
    assert resumed[0]["by_most"] == {**kept, "4": resumed[2]["choice"]}


def said_of(times: SlowSteps, seconds: float, count: int) -> list[str]:
    """Add windows of steps of `seconds`; returns what is said."""
    said = [times.add(seconds) for _ in range(count * pace.WINDOW)]
    return [sentence for sentence in said if sentence is not None]


def test_slow_steps_are_said_at_once_and_ever_more_rarely() -> None:
    times = SlowSteps()
    assert said_of(times, 0.1, 50) == said_of(times, 0.19, 50) == []
    (sentence,) = said_of(times, 0.5, 1)
    assert sentence.startswith("the last 10 steps took 5.0 times as long as the fastest 10: other programs may")
    assert said_of(times, 0.5, 1) == []
    assert 5 < len(said_of(times, 0.5, 1000)) <= 10


def test_one_slow_step_is_no_reason_to_say_so() -> None:
    times = SlowSteps()
    said_of(times, 0.1, 1)
    assert [times.add(seconds) for seconds in [60.0] + [0.1] * (pace.WINDOW - 1)] == [None] * pace.WINDOW


def test_numbers_that_the_user_gave_are_kept() -> None:
    assert world._given_threads({"OMP_NUM_THREADS": "3"}) == 3
    assert world._given_threads({"OMP_NUM_THREADS": "3", OUR_THREADS: "auto"}) is None
    assert world._given_threads({}) is None
    assert Group(1).environment(0, 1, {})[OUR_THREADS] == "auto"
    assert OUR_THREADS not in Group(1).environment(0, 1, {"OMP_NUM_THREADS": "7"})
    assert OUR_THREADS not in Group(1).environment(0, 1, {"OMP_NUM_THREADS": "7", OUR_THREADS: "auto"})


def test_waiting_threads_sleep_unless_the_user_says_how_they_wait() -> None:
    assert with_short_spin({})["GOMP_SPINCOUNT"] == "10000"
    assert with_short_spin({"GOMP_SPINCOUNT": "5"}) == {"GOMP_SPINCOUNT": "5"}
    assert with_short_spin({"OMP_WAIT_POLICY": "active"}) == {"OMP_WAIT_POLICY": "active"}


def test_a_run_records_what_it_tried_says_what_is_slow_and_keeps_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = make_project(tmp_path), torch.get_num_threads()
    path.write_text(path.read_text().replace("num_threads = 1\n", ""))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(world, "available_cores", lambda: 2)
    monkeypatch.setattr(pace, "SLOW", 0.0)  # so that the first window is slow
    words = ("run.toml", "run.name=tried", "log.sample_tokens=0", "train.eval_every=0")
    try:
        done = called(tmp_path, "train", *words, "train.num_steps=12", "optimizer.decay_steps=14")
        assert done.returncode == 0, done.stderr
        run = RunFolder.open(tmp_path / "runs" / "tried")
        found = run.read_environment()["threads"]
        assert set(found["trial"]) == {"1", "2"}
        assert found["most"] == 2
        assert found["choice"] == run.read_environment()["num_threads"] == torch.get_num_threads()
        (event,) = [event for event in run.read_events() if event["kind"] == "slow_steps"]
        assert event["step"] == pace.WINDOW
        assert event["advice"] in done.stdout.replace("\n", " ")
        resumed = called(tmp_path, "train", *words, "train.num_steps=14", "optimizer.decay_steps=14", "--resume")
        assert resumed.returncode == 0, resumed.stderr
        again = run.read_environment()["threads"]
        kept = {"choice": found["choice"], "most": 2, "trial": "as at the beginning", "by_most": {"2": found["choice"]}}
        assert again == kept
        for word in ("train.deterministic=true", "train.num_threads=2"):
            given = called(tmp_path, "train", "run.toml", f"run.name={word}", word, "train.num_steps=1")
            assert given.returncode == 0, given.stderr
            kept = RunFolder.open(tmp_path / "runs" / word).read_environment()["threads"]
            assert kept == {"choice": 2, "most": 2, "trial": {}, "by_most": {}}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        (None, ""),
        ({"cores": 2, "used": 0.4, "wanted": 2}, ""),
        ({"cores": 2, "used": 1.25, "wanted": 2}, " while other programs used 1.2 of 2 cores: too many for an MFU"),
        ({"cores": 8, "used": 1.25, "wanted": 2}, " while other programs used 1.2 of 8 cores"),
        ({"cores": 2, "used": 0.1, "wanted": 8}, ""),
    ],
)
def test_the_peak_is_said_with_what_other_programs_used(others: dict[str, float] | None, wanted: str) -> None:
    assert busy_said({"peak_others": others}) == wanted
    assert threads.is_slowed(others) == wanted.endswith("MFU")


def test_ranks_that_share_cores_do_not_blame_other_programs() -> None:
    chosen = {"choice": 1, "most": 1, "trial": {}, "others": {"cores": 2, "used": 0.0, "wanted": 8}}
    assert threads.said(chosen) == []
