"""In: a module's buffers, changed by forward passes on every rank. Out: the mean over the ranks, after each update.
Does not touch parameters, nor buffers that stay as they are."""

from __future__ import annotations

import zlib
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
        """One all-reduce for each dtype that there is, where a rank has changed any. Collective.

        The ranks agree first on what has changed, and a buffer whose shape is not the same on all of them is left out.
        """
        module = self.module()
        parts = [part for part in module.modules() if any(True for _ in part.buffers(recurse=False))] if module else []
        floating = [(p, b) for p in parts for b in p.buffers(recurse=False) if b.is_floating_point()]
        if not floating:
            return
        mine = set(self._look())
        facts = [[int(part in mine), *_extremes(buffer)] for part, buffer in floating]
        flags = torch.tensor(facts, dtype=torch.int64)  # on the CPU: no device is waited for
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        changed = [
            buffer
            for (_, buffer), (flag, most, least) in zip(floating, flags.tolist(), strict=True)
            if flag and most == -least
        ]
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


def _extremes(buffer: torch.Tensor) -> tuple[int, int]:
    """A number of a buffer's shape and dtype, and its negative: the ranks' largest of both tell whether all agree."""
    number = zlib.crc32(f"{list(buffer.shape)} {buffer.dtype}".encode())
    return number, -number
