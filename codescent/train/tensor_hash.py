"""In: a list of tensors on one device. Out: a 64-bit hash of all bytes of the list, in order, computed there.
Does not wait for the device, does not compare (alike.py does), and does not resist a deliberate collision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

ROWS, COLUMNS = 511, 127
"""Shape of a block in 64-bit words; a block fits in a core's cache. Both are odd: if the top bits of
all words of a row or column flip, its sum changes. This happens when fp64 numbers change their sign."""

WORD_BYTES = 8
BLOCK_BYTES = ROWS * COLUMNS * WORD_BYTES
BLOCKS_AT_ONCE = 64
"""Blocks whose sums are in memory at one time, 0.3 MB: memory does not grow with the size of the tensors."""

STRIDE, FACTORS, SHIFTS = -7046029254386353131, (-4658895280553007687, -7723592293110705685), (30, 27)
"""Constants of splitmix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators", figure 15)."""


@torch.no_grad()
def tensor_hash(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A hash of the bytes of the tensors: an int64 scalar on their device. Its value does not depend on the device.

    The tensors' 64-bit words fill blocks of [ROWS, COLUMNS]. The sum of each row and column is mixed with its index,
    and the mixed sums are added. A change of up to three words of a block changes at least one of its sums.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    first = 0
    for blocks in _blocks(tensors):
        total += _mixed(_sums(blocks), first)
        first += len(blocks)
    return total


def _blocks(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors' bytes in order, as 64-bit words of shape [blocks, ROWS, COLUMNS]. Zeros pad the last block.

    Whole blocks of a tensor are views. The rest is copied to a buffer, which the next block overwrites.
    """
    buffer = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=tensors[0].device)
    filled = 0
    for tensor in tensors:
        rest = tensor.detach().reshape(-1).view(torch.uint8)
        while rest.numel():
            whole = min(rest.numel() // BLOCK_BYTES, BLOCKS_AT_ONCE) * BLOCK_BYTES
            if whole and not filled and rest.storage_offset() % WORD_BYTES == 0:
                yield _words(rest[:whole])
                rest = rest[whole:]
                continue
            begin, end = filled, min(filled + rest.numel(), BLOCK_BYTES)
            buffer[begin:end] = rest[: end - begin]
            rest = rest[end - begin :]
            filled = -(-end // WORD_BYTES) * WORD_BYTES  # the next tensor begins at a word boundary
            if filled > end:
                buffer[end:filled] = 0
            if filled == BLOCK_BYTES:
                yield _words(buffer)
                filled = 0
    if filled:
        buffer[filled:] = 0
        yield _words(buffer)


def _words(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int64).view(-1, ROWS, COLUMNS)


def _sums(blocks: torch.Tensor) -> torch.Tensor:
    """Sums of the columns and rows of each block, modulo 2^64: [blocks, COLUMNS + ROWS]."""
    sums = blocks.new_empty(len(blocks), COLUMNS + ROWS)
    # A CPU reads each block twice. Few blocks at a time, so that the second read comes from its threads' caches.
    at_once = max(1, torch.get_num_threads() // 2) if blocks.device.type == "cpu" else len(blocks)
    for some, into in zip(torch.split(blocks, at_once), torch.split(sums, at_once), strict=True):
        torch.sum(some, 1, out=into[:, :COLUMNS])
        torch.sum(some, 2, out=into[:, COLUMNS:])
    return sums


def _mixed(sums: torch.Tensor, first: int) -> torch.Tensor:
    """Mix each sum with its index by splitmix64, and add the results; `first` is the index of the first block."""
    begin = first * (COLUMNS + ROWS) + 1
    words = sums.view(-1)
    words += torch.arange(begin, begin + words.numel(), device=words.device).mul_(STRIDE)
    for shift, factor in zip(SHIFTS, FACTORS, strict=True):
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)  # a logical shift: torch's copies the sign bit
        words *= factor
    return words.sum()
