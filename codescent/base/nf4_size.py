"""In: the sizes of a matrix. Out: its bytes in NF4 with double quantization; the block sizes of this number format.
Does not quantize (operators/nf4.py does)."""

from __future__ import annotations

import math
from collections.abc import Sequence

NF4 = "nf4"
"""NormalFloat with 4 bits (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3)."""

BLOCK = 64
"""Elements of a row that share a scale."""

GROUP = 256
"""Blocks whose scales share a scale (double quantization)."""

ROW_BYTES = 8
"""Of each row: the number of its first block, and the mean of the scales of its matrix."""


def nf4_bytes(local: Sequence[int], whole: Sequence[int], alternating: Sequence[int] = ()) -> int:
    """Bytes of a rank's part of a matrix, [rows, columns]: half a byte for each element, and one for each block.

    Args:
        local, whole: sizes of the part and of the matrix; the last one is that of columns.
        alternating: see `Parameter.alternating`.
    """
    rows, columns = math.prod(local[:-1]), local[-1]
    return rows * columns // 2 + rows * columns // BLOCK + ROW_BYTES * rows + 4 * sum(groups_of(whole, alternating))


def groups_of(whole: Sequence[int], alternating: Sequence[int] = ()) -> list[int]:
    """The number of groups of blocks of each matrix that a parameter holds. Every rank has the scales of all."""
    rows, blocks = math.prod(whole[:-1]), whole[-1] // BLOCK
    period = sum(alternating) or 1
    return [-(-rows // period * part * blocks // GROUP) for part in alternating or (1,)]
