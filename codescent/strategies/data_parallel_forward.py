"""In: a model, a number of devices of this process. Out: a forward pass on all devices, by torch.nn.DataParallel.
Does not check whether the model and the run allow it (torch_data_parallel does). Frees replicas after a micro-batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


class DataParallelForward:
    """Split the samples of each forward pass over the first devices of this process, and add up the losses.

    Without a CUDA device `parallel` calls the module itself.
    """

    def __init__(self, part: nn.Module, num_devices: int) -> None:
        self.part = part
        self.parallel = nn.DataParallel(_OnOneDevice(part), list(range(num_devices)))
        self.samples: tuple[int, int, torch.Tensor] | None = None  # seed, step, the index of each sample

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: torch.Tensor) -> None:
        """Save the arguments for the next forward pass, which passes to each replica the indices of its samples."""
        self.samples = (seed, step, sample_ids_B)

    def forward(
        self, inputs: torch.Tensor, targets_BT: torch.Tensor | None = None, *, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """The sum of the losses of all samples, or their logits."""
        seed, step, ids_B = self.samples if self.part.training and self.samples else (0, 0, None)
        # No keywords: with keyword arguments torch would also call devices without samples, if samples are few.
        outputs: torch.Tensor = self.parallel(inputs, targets_BT, ids_B, seed, step, loss_scale)
        return outputs if targets_BT is None else outputs.sum()


class _OnOneDevice(nn.Module):
    """The module that DataParallel copies to each device.

    It calls `forward` of the part's class, because the strategy has replaced the part's own `forward`.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(
        self,
        inputs: torch.Tensor,
        targets_BT: torch.Tensor | None,
        sample_ids_B: torch.Tensor | None,
        seed: int,
        step: int,
        loss_scale: float,
    ) -> torch.Tensor:
        """The loss with shape [1], so that gathering concatenates the devices' losses; without targets, the logits."""
        part, kind = self.part, cast(Any, type(self.part))
        if sample_ids_B is not None:
            kind.set_dropout_context(part, seed, step, sample_ids_B)
        out: torch.Tensor = kind.forward(part, inputs, targets_BT, loss_scale=loss_scale)
        return out if targets_BT is None else out[None]
