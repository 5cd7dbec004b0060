"""In: a chunk of a model, a number of devices. Out: its forward pass on all of them, by torch.nn.DataParallel.
Does not decide whether that can be done (torch_data_parallel does) and keeps no replica after a micro-batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


class DataParallelForward:
    """Scatters calls of a module over the first devices of this process, and adds up their losses.

    Without a CUDA device `parallel` calls the module itself.
    """

    def __init__(self, part: nn.Module, num_devices: int) -> None:
        self.part = part
        self.parallel = nn.DataParallel(_OnOneDevice(part), list(range(num_devices)))
        self.samples: tuple[int, int, torch.Tensor] | None = None  # seed, step, the number of each sample

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: torch.Tensor) -> None:
        """Kept for the next forward pass, which gives each replica its own samples."""
        self.samples = (seed, step, sample_ids_B)

    def forward(
        self, inputs: torch.Tensor, targets_BT: torch.Tensor | None = None, *, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """The sum of the losses of all samples, or their logits."""
        seed, step, ids_B = self.samples if self.part.training and self.samples else (0, 0, None)
        # All by position: with keywords torch calls devices that get no sample, where there are fewer than devices.
        outputs: torch.Tensor = self.parallel(inputs, targets_BT, ids_B, seed, step, loss_scale)
        return outputs if targets_BT is None else outputs.sum()


class _OnOneDevice(nn.Module):
    """What DataParallel copies: it calls the forward pass of the module's class, which `forward` has replaced."""

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
        """A loss as [1], so that the devices' are gathered side by side; logits as they are."""
        part, kind = self.part, cast(Any, type(self.part))
        if sample_ids_B is not None:
            kind.set_dropout_context(part, seed, step, sample_ids_B)
        out: torch.Tensor = kind.forward(part, inputs, targets_BT, loss_scale=loss_scale)
        return out if targets_BT is None else out[None]
