"""In: bytes of a file, in order. Out: a checksum of each block of 4 KiB; which block of a later reading differs.
Does not open files and does not store the checksums (verified.py does)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 4096
"""A sample of 1,024 tokens lies in one or two blocks, so little is read that is not needed."""

Sums = npt.NDArray[np.uint32]


def of_blocks(data: memoryview) -> Iterator[int]:
    """The CRC-32 of each block of bytes that begin at a block; the last one may be shorter."""
    for begin in range(0, len(data), BLOCK_BYTES):
        yield zlib.crc32(data[begin : begin + BLOCK_BYTES])


def around(offset_bytes: int, size_bytes: int, file_bytes: int) -> tuple[int, int]:
    """The bytes from and to which whole blocks are read, so that they contain a part of a file."""
    end = -(-(offset_bytes + size_bytes) // BLOCK_BYTES) * BLOCK_BYTES
    return offset_bytes // BLOCK_BYTES * BLOCK_BYTES, min(end, file_bytes)


def first_wrong(data: memoryview, offset_bytes: int, sums: Sums) -> int | None:
    """The byte of the file at which a block with another checksum begins; None: all blocks have theirs.

    `data`: whole blocks from `offset_bytes` on.
    """
    first = offset_bytes // BLOCK_BYTES
    for number, found in enumerate(of_blocks(data), start=first):
        if number >= len(sums) or found != sums[number]:
            return number * BLOCK_BYTES
    return None
