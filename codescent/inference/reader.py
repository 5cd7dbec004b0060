"""In: which tokens of which texts a pass reads. Out: the logits behind them, of a decoder with its keys and values.
Does not choose the texts (schedule.py does) or tokens (sampling.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codescent.base.device_kinds import CUDA
from codescent.inference.graphs import DecodeGraphs
from codescent.models.decoder import Decoder
from codescent.operators.cache import CachedToken, KeysValues, RowPart, RowsPass

# Shapes: N tokens of a pass, B rows whose logits are wanted, V vocab_size.


@dataclass(frozen=True)
class Pass:
    """What one forward pass reads.

    Attributes:
        tokens: of all rows, one row behind the other.
        parts: how many of them each row has, and where its text is.
        wanted: whether the row has read all its tokens, so that the next one may be chosen.
    """

    tokens: list[int]
    parts: Sequence[RowPart]
    wanted: Sequence[bool]


class Reader:
    """A decoder and the memory for its keys and values.

    Attributes:
        graphs: reads passes with one new token of each row, on a device of CUDA; None: elsewhere.
    """

    def __init__(self, module: Decoder, pages: int, page_size: int) -> None:
        self.module = module
        weight = module.tok.weight
        self.device = weight.device
        self.memory = KeysValues(
            module.shape.num_layers, pages, page_size, cached_token(module), self.device, weight.dtype
        )
        self.graphs = DecodeGraphs(module, self.memory) if self.device.type == CUDA else None

    def read(self, work: Pass) -> Tensor:
        """Logits [B, V] behind the last token of each row that wants them."""
        if self.graphs is not None and all(work.wanted) and all(part.new == 1 for part in work.parts):
            return self.graphs.read(work.tokens, work.parts)
        cache = RowsPass(self.memory, work.parts, work.wanted)
        tokens_1N = torch.tensor([work.tokens], device=self.device)
        logits_BV: Tensor = self.module(tokens_1N, cache=cache)
        return logits_BV


def cached_token(module: Decoder) -> CachedToken:
    """What a layer of this rank keeps of a token."""
    attention: Any = next(iter(module.blocks.values())).get_submodule("attn")
    found: CachedToken = attention.cached
    return found


def page_bytes(module: Decoder, page_size: int) -> int:
    """Bytes of the keys and values of a page in all layers."""
    return cached_token(module).numbers * module.shape.num_layers * page_size * module.tok.weight.element_size()
