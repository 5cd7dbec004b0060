"""In: parameters that are replicated on every rank. Out: their gradients, averaged over ranks while backward runs.
Does not choose the parameters (distribute.py does). The all-reduces are those of strategies/ddp.py."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from codescent.base.device import offered
from codescent.base.dtypes import TRAINED
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.own.waits import note_call
from codescent.plan.wire import Wire
from codescent.strategies.collectives import at_end_of_backward, in_backward
from codescent.strategies.ddp import BucketedGradients, buckets
from codescent.strategies.wire import WireSum
from codescent.strategies.wire_buckets import CompressedBuckets

DTYPE_NAMES = {TORCH_DTYPE[name]: name for name in TRAINED}


def wide_name(dtype: torch.dtype) -> str:
    """The dtype of sums, "fp32" or "fp64", of tensors of a floating-point dtype."""
    return "fp64" if dtype == torch.float64 else "fp32"


class AveragedGradients:
    """Averages the gradients of some parameters over the ranks. When `backward` returns, they are means.

    Each backward pass that gives a gradient to any trained parameter of the module all-reduces every bucket before it
    ends. So ranks that use different parameters make the same collectives. A backward pass inside another one averages
    the gradients that exist so far; the outer pass adds to them.

    Args:
        module: has the parameters. A call of it discards what a failed backward pass has left.
        parameters: trainable parameters, of the dtypes in DTYPE_NAMES, in the module's order.
        others: trainable parameters of the module that are not averaged here.
        bucket_bytes: approximate size of a bucket.
        wire: how buckets travel. What it does not deliver is added to the next sum (error feedback).
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        bucket_bytes: int,
        wire: Wire,
    ) -> None:
        self.is_idle = False  # whether its module is a copy
        self.running: set[int] = set()  # backward passes that have begun and not ended
        self._lock = Lock()  # autograd has a thread for each device
        self.hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in ([*parameters, *others] if parameters else [])
        ]
        self.hooks.append(module.register_forward_pre_hook(self._on_forward))
        kinds = dict.fromkeys((parameter.dtype, parameter.device) for parameter in parameters)
        self.parts = [
            # Each dtype on each device has its own process group. A group matches collectives by their order, and
            # autograd may choose another order of them on another rank. Buckets of one have the same order on all
            # ranks. In an own thread (wire), sums need an own group, too.
            _OneKind(
                [p for p in parameters if (p.dtype, p.device) == kind],
                bucket_bytes,
                dist.new_group() if number or wire.method != "none" else None,
                wire,
            )
            for number, kind in enumerate(kinds)
        ]
        self.part_of: dict[torch.Tensor, _OneKind] = {p: part for part in self.parts for p in part.parameters}

    def __deepcopy__(self, _memo: object) -> AveragedGradients:
        """What a copied module has as its hook: it averages nothing, because the copy is not distributed."""
        idle = object.__new__(type(self))
        idle.is_idle, idle.running, idle.hooks, idle.parts, idle.part_of = True, set(), [], [], {}
        return idle

    def _on_forward(self, _module: nn.Module, _inputs: object) -> None:
        if not (torch.compiler.is_compiling() or in_backward() or self.is_idle):
            note_call()
        if self.running and not in_backward():  # during backward, a forward pass is a recomputation
            self._forget()

    def _forget(self) -> None:
        self.running.clear()
        for part in self.parts:
            part.forget()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """The first hook of each parameter. The next hook copies its gradient into a bucket."""
        with self._lock:
            self.running.add(at_end_of_backward(self.running, self._finish))
        part = self.part_of.get(parameter)
        if part is not None and not part.mark_used(parameter):
            self._forget()
            raise UserError(
                f"codescent.distribute: a parameter of shape {list(parameter.shape)} got a second gradient in one "
                "backward pass. Either a backward pass inside it uses the parameter, too (with torch.utils.checkpoint "
                "set use_reentrant=False), or the previous pass ended in an error and the module was not called since"
            )

    def _finish(self, number: int) -> None:
        """End a backward pass: finish the dtypes and devices in the same order on every rank."""
        self.running.discard(number)
        for part in self.parts:
            part.finish()

    def set_last(self, last: bool) -> None:
        """Set whether the next backward passes are averaged over ranks. If not, each rank adds its own gradients."""
        for part in self.parts:
            part.gradients.before_backward(last=last)

    def state(self) -> dict[str, torch.Tensor]:
        """What the wire has not delivered on this rank, by name. To load it, copy into these tensors."""
        parts = enumerate(self.parts)
        return {f"{number}.{name}": value for number, part in parts for name, value in part.gradients.state().items()}

    def close(self) -> None:
        """Remove the hooks from the parameters, and drop the references to process groups."""
        for hook in self.hooks:
            hook.remove()
        for part in self.parts:
            part.gradients.close()


