"""In: any seed, sizes and weights of corpora, batch size, division among ranks. Out: the order of a mixture keeps its
promises.
Does not read tokens and does not train."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.data.mixed_order import BITS, MixedOrder, below

REVERSED = [int(f"{number:0{BITS}b}"[::-1], 2) for number in range(256)]


@st.composite
def orders(draw: st.DrawFn) -> MixedOrder:
    batch = draw(st.integers(1, 60))
    weights = draw(st.lists(st.integers(1, 1000), min_size=2, max_size=6))
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    sizes = [draw(st.integers(max(1, -(-share.numerator * batch // share.denominator)), 200)) for share in shares]
    names = [f"corpus{number}" for number in range(len(weights))]
    return MixedOrder(draw(st.integers(0, 1 << 62)), names, sizes, shares, batch)


def step_of(order: MixedOrder, step: int) -> list[int]:
    return order.indices_of_steps(step, 1, 0, order.global_batch_size)[0].tolist()


def corpora_of(order: MixedOrder, samples: list[int]) -> list[int]:
    """How many of the samples are of each corpus."""
    found = Counter(np.searchsorted(list(accumulate(order.sizes)), samples, side="right").tolist())
    return [found[corpus] for corpus in range(len(order.sizes))]


@given(st.integers(0, 255), st.one_of(st.integers(0, 1 << BITS), st.sampled_from(REVERSED)))
def test_numbers_below_a_bound_are_counted_without_being_looked_at(steps: int, threshold: int) -> None:
    """A wrong count would give two steps the same samples, or leave some out."""
    assert below(steps, threshold) == sum(number < threshold for number in REVERSED[:steps])


@given(order=orders(), step=st.integers(0, 1 << 40))
def test_a_step_has_the_share_of_each_corpus_rounded_up_or_down(order: MixedOrder, step: int) -> None:
    """A mixture whose share wanders from step to step makes losses that wander."""
    counts = order.of_step(step)
    assert sum(counts) == order.global_batch_size
    assert counts == corpora_of(order, step_of(order, step))
    ends = [0, *accumulate(counts)]
    borders = [0, *(Fraction(whole) + Fraction(part, 2**BITS) for whole, part in zip(order._whole, order._parts))]
    assert all(abs(end - border) <= 1 for end, border in zip(ends, borders, strict=True))


@given(order=orders(), steps=st.integers(0, 1 << 20))
def test_after_any_number_of_steps_the_shares_are_those_of_the_weights(order: MixedOrder, steps: int) -> None:
    """Rounding that always goes one way would train on another mixture than the one that was given."""
    borders = [0, *(Fraction(whole) + Fraction(part, 2**BITS) for whole, part in zip(order._whole, order._parts))]
    taken = order.taken(steps)
    for count, begin, end in zip(taken, borders, borders[1:], strict=False):
        assert abs(count - (end - begin) * steps) < 2 * (steps.bit_length() / 3 + 1)


@given(order=orders(), epochs=st.integers(1, 3))
def test_each_corpus_has_epochs_of_its_own(order: MixedOrder, epochs: int) -> None:
    """In each epoch of a corpus every sample is read once: none is left out, as none is read twice."""
    steps = 0
    while min(taken // size for taken, size in zip(order.taken(steps), order.sizes)) < epochs and steps < 400:
        steps += 1
    samples = order.indices_of_steps(0, max(1, steps), 0, order.global_batch_size).ravel().tolist()
    seen, begin = Counter(samples), 0
    for size, taken in zip(order.sizes, corpora_of(order, samples)):
        assert {seen[begin + sample] for sample in range(size)} <= {taken // size, -(-taken // size)}
        begin += size


@given(order=orders(), first=st.integers(0, 1 << 30), count=st.integers(1, 12), data=st.data())
def test_any_division_among_ranks_and_steps_gives_the_same_samples(
    order: MixedOrder, first: int, count: int, data: st.DataObject
) -> None:
    """A rank that computed other samples than the whole batch has would train on some twice."""
    whole = order.indices_of_steps(first, count, 0, order.global_batch_size)
    cuts = sorted(data.draw(st.lists(st.integers(0, order.global_batch_size), max_size=4)))
    bounds = [0, *cuts, order.global_batch_size]
    again = MixedOrder(order.seed, order.names, order.sizes, _shares(order), order.global_batch_size)
    for row, step in enumerate(range(first, first + count)):
        pieces = [again.indices_of_steps(step, 1, start, stop)[0] for start, stop in zip(bounds, bounds[1:])]
        assert np.concatenate(pieces).tolist() == whole[row].tolist()


def _shares(order: MixedOrder) -> list[Fraction]:
    borders = [
        (Fraction(whole) + Fraction(part, 2**BITS)) / order.global_batch_size
        for whole, part in zip(order._whole, order._parts)
    ]
    return [end - begin for begin, end in zip([Fraction(0), *borders], borders)]


def test_a_weight_that_is_a_whole_number_of_samples_is_taken_exactly() -> None:
    """0.6 of 10 samples are 6 in each step: the weights count as they are written, not as binary fractions."""
    order = MixedOrder(1, ["a", "b"], [100, 100], [Fraction("0.6"), Fraction("0.4")], 10)
    assert {tuple(order.of_step(step)) for step in range(300)} == {(6, 4)}


def test_every_part_of_the_batch_has_all_corpora() -> None:
    """Else the first ranks would have one corpus alone, which replicas that train apart would notice."""
    order = MixedOrder(5, ["a", "b"], [4000, 4000], [Fraction(1, 2)] * 2, 32)
    first = order.indices_of_steps(0, 200, 0, 8)
    assert 0.45 < float((first < 4000).mean()) < 0.55


def test_other_seeds_and_corpora_have_other_orders() -> None:
    """Two corpora of equal size that were permuted alike would be paired, sample by sample, in every epoch."""
    order = MixedOrder(3, ["a", "b"], [64, 64], [Fraction(1, 2)] * 2, 128)
    epoch = np.array(step_of(order, 0))
    of_a, of_b = epoch[epoch < 64], epoch[epoch >= 64] - 64
    assert of_a.tolist() != of_b.tolist()
    assert step_of(MixedOrder(4, ["a", "b"], [64, 64], [Fraction(1, 2)] * 2, 128), 0) != epoch.tolist()


def test_the_order_is_that_of_this_version() -> None:
    """The order belongs to a run's record: a change of it would change every run that is resumed."""
    order = MixedOrder(1337, ["wiki", "code"], [1000, 300], [Fraction(3, 4), Fraction(1, 4)], 6)
    assert [order.of_step(step) for step in range(4)] == [[5, 1], [4, 2], [5, 1], [4, 2]]
    assert step_of(order, 0) == [1198, 237, 980, 972, 988, 774]
    assert step_of(order, 1000) == [997, 559, 842, 755, 517, 1029]


@pytest.mark.parametrize(("step", "start", "stop"), [(-1, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 5)])
def test_positions_that_there_are_not(step: int, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        MixedOrder(1, ["a", "b"], [9, 9], [Fraction(1, 2)] * 2, 4).indices_of_steps(step, 1, start, stop)
