"""In: nothing. Out: the gradients of a rank that computes none: a parameter server.
Does not sum anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from codescent.strategies.strategy import Held

if TYPE_CHECKING:
    import torch


class NoGradients:
    """See Gradients."""

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """See Gradients."""

    def reduce(self) -> None:
        """See Gradients."""

    def collect(self) -> Sequence[torch.Tensor]:
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
