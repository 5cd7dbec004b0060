"""In: any seed, number of samples, batch size and division among ranks. Out: the order of samples keeps its promises.
Does not read tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.data.loader import Sampler

seeds = st.integers(-(1 << 70), 1 << 70)


@st.composite
def samplers(draw: st.DrawFn, most: int = 300) -> Sampler:
    num_samples = draw(st.integers(1, most))
    return Sampler(draw(seeds), num_samples, draw(st.integers(1, num_samples)))


def step_of(sampler: Sampler, step: int) -> list[int]:
    return sampler.indices_of_steps(step, 1, 0, sampler.global_batch_size)[0].tolist()


@given(sampler=samplers(), epoch=st.integers(0, 1 << 40))
def test_an_epoch_holds_no_sample_twice_and_all_but_a_rest(sampler: Sampler, epoch: int) -> None:
    first = epoch * sampler.steps_per_epoch
    seen = [sample for step in range(first, first + sampler.steps_per_epoch) for sample in step_of(sampler, step)]
    assert len(set(seen)) == len(seen) == sampler.steps_per_epoch * sampler.global_batch_size
    assert len(seen) > sampler.num_samples - sampler.global_batch_size
    assert set(seen) <= set(range(sampler.num_samples))


@given(sampler=samplers(), step=st.integers(0, 1 << 50), data=st.data())
def test_any_division_among_ranks_and_microbatches_gives_the_same_samples(
    sampler: Sampler, step: int, data: st.DataObject
) -> None:
    whole = step_of(sampler, step)
    again = Sampler(sampler.seed, sampler.num_samples, sampler.global_batch_size)
    cuts = sorted(data.draw(st.lists(st.integers(0, sampler.global_batch_size), max_size=5)))
    bounds = [0, *cuts, sampler.global_batch_size]
    pieces = [again.indices_of_steps(step, 1, start, stop)[0] for start, stop in zip(bounds, bounds[1:])]
    assert np.concatenate(pieces).tolist() == whole
    assert all(piece.dtype == np.int64 for piece in pieces)
    assert len(set(whole)) == len(whole)  # no two ranks see the same sample in a step


@given(sampler=samplers(), first=st.integers(0, 1 << 50), count=st.integers(1, 40), data=st.data())
def test_many_steps_at_once_are_the_steps_one_by_one(
    sampler: Sampler, first: int, count: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, sampler.global_batch_size))
    stop = data.draw(st.integers(start, sampler.global_batch_size))
    together = sampler.indices_of_steps(first, count, start, stop)
    assert together.tolist() == [
        sampler.indices_of_steps(step, 1, start, stop)[0].tolist() for step in range(first, first + count)
    ]


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = {tuple(step_of(Sampler(seed, 50, 50), epoch)) for seed in (0, 1, 1337, 1 << 64) for epoch in range(25)}
    assert len(orders) == 100


def test_the_order_is_that_of_this_version() -> None:
    """The order belongs to a run's record: a change of it would change every run that is resumed."""
    assert Sampler(1337, 1000, 8).indices_of_steps(0, 1, 0, 8)[0].tolist() == [871, 918, 551, 499, 218, 495, 363, 488]
    assert Sampler(1337, 1000, 8).indices_of_steps(125, 1, 0, 8)[0].tolist() == [464, 555, 246, 733, 425, 884, 360, 899]


@pytest.mark.parametrize("num_samples", [5, 64, 100, 1000])
def test_every_sample_comes_to_every_place_equally_often(num_samples: int) -> None:
    epochs = 4000
    counts = np.zeros((num_samples, 4))
    for epoch in range(epochs):
        places = Sampler(7, num_samples, num_samples).indices_of_steps(epoch, 1, 0, 4)[0]
        counts[places, np.arange(4)] += 1
    expected = epochs / num_samples
    chi_square = ((counts - expected) ** 2 / expected).sum(axis=0)
    freedom = num_samples - 1
    assert np.all(np.abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)), chi_square


def test_neighbours_are_unrelated() -> None:
    order = np.array(step_of(Sampler(3, 4096, 4096), 0), float)
    for lag in (1, 2, 64, 2048):
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(4096 - lag)


def test_samples_beyond_counting() -> None:
    sampler = Sampler(1, 10**15, 512)
    found = np.concatenate([sampler.indices_of_steps(step, 1, 0, 512)[0] for step in range(50)])
    assert len(set(found.tolist())) == len(found)
    assert found.min() >= 0
    assert 0.9e15 < found.max() < 10**15


def test_too_short() -> None:
    with pytest.raises(UserError, match="the corpus is shorter than one sample"):
        Sampler(1, 0, 4)
    with pytest.raises(UserError, match=r"has 3 samples .* fewer than one step of train\.global_batch_size = 4"):
        Sampler(1, 3, 4)


@pytest.mark.parametrize(("step", "start", "stop"), [(-1, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 5)])
def test_positions_that_there_are_not(step: int, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        Sampler(1, 10, 4).indices_of_steps(step, 1, start, stop)[0]
