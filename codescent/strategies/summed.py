"""In: gradients that another one looks after, ranks that each know a part of some of them. Out: these, summed.
Does not decide which (the strategies do)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from codescent.strategies.strategy import Gradients


class SummedGradients:
    """Gradients of parameters that the ranks of a group hold alike and of which each knows a part: one all-reduce.

    Args:
        before: who looks after the gradients until then.
        indices: which of `before.collect()` are added.
        group: over these ranks.
    """

    def __init__(self, before: Gradients, indices: Sequence[int], group: dist.ProcessGroup) -> None:
        self.before, self.indices = before, list(indices)
        self.group: dist.ProcessGroup | None = group
        self.collected: Sequence[torch.Tensor] = ()

    def before_backward(self, *, last: bool, chunk: int = 0) -> None:
        """See Gradients."""
        self.before.before_backward(last=last, chunk=chunk)

    def reduce(self) -> None:
        """See Gradients."""
        self.before.reduce()
        # Kept: a parameter that took no part in the loss has zeros that are made anew each time.
        self.collected = self.before.collect()
        parts = [self.collected[index] for index in self.indices]
        if len(parts) == 1 and parts[0].is_contiguous():
            dist.all_reduce(parts[0], group=self.group)
            return
        together = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(together, group=self.group)
        for part, summed in zip(parts, torch.split(together, [part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients."""
        return self.collected

    def release(self) -> None:
        """See Gradients."""
        self.collected = ()
        self.before.release()

    def close(self) -> None:
        """See Gradients."""
        self.before.close()
        self.group = None
