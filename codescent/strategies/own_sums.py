"""In: gradients of this rank, before they are summed over ranks. Out: which of them were not finite.
Does not wait for the device: a sum of each tensor is kept, and is read only if a step was skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

STEPS = 2
"""Off the CPU the result of a step is read when the next one is launched."""


class OwnSums:
    """Sums of the tensors of the last STEPS steps. What is not finite makes its sum so."""

    def __init__(self) -> None:
        self._of_step: dict[int, list[tuple[Sequence[int], torch.Tensor]]] = {}
        self._step = -1

    def begin(self, step: int) -> None:
        """The tensors that follow are of step `step` (from 0)."""
        self._step = step
        self._of_step.setdefault(step, [])
        for old in sorted(self._of_step)[:-STEPS]:
            del self._of_step[old]

    @torch.no_grad()
    def add(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Note tensors: each one of an index; or one that holds all of them."""
        if self._step < 0:
            return
        noted = self._of_step[self._step]
        each = [(index,) for index in indices] if len(tensors) == len(indices) else [tuple(indices)]
        if tensors[0].device.type == "cpu":
            noted += [(indices, tensor.sum()) for indices, tensor in zip(each, tensors, strict=True)]
        else:  # few launches
            noted += zip(each, torch._foreach_norm(list(tensors), 1), strict=True)

    def not_finite(self, step: int) -> list[int]:
        """The indices whose tensors were not finite in a step, ascending. Waits for the device."""
        found = {index for indices, total in self._of_step.get(step, ()) if not total.isfinite() for index in indices}
        return sorted(found)
