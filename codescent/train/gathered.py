"""In: a divided part of a model. Out: a module of the same part that reads whole weights where ranks share them.
Does not run it. Where no weight is shared it is the part itself, so a step changes what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from codescent import models
from codescent.base.dtensors import is_dtensor
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.strategies import ThisRank, active

SHARDING = "dp_shard"
"""The axis over which fully_shard divides weights."""


class GatheredPart:
    """A part with whole weights, for forward passes that ranks take alone.

    fully_shard gathers weights in each forward pass, on all ranks at once. Ranks that write answers take other numbers
    of passes. So they gather all weights once, and have them until the block ends.

    Args:
        part: of this rank, on its device.
        this_rank: whose other strategies divide the second module.
    """

    def __init__(self, part: nn.Module, this_rank: ThisRank) -> None:
        self.part, self.is_shared = part, any(map(is_dtensor, part.parameters()))
        self._dtype = TORCH_DTYPE[this_rank.plan.work.precision]
        self._whole = self._second(this_rank) if self.is_shared else part

    @staticmethod
    def _second(this_rank: ThisRank) -> nn.Module:
        """A module without memory, which all strategies but that of `SHARDING` have divided."""
        module = models.construct(this_rank.plan.model, "meta")
        for strategy in active(this_rank.plan):
            if strategy.axis != SHARDING:
                strategy.divide(module, this_rank)
        return module.eval()

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """A block with the module. Collective over the ranks that share weights."""
        if not self.is_shared:
            yield self.part
            return
        names = dict(self._whole.named_parameters())
        try:
            with torch.no_grad():
                for name, parameter in self.part.named_parameters():
                    self._put(name, self._gathered(parameter))
            yield self._whole
        finally:
            for name, empty in names.items():
                self._put(name, empty.data)

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(parameter):
            return parameter.detach()
        whole: torch.Tensor = parameter.detach().to(self._dtype).full_tensor()  # type: ignore[attr-defined]
        return whole

    def _put(self, name: str, value: torch.Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self._whole.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
