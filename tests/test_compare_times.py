"""In: seconds of steps with known noise, drift and planted delays. Out: what compare says of them, and how often.
Does not check how long anything takes: no step is taken here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from codescent.record.ranks import PARTS as COLUMNS
from codescent.results import student
from codescent.results.compare import Times, Way, of_rows
from codescent.results.statistics import Values, bootstrap
from codescent.results.typical import StepSeconds

STEP_S = {"data_s": 0.001, "forward_s": 0.03, "backward_s": 0.06, "exposed_comm_s": 0.004, "optimizer_s": 0.005}
"""A step of 0.1 s."""


def noise(generator: np.random.Generator, steps: int, correlation: float, share: float = 0.05) -> Values:
    """An AR(1) process around 1 with this standard deviation and correlation of consecutive values."""
    found = np.empty(steps)
    value = generator.standard_normal()
    for step in range(steps):
        found[step] = value
        value = correlation * value + math.sqrt(1 - correlation**2) * generator.standard_normal()
    return np.asarray(1 + share * found)


def rows(factors: Values, begin: float = 0.0, ranks: int = 1, **extra: float) -> StepSeconds:
    """Steps of STEP_S times the factors, on each rank, and `extra` seconds of some parts on the last rank."""
    seconds = np.array([STEP_S.get(name, 0.0) for name in COLUMNS]) * factors[:, None, None]
    seconds = np.repeat(seconds, ranks, axis=1)
    for name, more in extra.items():
        seconds[:, -1, COLUMNS.index(name)] += more
        seconds[:, :-1, COLUMNS.index("exposed_comm_s")] += more  # the others wait for it
    at = begin + np.cumsum(seconds.sum(axis=2).mean(axis=1))
    found = StepSeconds(None, begin, COLUMNS, seconds, at, 0, every_rank=ranks > 1)
    return StepSeconds(None, begin, COLUMNS, seconds, at, int(np.argmin(found.waiting)), every_rank=ranks > 1)


def compared(a: Sequence[StepSeconds], b: Sequence[StepSeconds]) -> Times:
    return of_rows(a, b, warmup=0, scale=1.0)


def in_turns(generator: np.random.Generator, runs: int, drift: Values, ranks: int = 1, **extra: float) -> Times:
    """Runs of 60 steps taken in turns, while the machine becomes slower and faster: B has the extra seconds."""
    sides: tuple[list[StepSeconds], list[StepSeconds]] = ([], [])
    for number in range(2 * runs):
        factors = noise(generator, 60, 0.5) * drift[number]
        b = number % 2 == 1
        sides[b].append(rows(factors, begin=1000.0 * number, ranks=ranks, **(extra if b else {})))
    return compared(*sides)


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.3027), (0.95, 4, 2.7764), (0.95, 9, 2.2622), (0.95, 30, 2.0423), (0.99, 5, 4.0321)],
)
def test_quantiles_are_those_of_students_table(level: float, freedom: int, expected: float) -> None:
    assert student.quantile(level, freedom) == pytest.approx(expected, rel=1e-4)


def test_intervals_of_independent_samples_hold_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(2000):
        a, b = generator.normal(0, 1, 4), generator.normal(0, 3, 7)
        held += student.difference(a, b).contains(0.0)
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 0.9])
def test_blocks_of_correlated_steps_show_no_difference_where_there_is_none(correlation: float) -> None:
    """300 steps of one run a side. Intervals by the bootstrap of single steps are far too narrow."""
    generator = np.random.default_rng(11)
    shown = single = 0
    for trial in range(150):
        a, b = noise(generator, 300, correlation), noise(generator, 300, correlation)
        found = compared([rows(a)], [rows(b, begin=1e6)])
        assert found.way is Way.BLOCKS
        shown += not found.step.share.contains(0.0)
        if correlation == 0.9 and trial < 12:
            ratio = bootstrap(a, b, statistic=lambda x, y: np.median(y, axis=-1) / np.median(x, axis=-1))
            single += not ratio.contains(1.0)
    assert shown / 150 <= 0.1
    if correlation == 0.9:
        assert single >= 4


def test_runs_taken_in_turns_cancel_what_the_machine_does_slowly() -> None:
    """The machine becomes 40 % slower; pairs of neighbours see 2 % of it. A delay of 10 % is found."""
    generator = np.random.default_rng(5)
    drift = np.linspace(1, 1.4, 10) * noise(generator, 10, 0.0, 0.01)
    same = in_turns(generator, 5, drift)
    assert (same.way, same.beside, same.samples) == (Way.PAIRS, False, (5, 5))
    delayed = in_turns(generator, 5, drift, backward_s=0.01)
    assert delayed.step.shown
    assert delayed.step.share.contains(0.1)
    assert delayed.cause is not None
    assert delayed.cause.part == "backward_s"


@pytest.mark.parametrize("part", ["data_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s", "other_s"])
def test_a_planted_delay_is_found_and_its_part_named(part: str) -> None:
    generator = np.random.default_rng(7)
    found = in_turns(generator, 5, noise(generator, 10, 0.0, 0.01), **{part: 0.01})
    assert found.step.shown
    assert found.cause is not None
    assert found.cause.part == ("communication_s" if part == "exposed_comm_s" else part)
    assert found.cause.share.value == pytest.approx(found.step.share.value, rel=0.4)
    assert sum(part.share.value for part in found.parts) == pytest.approx(found.step.share.value)


def test_equal_runs_in_turns_show_no_difference() -> None:
    generator = np.random.default_rng(8)
    found = [in_turns(generator, 3, noise(generator, 6, 0.3, 0.05)) for _ in range(60)]
    assert sum(one.step.shown or one.cause is not None for one in found) <= 6


def test_the_rank_for_which_the_others_wait_says_where_the_time_goes() -> None:
    """On rank 0 the delay is waiting; rank 1 waits less, and has the cause."""
    generator = np.random.default_rng(9)
    found = in_turns(generator, 5, np.ones(10), ranks=2, data_s=0.01)
    assert found.rank == (0, 1)
    assert found.cause is not None
    assert found.cause.part == "data_s"


def until(end: float, seed: int, **extra: float) -> StepSeconds:
    """Steps until a time in seconds, on a machine that is twice as slow in the second half of this time."""
    generator = np.random.default_rng(seed)
    factors: list[float] = []
    at = 0.0
    while at < end:
        factors.append((2.0 if at > end / 2 else 1.0) * generator.normal(1, 0.01))
        at += 0.1 * factors[-1] + sum(extra.values())
    return rows(np.array(factors), **extra)


def test_runs_side_by_side_are_compared_in_the_same_seconds() -> None:
    found = compared([until(40.0, 1)], [until(40.0, 2, optimizer_s=0.02)])
    assert (found.way, found.beside, found.samples) == (Way.BLOCKS, True, (6, 6))
    assert found.step.shown
    assert found.cause is not None
    assert found.cause.part == "optimizer_s"
    same = compared([until(40.0, 1)], [until(40.0, 3)])
    assert same.beside
    assert not same.step.shown


def test_a_few_slow_steps_change_the_mean_and_not_the_typical_step() -> None:
    generator = np.random.default_rng(12)
    stalled = np.ones(60)
    stalled[::10] = 5.0
    sides: tuple[list[StepSeconds], list[StepSeconds]] = ([], [])
    for number in range(10):
        factors = noise(generator, 60, 0.0, 0.01) * (stalled if number % 2 else 1.0)
        sides[number % 2].append(rows(factors, begin=100.0 * number))
    found = compared(*sides)
    assert found.mean.shown
    assert found.mean.share.contains(0.4)
    assert not found.step.shown


def test_tiny_changes_are_not_shown_and_few_steps_have_no_interval() -> None:
    tiny = compared([rows(np.ones(60))], [rows(np.full(60, 1.005), begin=1e6)])
    assert tiny.has_interval
    assert not tiny.step.shown
    few = compared([rows(np.ones(8))], [rows(np.ones(8), begin=1e6)])
    assert not few.has_interval
    assert few.cause is None


def test_sides_of_unequal_size_are_compared_as_runs() -> None:
    generator = np.random.default_rng(13)
    a = [rows(noise(generator, 40, 0.5), begin=100.0 * number) for number in range(3)]
    b = [rows(1.2 * noise(generator, 40, 0.5), begin=1000 + 100.0 * number) for number in range(4)]
    found = compared(a, b)
    assert (found.way, found.samples) == (Way.RUNS, (3, 4))
    assert found.step.share.contains(0.2)
    assert found.step.shown
