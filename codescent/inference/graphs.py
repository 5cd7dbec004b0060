"""In: passes with one new token of each row. Out: their logits, by graphs that CUDA repeats without the host.
Does not read prompts: their shapes differ, and their products are long enough to hide the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from codescent.base.device import recorded
from codescent.models.decoder import Decoder
from codescent.operators.cache import KeysValues, PagesPass, RowPart

# Shapes: B rows of a graph, P pages of a row, V vocab_size.
_FEWEST_PAGES = 8

Record = Callable[[torch.device, Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""See `base.device.recorded`."""


class DecodeGraphs:
    """A graph for each number of rows and of pages, both powers of two: the smallest one that holds a pass is taken.

    A token of a small model launches hundreds of kernels, each shorter than its launch. A graph is one launch.

    Args:
        module: the decoder, in evaluation mode.
        memory: of keys and values.
        record: records a graph.
    """

    def __init__(self, module: Decoder, memory: KeysValues, record: Record = recorded) -> None:
        self._module, self._memory, self._record = module, memory, record
        self._graphs: dict[tuple[int, int], tuple[Tensor, Callable[[], None], Tensor]] = {}

    def read(self, tokens: Sequence[int], parts: Sequence[RowPart]) -> Tensor:
        """Logits [rows, V] behind the one new token of each row. The next pass overwrites them."""
        most = max(len(part.pages.numbers) for part in parts)
        size = _power(len(parts)), max(_FEWEST_PAGES, _power(most))
        rows = [
            [token, part.length - 1, *part.pages.numbers, *[self._memory.spare] * (size[1] - len(part.pages.numbers))]
            for token, part in zip(tokens, parts, strict=True)
        ]
        rows += [[0, 0, *[self._memory.spare] * size[1]]] * (size[0] - len(rows))
        numbers = torch.tensor(rows)
        if size not in self._graphs:
            device = self._memory.layers[0].device
            inputs = numbers.to(device)
            self._graphs[size] = (inputs, *self._record(device, lambda: self._logits(inputs)))
        inputs, repeat, logits_BV = self._graphs[size]
        inputs.copy_(numbers)
        repeat()
        return logits_BV[: len(parts)]

    def _logits(self, inputs: Tensor) -> Tensor:
        """What a graph computes of tokens, their positions, and the table of pages. It never waits for a device."""
        tokens_1B, positions_1B, pages_BP = inputs[None, :, 0], inputs[None, :, 1], inputs[:, 2:]
        logits_BV: Tensor = self._module(tokens_1B, cache=PagesPass(self._memory, positions_1B, pages_BP))
        return logits_BV


def _power(number: int) -> int:
    """The next power of two, or the number itself."""
    return 1 << (number - 1).bit_length()
