"""In: the parts of a model, as strategies have divided them. Out: the object that sums their gradients over ranks.
Does not sum anything itself: ddp.py, shards.py, partial_gradients.py and others do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from codescent.strategies import ORDER
from codescent.strategies.common_sums import copied
from codescent.strategies.partial_gradients import CopiedGradients, PartialGradients
from codescent.strategies.strategy import Gradients, Held, ThisRank


def gradients_of(parts: Sequence[nn.Module], this_rank: ThisRank) -> Gradients:
    """The object that sums gradients over ranks; it also sums partial gradients over the ranks of their axes.

    `parts`: of this rank; none: it computes no gradients.
    """
    if not parts:
        return NoGradients()
    owner: Gradients | None = None
    for strategy in ORDER:
        owner = strategy.gradients(parts, this_rank, owner)
    assert owner is not None, "no strategy sums the gradients"
    for axis in dict.fromkeys(axis for tensor in this_rank.trained for axis in tensor.partial):
        indices = [number for number, tensor in enumerate(this_rank.trained) if axis in tensor.partial]
        owner = PartialGradients(owner, indices, this_rank.groups[axis])
    if tensors := copied(this_rank.plan, this_rank.tensors):
        indices = [number for number, tensor in enumerate(this_rank.trained) if tensor in tensors]
        owner = CopiedGradients(owner, indices, this_rank.groups["tp"])
    return owner


class NoGradients:
    """Of a rank that computes none, such as a parameter server. See Gradients."""

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """See Gradients."""

    def reduce(self) -> None:
        """See Gradients."""

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients."""
        return ()

    def not_finite(self, step: int) -> Sequence[int] | None:
        """See Gradients."""
        return ()

    def release(self) -> None:
        """See Gradients."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """See Gradients."""
        return {}

    def held(self) -> Held:
        """See Gradients."""
        return Held()

    def close(self) -> None:
        """See Gradients."""
