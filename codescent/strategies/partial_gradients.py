"""In: a rank's gradients, and which are partial: several ranks of tp or pp hold the same tensor, and each computes
one term of its gradient (pp: an embedding that first and last stage share). Out: the partial gradients, all-reduced.
Also gradients that the ranks of tp compute alike up to rounding: the first rank's, on all of them.
Does not decide which gradients these are: `TensorPlan.partial` and `common_sums.copied` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from codescent.strategies.collectives import all_reduce, broadcast
from codescent.strategies.strategy import Gradients, Held


class PartialGradients:
    """Wrap gradients: sum those of `before.collect()` at `indices` over the ranks of a group, by one all-reduce."""

    def __init__(self, before: Gradients, indices: Sequence[int], group: dist.ProcessGroup) -> None:
        self.before, self.indices = before, list(indices)
        self.group: dist.ProcessGroup | None = group
        self.collected: Sequence[torch.Tensor] = ()

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """See Gradients."""
        self.before.before_backward(last=last, chunk=chunk, step=step)

    def reduce(self) -> None:
        """See Gradients."""
        self.before.reduce()
        # Saved, because `collect` returns new zeros each time for a parameter that did not contribute to the loss.
        self.collected = self.before.collect()
        parts = [self.collected[index] for index in self.indices]
        if len(parts) == 1 and parts[0].is_contiguous():
            self._exchange(parts[0])
            return
        together = torch.cat([part.reshape(-1) for part in parts])
        self._exchange(together)
        for part, summed in zip(parts, torch.split(together, [part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def _exchange(self, gradients: torch.Tensor) -> None:
        all_reduce(gradients, group=self.group)

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients."""
        return self.collected

    def not_finite(self, step: int) -> Sequence[int] | None:
        """See Gradients. Of partial gradients other ranks' terms may be added."""
        return self.before.not_finite(step)

    def release(self) -> None:
        """See Gradients."""
        self.collected = ()
        self.before.release()

    def state(self) -> Mapping[str, torch.Tensor]:
        """See Gradients."""
        return self.before.state()

    def held(self) -> Held:
        """See Gradients."""
        found = self.before.held()
        found.gradients += self.collected
        return found

    def close(self) -> None:
        """See Gradients."""
        self.before.close()
        self.group = None


class CopiedGradients(PartialGradients):
    """Wrap gradients: those of `before.collect()` at `indices` become those of the group's first rank."""

    def _exchange(self, gradients: torch.Tensor) -> None:
        broadcast(gradients, group=self.group, group_src=0)
