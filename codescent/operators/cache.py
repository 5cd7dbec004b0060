"""In: keys and values of tokens that were read. Out: the same for the tokens that follow, in rows of different lengths.
Does not choose tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Shapes: B rows (prompts), T new positions, S slots, H heads of keys and values, K head_dim.


class LayerCache:
    """Keys and values of one layer, and the mask that the current forward pass reads them through."""

    def __init__(self, k_BSHK: Tensor, v_BSHK: Tensor) -> None:
        self.k_BSHK, self.v_BSHK = k_BSHK, v_BSHK
        self.rows_B1: Tensor
        self.slots_BT: Tensor
        self.mask_B1TS: Tensor

    def extend(self, k_BTHK: Tensor, v_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values into their slots; returns all that the mask covers."""
        self.k_BSHK[self.rows_B1, self.slots_BT] = k_BTHK
        self.v_BSHK[self.rows_B1, self.slots_BT] = v_BTHK
        used = self.mask_B1TS.shape[-1]
        return self.k_BSHK[:, :used], self.v_BSHK[:, :used]


class KVCache:
    """Keys and values of all layers. Slot s of a row holds the token at position s of that row.

    Rows may have different lengths. A forward pass brings T tokens to every row; the first `counts[row]` are real. The
    others are never read, and the next tokens of that row overwrite them. `size` is rows, seq_len, heads of keys and
    values, head_dim.
    """

    def __init__(
        self, num_layers: int, size: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
    ) -> None:
        num_rows, self.seq_len, _, _ = size
        self.lengths = [0] * num_rows
        memory = [torch.zeros(2, *size, device=device, dtype=dtype) for _ in range(num_layers)]
        self.layers = [LayerCache(*k_and_v) for k_and_v in memory]
        self.device = device

    def begin(self, width: int, counts: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Makes room for `width` tokens a row: their positions [B, T], and the index [B] of each row's last real one.

        Raises:
            ValueError: a row would pass seq_len.
        """
        counts = [width] * len(self.lengths) if counts is None else list(counts)
        if len(counts) != len(self.lengths) or max(counts) > width or min(counts) < 1:
            raise ValueError(f"counts {counts} do not fit {len(self.lengths)} rows of {width} tokens")
        used = max(self.lengths) + width
        if used > self.seq_len:
            raise ValueError(f"{max(self.lengths)} + {width} tokens are more than seq_len = {self.seq_len}")
        positions_BT = torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(width, device=self.device)
        mask_B1TS = (torch.arange(used, device=self.device) <= positions_BT[:, :, None])[:, None]
        rows_B1 = torch.arange(len(counts), device=self.device)[:, None]
        for layer in self.layers:
            layer.rows_B1, layer.slots_BT, layer.mask_B1TS = rows_B1, positions_BT, mask_B1TS
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        return positions_BT, torch.tensor(counts, device=self.device) - 1

    def keep(self, rows: Sequence[int]) -> None:
        """Drops every row but these, in this order."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            layer.k_BSHK, layer.v_BSHK = layer.k_BSHK[index], layer.v_BSHK[index]
        self.lengths = [self.lengths[row] for row in rows]

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        """Puts row i of `other` in the place of row `rows[i]`."""
        index = torch.tensor(rows, device=self.device)
        for mine, theirs in zip(self.layers, other.layers):
            mine.k_BSHK[index], mine.v_BSHK[index] = theirs.k_BSHK, theirs.v_BSHK
        for row, length in zip(rows, other.lengths):
            self.lengths[row] = length
