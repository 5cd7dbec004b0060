"""In: a module's buffers, changed by forward passes on every rank. Out: the mean over the ranks, after each update.
Does not touch parameters, nor buffers that stay as they are."""

from __future__ import annotations

import zlib
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn


class AveragedBuffers:
    """Running statistics (batch norm's) of each rank's samples, averaged over the ranks.

    If any buffer of a part has changed, all its floating-point ones count as changed: batch norm's kernel changes its
    statistics without telling autograd, but counts its batches. The mean of running means is that of one process; the
    mean of running variances lacks the variance between ranks, as each rank's normalisation does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.seen: dict[nn.Module, list[tuple[int, int]]] = {}
        self._look()

    def _parts(self) -> list[nn.Module]:
        module = self.module()
        return [part for part in module.modules() if any(True for _ in part.buffers(False))] if module else []

    def _look(self) -> list[nn.Module]:
        """The parts whose buffers have changed, in the module's order, which is that of every rank."""
        now = {
            part: [(id(buffer), buffer._version) for buffer in part.buffers(recurse=False)] for part in self._parts()
        }
        changed = [part for part, state in now.items() if self.seen.get(part, state) != state]
        self.seen = now
        return changed

    @torch.no_grad()
    def average(self) -> None:
        """One all-reduce for each dtype that there is, where a rank has changed any. Collective.

        The ranks agree first on what has changed, and a buffer whose shape is not the same on all of them is left out.
        """
        floating = [(p, b) for p in self._parts() for b in p.buffers(recurse=False) if b.is_floating_point()]
        if not floating:
            return
        mine = set(self._look())
        facts = [[int(part in mine), *_extremes(buffer)] for part, buffer in floating]
        flags = torch.tensor(facts, dtype=torch.int64)  # on the CPU: no device is waited for
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        agreed = [flag and most == -least for flag, most, least in flags.tolist()]
        changed = [buffer for (_, buffer), yes in zip(floating, agreed, strict=True) if yes]
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