class _OneKind:
    """Averages the gradients of parameters of one dtype on one device.

    In addition to gradients, ranks sum a counter for each parameter: how many ranks have its gradient. If no rank has
    one, the gradient stays None, as in one process: with a zero gradient, an optimizer would still decay the weight.

    A rank that has every gradient does not wait for the device: its counters are ones, which are there already. A rank
    that lacks a gradient sends its counters from page-locked memory, and waits only to read the sums.
    """

    def __init__(
        self, parameters: list[nn.Parameter], bucket_bytes: int, group: dist.ProcessGroup | None, wire: Wire
    ) -> None:
        self.parameters = parameters
        group = group or dist.group.WORLD
        assert group is not None
        self.world_size = group.size()
        dtype = parameters[0].dtype
        self.used: set[int] = set()
        self.index_of: dict[torch.Tensor, int] = {p: index for index, p in enumerate(parameters)}
        self.ones = torch.ones(len(parameters), dtype=dtype, device=parameters[0].device)
        self.counters = nn.Parameter(torch.zeros_like(self.ones))
        sent = DTYPE_NAMES[dtype] if wire.method == "none" else wide_name(dtype)
        filled = buckets([parameter.numel() for parameter in parameters], bucket_bytes, sent)
        reduced = [*parameters, self.counters]
        self.gradients = BucketedGradients(
            reduced,
            [*filled, [len(parameters)]],
            TORCH_DTYPE[sent],
            dtype,
            group,
            self._compressed(filled, sent, group, wire),
        )
        self.gradients.before_backward(last=True)

    def _compressed(
        self, filled: list[list[int]], sent: str, group: dist.ProcessGroup, wire: Wire
    ) -> CompressedBuckets | None:
        """The sums of the buckets in the format of the wire, and of the counters as they are; None: no wire."""
        if wire.method == "none" or self.world_size == 1:
            return None
        shapes = [[tuple(self.parameters[index].shape) for index in bucket] for bucket in filled]
        device = self.ones.device
        found = CompressedBuckets(wire, shapes, group, device, sent, since=0)
        found.sums.append(WireSum(Wire(), [tuple(self.ones.shape)], group, device, sent, found.channel))
        return found

    def mark_used(self, parameter: torch.Tensor) -> bool:
        """Note that a parameter has a gradient in this backward pass. Returns False for a second gradient."""
        index = self.index_of[parameter]
        self.used.add(index)
        return index not in self.gradients.complete

    def forget(self) -> None:
        """Discard a backward pass that ended in an error. Waits for running all-reduces, as buckets are reused."""
        for work in self.gradients.works:
            work.wait()
        self.gradients.works.clear()
        self.gradients.release()
        self.used.clear()

    def finish(self) -> None:
        """End a backward pass: wait for the all-reduces, and set each parameter's `grad` to the mean or to None."""
        used, self.used = self.used, set()
        if not self.gradients.last:
            return
        # A gradient of an earlier backward pass counts, too: it is part of the bucket's sum.
        mine = [index in used or parameter.grad is not None for index, parameter in enumerate(self.parameters)]
        self.counters.grad = self.ones if all(mine) else self._counted(mine)
        self.gradients.reduce()
        if self.world_size > 1:
            torch._foreach_div_(self.gradients.buffers, float(self.world_size))
        *means, counters = self.gradients.collect()
        used_anywhere = mine if all(mine) else [counter > 0 for counter in counters.tolist()]
        for parameter, mean, is_used in zip(self.parameters, means, used_anywhere, strict=True):
            parameter.grad = mean.to(parameter.dtype) if is_used else None
        self.counters.grad = None
        self.gradients.release()

    def _counted(self, mine: list[bool]) -> torch.Tensor:
        """One for each gradient that this rank has, else zero, on the device of the parameters."""
        device = self.ones.device
        found = torch.tensor(mine, dtype=self.ones.dtype, pin_memory=offered(device).pins)
        return found.to(device, non_blocking=True)
