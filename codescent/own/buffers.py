"""In: buffers that forward passes change (batch norm's statistics). Out: their means over ranks, after each step.
Does not change parameters, or buffers that no forward pass has changed."""

from __future__ import annotations

import zlib
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn


class AveragedBuffers:
    """Averages the buffers of a module over the ranks, such as the running statistics of batch norm.

    A change of a buffer shows in its version counter. Batch norm's kernel does not count changes of its statistics, but
    those of its number of batches. So if one buffer of a submodule has changed, all its floating-point buffers count as
    changed. The mean of running means is that of one process. The mean of running variances is smaller than that of
    one process by the variance between ranks; batch norm itself normalises by one rank's samples, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.seen = WeakKeyDictionary[nn.Module, list[tuple[int, int]]]()  # the module itself may be among them
        self._changed()

    def _parts(self) -> list[nn.Module]:
        module = self.module()
        if module is None:  # not `not module`: a compiled module has a length only if the module inside has one
            return []
        return [part for part in module.modules() if any(True for _ in part.buffers(False))]

    def _changed(self) -> list[nn.Module]:
        """The submodules whose buffers have changed since the last call, in the module's order."""
        now = {
            part: [(id(buffer), buffer._version) for buffer in part.buffers(recurse=False)] for part in self._parts()
        }
        changed = [part for part, state in now.items() if self.seen.get(part, state) != state]
        self.seen = WeakKeyDictionary(now)
        return changed

    @torch.no_grad()
    def average(self) -> None:
        """Average the buffers that any rank has changed, by one all-reduce for each dtype on each device. Collective.

        First the ranks agree which buffers have changed. A buffer whose shape or dtype differs between ranks is not
        averaged.
        """
        floating = [(p, b) for p in self._parts() for b in p.buffers(recurse=False) if b.is_floating_point()]
        if not floating:
            return
        mine = set(self._changed())
        facts = [[int(part in mine), *_extremes(buffer)] for part, buffer in floating]
        flags = torch.tensor(facts, dtype=torch.int64)  # on the CPU, so that the host does not wait for the device
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        agreed = [flag and most == -least for flag, most, least in flags.tolist()]
        changed = [buffer for (_, buffer), yes in zip(floating, agreed, strict=True) if yes]
        for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in changed):
            buffers = [buffer for buffer in changed if (buffer.dtype, buffer.device) == kind]
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            means = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))
        if changed:
            self._changed()  # the averages are not changes of a forward pass


def _extremes(buffer: torch.Tensor) -> tuple[int, int]:
    """A hash of a buffer's shape and dtype, and its negative. Their maxima over ranks show whether all ranks agree."""
    number = zlib.crc32(f"{list(buffer.shape)} {buffer.dtype}".encode())
    return number, -number
