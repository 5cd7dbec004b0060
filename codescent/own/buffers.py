"""In: a module's buffers, changed by forward passes on every rank. Out: the mean over the ranks, after each update.
Does not touch parameters, nor buffers that stay as they are."""

from __future__ import annotations

from weakref import ref

import torch
import torch.distributed as dist
from torch import nn


class AveragedBuffers:
    """Running statistics (batch norm's) of each rank's part of the batch, made one for all ranks.

    A part of the module that has changed any of its own buffers since the last time is taken to have changed its
    floating-point ones (batch norm's kernel changes its statistics without telling autograd, but counts its batches).
    The mean of running means is what one process would have; that of running variances lacks the variance between the
    ranks' parts, as each rank's normalisation does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.seen: dict[nn.Module, list[tuple[int, int]]] = {}
        self._look()

    def _look(self) -> list[nn.Module]:
        """The parts whose buffers are not as they were, in the module's order, which is that of every rank."""
        module = self.module()
        if module is None:
            return []
        now = {
            part: [(id(buffer), buffer._version) for buffer in part.buffers(recurse=False)] for part in module.modules()
        }
        now = {part: state for part, state in now.items() if state}
        changed = [part for part, state in now.items() if self.seen.get(part, state) != state]
        self.seen = now
        return changed

    @torch.no_grad()
    def average(self) -> None:
        """One all-reduce for each dtype that there is, where anything has changed. Collective."""
        changed = [b for part in self._look() for b in part.buffers(recurse=False) if b.is_floating_point()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in changed):
            buffers = [buffer for buffer in changed if buffer.dtype == dtype]
            together = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.all_reduce(together)
            together /= dist.get_world_size()
            means = torch.split(together, [buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))
        if changed:
            self._look()
