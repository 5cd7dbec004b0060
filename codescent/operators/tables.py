"""In: a function that computes a table from sizes alone. Out: `Table`: the tensor, made once for each device and dtype.
Does not belong to a module's state: no cast, checkpoint or state_dict sees a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from codescent.operators.compiled import constant_result


class Table:
    """A tensor that forward passes read. It is computed on the CPU at its first use, then kept where it is read.

    A buffer would not do: `module.to(bf16)` would round it, and `to_empty` would lose its values. Compiled code takes
    the table as a constant, so a compiled forward pass computes nothing on the CPU.

    Args:
        make: computes the table in fp64, so that its values do not depend on a device.
    """

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @constant_result
    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The table on a device, rounded to a dtype. Nobody may change it. The first call waits for a copy."""
        place = (device, dtype)
        if place not in self._kept:
            with torch.inference_mode(False):  # training may read it later, and its backward pass keep it
                self._kept[place] = self._make().to(device, dtype)
        return self._kept[place]

    def tensors(self) -> Iterator[Tensor]:
        """What is kept, to count its memory."""
        yield from self._kept.values()
