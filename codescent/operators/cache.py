"""In: keys and values of new tokens. Out: keys and values of all tokens so far, for attention (key/value cache).
Does not compute attention or choose the next tokens. The sequences of a batch may have different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Shapes: B rows (prompts), T new positions, S slots, H key-value heads, K head_dim.
_MULTIPLE = 128
"""See `few_lengths`."""


def few_lengths(length: int, most: int, device: torch.device) -> int:
    """The length that attention shall read instead of `length`: on a CPU the same, else the next multiple of 128.

    It is at most `most`. On a GPU, cuDNN's attention plans for each shape anew, which takes 0.1 to 0.5 s. A text that
    grows by one token at a time would bring a new shape with each token.
    """
    return length if device.type == "cpu" else min(most, -(-length // _MULTIPLE) * _MULTIPLE)


class LayerCache:
    """Keys and values of one layer, and the attention mask of the current forward pass."""

    def __init__(self, k_BSHK: Tensor, v_BSHK: Tensor) -> None:
        self.k_BSHK, self.v_BSHK = k_BSHK, v_BSHK
        self.rows_B1: Tensor
        self.slots_BT: Tensor
        self.mask_B1TS: Tensor

    def extend(self, k_BTHK: Tensor, v_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into their slots. Return all keys and values that the mask covers."""
        self.k_BSHK[self.rows_B1, self.slots_BT] = k_BTHK
        self.v_BSHK[self.rows_B1, self.slots_BT] = v_BTHK
        used = self.mask_B1TS.shape[-1]
        return self.k_BSHK[:, :used], self.v_BSHK[:, :used]

    def seen(self, window: int) -> Tensor:
        """bool [B, 1, T, S]: the slots that a new token sees: its own and those of window - 1 tokens before; 0: all."""
        if not window:
            return self.mask_B1TS
        slots_S = torch.arange(self.mask_B1TS.shape[-1], device=self.slots_BT.device)
        return self.mask_B1TS & (slots_S > self.slots_BT[:, None, :, None] - window)


class KVCache:
    """Key/value cache of all layers. Slot s of a row holds the token at position s of that row.

    Rows may have different lengths. A forward pass adds T tokens to every row; only the first `counts[row]` are real.
    The rest is padding: it is never read, and the row's next tokens overwrite it. `size` is (rows, seq_len, key-value
    heads, head_dim).
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
        """Reserve slots for `width` tokens per row.

        Returns:
            Positions [B, T] of the tokens; index [B] of the last real token of each row.

        Raises:
            ValueError: a row would become longer than seq_len; `counts` does not fit.
        """
        counts = [width] * len(self.lengths) if counts is None else list(counts)
        if len(counts) != len(self.lengths) or max(counts) > width or min(counts) < 1:
            raise ValueError(f"counts {counts} do not fit {len(self.lengths)} rows of {width} tokens")
        used = max(self.lengths) + width
        if used > self.seq_len:
            raise ValueError(f"{max(self.lengths)} + {width} tokens are more than seq_len = {self.seq_len}")
        positions_BT = torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(width, device=self.device)
        slots_S = torch.arange(few_lengths(used, self.seq_len, self.device), device=self.device)
        mask_B1TS = (slots_S <= positions_BT[:, :, None])[:, None]
        rows_B1 = torch.arange(len(counts), device=self.device)[:, None]
        for layer in self.layers:
            layer.rows_B1, layer.slots_BT, layer.mask_B1TS = rows_B1, positions_BT, mask_B1TS
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        return positions_BT, torch.tensor(counts, device=self.device) - 1

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows except `rows`, in this order."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            layer.k_BSHK, layer.v_BSHK = layer.k_BSHK[index], layer.v_BSHK[index]
        self.lengths = [self.lengths[row] for row in rows]

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        """Replace row `rows[i]` by row i of `other`."""
        index = torch.tensor(rows, device=self.device)
        for mine, theirs in zip(self.layers, other.layers):
            mine.k_BSHK[index], mine.v_BSHK[index] = theirs.k_BSHK, theirs.v_BSHK
        for row, length in zip(rows, other.lengths):
            self.lengths[row] = length
