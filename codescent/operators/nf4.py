"""In: a matrix. Out: the part of it that a rank holds, in NF4 with double quantization; its values again.
Does not multiply (linear.py does), and does not choose the matrices (models/lora does).

Blocks and groups are those of the whole matrix, so that every layout has the same values."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from codescent.base.extra import library
from codescent.base.nf4_size import BLOCK, GROUP, NF4

# Shapes: R rows of a rank's part, I its columns, n = I / BLOCK its blocks in a row, G groups of the whole matrix.


@dataclass(frozen=True)
class Packed:
    """What a rank holds of a matrix beside its values of 4 bits (Dettmers et al. 2023, "QLoRA", section 3).

    Attributes:
        scales_Rn: uint8: the scale of each block, as an index into bitsandbytes' table of 8-bit numbers.
        blocks_R: int32: the number of the first block of each row, counted from the first group.
        means_R: fp32: the mean that was subtracted from the scales of the row's matrix.
        groups_G: fp32: the scale of the scales of each group.
        dtype: of the values that products read.
    """

    scales_Rn: Tensor
    blocks_R: Tensor
    means_R: Tensor
    groups_G: Tensor
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors, to count their memory."""
        yield from (self.scales_Rn, self.blocks_R, self.means_R, self.groups_G)

    def __call__(self, values: Tensor) -> Tensor:
        """The matrix that `values`, uint8 [..., I / 2], stand for: [..., I] in `dtype`."""
        index_Rn = self.blocks_R[:, None] + torch.arange(self.scales_Rn.shape[1], device=values.device)
        table = _table(values.device)
        scales_Rn = table[self.scales_Rn.long()] * self.groups_G[index_Rn // GROUP] + self.means_R[:, None]
        functional = _functional()
        shape = torch.Size((*values.shape[:-1], 2 * values.shape[-1]))
        narrow = self.dtype if self.dtype in (torch.bfloat16, torch.float16) else torch.float32
        state = functional.QuantState(
            absmax=scales_Rn.flatten(),
            shape=shape,
            code=_code(values.device),
            blocksize=BLOCK,
            quant_type=NF4,
            dtype=narrow,
        )
        matrix: Tensor = functional.dequantize_4bit(values.reshape(-1, 1), state)
        return matrix.to(self.dtype)


def packed(
    matrix: Tensor, alternating: Sequence[int], slices: tuple[slice, ...], dtype: torch.dtype
) -> tuple[Tensor, Packed]:
    """Quantize a whole matrix, and return a box of it: its values uint8 [..., I / 2], and what they need.

    Args:
        matrix: [..., columns], in any float dtype.
        alternating: rows of several matrices, which are quantized apart (see `Parameter.alternating`).
        slices: of the box; those of rows and columns of a block are whole.
        dtype: of the values that products will read.
    """
    shape = tuple(part.stop - part.start for part in slices)
    rows = torch.arange(math.prod(matrix.shape[:-1])).view(matrix.shape[:-1])
    flat, columns = matrix.flatten(0, -2), matrix.shape[-1]
    blocks = columns // BLOCK
    values = torch.empty(len(flat), columns // 2, dtype=torch.uint8, device=matrix.device)
    scales_Rn = torch.empty(len(flat), blocks, dtype=torch.uint8, device=matrix.device)
    firsts_R = torch.empty(len(flat), dtype=torch.int32, device=matrix.device)
    means_R = torch.empty(len(flat), device=matrix.device)
    groups: list[Tensor] = []
    for of_one in _rows_of_matrices(len(flat), alternating):
        found, state = _functional().quantize_4bit(
            _narrow(flat[of_one]), blocksize=BLOCK, compress_statistics=True, quant_type=NF4
        )
        values[of_one], scales_Rn[of_one] = found.view(-1, columns // 2), state.absmax.view(-1, blocks)
        begins = GROUP * sum(map(len, groups))
        numbers = torch.arange(len(of_one), device=matrix.device) * blocks
        firsts_R[of_one], means_R[of_one] = (begins + numbers).int(), state.offset.float()
        groups.append(state.state2.absmax)
    some = rows[slices[:-1]].flatten().to(matrix.device)
    first, stop = slices[-1].start, slices[-1].stop
    held = Packed(
        scales_Rn[some, first // BLOCK : stop // BLOCK].contiguous(),
        firsts_R[some] + first // BLOCK,
        means_R[some],
        torch.cat(groups),
        dtype,
    )
    return values[some, first // 2 : stop // 2].reshape(*shape[:-1], -1), held


def rounded(matrix: Tensor, alternating: Sequence[int]) -> Tensor:
    """The values that a matrix has in NF4, in its dtype."""
    values, held = packed(matrix, alternating, tuple(slice(0, size) for size in matrix.shape), matrix.dtype)
    return held(values)


def _rows_of_matrices(rows: int, alternating: Sequence[int]) -> Iterator[Tensor]:
    """The rows of each matrix, in their order."""
    within, first = torch.arange(rows) % (sum(alternating) or 1), 0
    for count in alternating or (1,):
        yield torch.nonzero((within >= first) & (within < first + count)).flatten()
        first += count


def _narrow(matrix: Tensor) -> Tensor:
    """In a dtype that bitsandbytes quantizes."""
    return (matrix if matrix.dtype in (torch.bfloat16, torch.float16) else matrix.float()).contiguous()


@cache
def _functional() -> ModuleType:
    # It warns that a kernel for products on CPUs is missing. Products here are torch's.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return library("bitsandbytes.functional", "lora.quantize", "qlora")


_code = cache(lambda device: _functional().get_4bit_type(NF4, device=device))
_table = cache(lambda device: _functional().create_dynamic_map().to(device))
