"""In: tensors of many sizes, flips of their bits. Out: a hash that changes with them, and with nothing else.
Does not start a rank: test_alike does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codescent.train.tensor_hash import BLOCK_BYTES, BLOCKS_AT_ONCE, COLUMNS, ROWS, WORD_BYTES, tensor_hash

SIZES = st.one_of(
    st.integers(1, 40),
    st.builds(lambda blocks, more: blocks * BLOCK_BYTES + more, st.integers(1, 3), st.integers(-9, 9)),
)
"""Bytes: less than some words, and about whole blocks."""

FILLS = st.sampled_from(["zeros", "ones", "random"])


def made(size: int, fill: str) -> torch.Tensor:
    """So many bytes."""
    if fill == "random":
        return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    return torch.full((size,), 255 if fill == "ones" else 0, dtype=torch.uint8)


def hash_of(*tensors: torch.Tensor) -> int:
    return int(tensor_hash(tensors))


@given(st.lists(SIZES, min_size=1, max_size=3), FILLS, st.data())
def test_any_flipped_bit_changes_it(sizes: list[int], fill: str, data: st.DataObject) -> None:
    tensors = [made(size, fill) for size in sizes]
    before = hash_of(*tensors)
    flipped = data.draw(st.sampled_from(tensors))
    flips = st.tuples(st.integers(0, flipped.numel() - 1), st.integers(0, 7))
    for byte, bit in data.draw(st.lists(flips, min_size=1, max_size=3, unique=True)):
        flipped[byte] ^= 1 << bit
    assert hash_of(*tensors) != before


@given(SIZES, FILLS, st.integers(0, 2**40), st.integers(0, 7))
def test_two_tensors_that_are_swapped_change_it(size: int, fill: str, byte: int, bit: int) -> None:
    one, other = made(size, fill), made(size, fill)
    other[byte % size] ^= 1 << bit
    assert hash_of(one, other) != hash_of(other, one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_signs_that_change_everywhere_change_it(dtype: torch.dtype) -> None:
    """In fp64 that is the top bit of every word, and twice the top bit is nothing."""
    for numel in (2, 1000, ROWS * COLUMNS, 4 * ROWS * COLUMNS):
        numbers = torch.zeros(numel, dtype=dtype)
        assert hash_of(numbers) != hash_of(-numbers)


def test_words_that_change_places_change_it() -> None:
    words = torch.arange(3 * ROWS * COLUMNS)
    seen = {hash_of(words)}
    for first, second in itertools.combinations((0, 1, COLUMNS, ROWS * COLUMNS, 2 * ROWS * COLUMNS + 5), 2):
        moved = words.clone()
        moved[first], moved[second] = words[second], words[first]
        seen.add(hash_of(moved))
    assert len(seen) == 11


@pytest.mark.parametrize("blocks", [0, 1, BLOCKS_AT_ONCE + 1])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_does_not_depend_on_memory_and_threads(blocks: int, threads: int) -> None:
    size = blocks * BLOCK_BYTES + 24
    whole = made(2 * size, "random")[:size]
    before, threads_before = hash_of(whole), torch.get_num_threads()
    unaligned = torch.zeros(size + 4, dtype=torch.uint8)[4:].copy_(whole)
    spread = torch.zeros(size, 2, dtype=torch.uint8)[:, 1].copy_(whole)
    torch.set_num_threads(threads)
    try:
        parts = torch.split(whole, BLOCK_BYTES // 2 // WORD_BYTES * WORD_BYTES)
        assert hash_of(whole) == hash_of(unaligned) == hash_of(spread) == hash_of(*parts) == before
    finally:
        torch.set_num_threads(threads_before)


def test_what_is_not_there_and_what_has_no_dims() -> None:
    assert hash_of(torch.zeros(0, 3)) == 0
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor(2.0))
    assert hash_of(torch.zeros(1, dtype=torch.bool)) != hash_of(torch.ones(1, dtype=torch.bool))


def test_numpy_finds_the_same() -> None:
    """Written again, with unsigned words: what the ranks of two kinds of device must agree on."""
    numbers = torch.arange(200_000, dtype=torch.float32)
    words = np.zeros(-(-numbers.nbytes // BLOCK_BYTES) * ROWS * COLUMNS, np.uint64)
    words[: numbers.numel() // 2] = numbers.numpy().view(np.uint64)
    total = 0
    for number, block in enumerate(words.reshape(-1, ROWS, COLUMNS)):
        sums = [*block.sum(0), *block.sum(1)]
        for place, one in enumerate(map(int, sums), start=1 + number * len(sums)):
            z = (one + place * 0x9E3779B97F4A7C15) % 2**64
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
            total = (total + z) % 2**64
    assert hash_of(numbers) % 2**64 == total
