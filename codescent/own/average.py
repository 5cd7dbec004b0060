"""In: parameters that every rank holds whole. Out: their gradients, averaged over the ranks while backward runs.
Does not choose the parameters and does not send anything itself: `strategies/ddp.py` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from codescent.base.dtypes import TRAINED
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.strategies.collectives import at_end_of_backward, in_backward
from codescent.strategies.ddp import BucketedGradients, buckets

DTYPE_NAMES = {TORCH_DTYPE[name]: name for name in TRAINED}


class AveragedGradients:
    """When `backward` returns, the gradients of these parameters are means over the ranks.

    All are sent at the end of each backward pass that gives a trained parameter of the module a gradient: so ranks that
    use different parameters meet. A pass inside another averages what is there so far, to which the outer one adds.

    Args:
        module: theirs. A call of it forgets what a failed backward pass has left.
        parameters: trainable ones, of the dtypes in DTYPE_NAMES, in the module's order.
        others: parameters of the module that are trained and not averaged.
        bucket_bytes: size of a bucket, about.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        bucket_bytes: int,
    ) -> None:
        self.running: set[int] = set()  # backward passes that have begun and not ended
        self.hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for parameter in ([*parameters, *others] if parameters else [])
        ]
        self.hooks.append(module.register_forward_pre_hook(self._begin))
        kinds = dict.fromkeys(parameter.dtype for parameter in parameters)
        self.parts = [
            # A group matches collectives by their order, which autograd may choose otherwise on another rank: buckets
            # of one dtype leave in one order, so each dtype has a group of its own.
            _OneDtype([p for p in parameters if p.dtype == kind], bucket_bytes, dist.new_group() if number else None)
            for number, kind in enumerate(kinds)
        ]
        self.part_of: dict[torch.Tensor, _OneDtype] = {p: part for part in self.parts for p in part.parameters}

    def _begin(self, _module: nn.Module, _inputs: object) -> None:
        if self.running and not in_backward():  # inside of one, the module is computed once more
            self._forget()

    def _forget(self) -> None:
        self.running.clear()
        for part in self.parts:
            part.forget()

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Each parameter's first hook: before its gradient goes into a bucket."""
        self.running.add(at_end_of_backward(self.running, self._finish))
        part = self.part_of.get(parameter)
        if part is not None and not part.arrived(parameter):
            self._forget()
            raise UserError(
                f"codescent.distribute: a parameter of shape {list(parameter.shape)} got a second gradient in one "
                "backward pass: one inside another (torch.utils.checkpoint: take use_reentrant=False) uses it, too; "
                "or the pass before ended in an error, and the module was not called since"
            )

    def _finish(self, number: int) -> None:
        """The end of a backward pass: every part, in the same order on every rank."""
        self.running.discard(number)
        for part in self.parts:
            part.finish()

    def set_last(self, last: bool) -> None:
        """Say whether the next backward passes send; else each rank adds for itself."""
        for part in self.parts:
            part.gradients.before_backward(last=last)

    def close(self) -> None:
        """Let go of the parameters and process groups."""
        for hook in self.hooks:
            hook.remove()
        for part in self.parts:
            part.gradients.close()


class _OneDtype:
    """The gradients of parameters of one dtype.

    A mark for each parameter travels, too: how many ranks have its gradient. One that no rank has stays None, as in one
    process: an optimizer would decay a weight whose gradient is zero. Only a rank that lacks a gradient reads the
    marks, so a device is not waited for where all are used.
    """

    def __init__(self, parameters: list[nn.Parameter], bucket_bytes: int, group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        group = group or dist.group.WORLD
        assert group is not None
        self.world_size = group.size()
        dtype = parameters[0].dtype
        self.used: set[int] = set()
        self.index_of: dict[torch.Tensor, int] = {p: index for index, p in enumerate(parameters)}
        self.marks = nn.Parameter(torch.zeros(len(parameters), dtype=dtype, device=parameters[0].device))
        filled = buckets([parameter.numel() for parameter in parameters], bucket_bytes, DTYPE_NAMES[dtype])
        travelling = [*parameters, self.marks]
        self.gradients = BucketedGradients(travelling, [*filled, [len(parameters)]], dtype, dtype, group)
        self.gradients.before_backward(last=True)

    def arrived(self, parameter: torch.Tensor) -> bool:
        """Note whose gradient is about to go into its bucket; False: this pass has put one there before."""
        index = self.index_of[parameter]
        self.used.add(index)
        return index not in self.gradients.complete

    def forget(self) -> None:
        """Forget a pass that ended in an error. Buckets on their way are waited for, since they are used again."""
        for work in self.gradients.works:
            work.wait()
        self.gradients.works.clear()
        self.gradients.release()
        self.used.clear()

    def finish(self) -> None:
        """The end of a backward pass: wait for what is under way, and put the means where optimizers look."""
        used, self.used = self.used, set()
        if not self.gradients.last:
            return
        # What an earlier backward pass has left counts, too: it is in the bucket's sum.
        mine = [index in used or parameter.grad is not None for index, parameter in enumerate(self.parameters)]
        self.marks.grad = torch.tensor(mine, dtype=self.marks.dtype, device=self.marks.device)
        self.gradients.reduce()
        if self.world_size > 1:
            torch._foreach_div_(self.gradients.buffers, float(self.world_size))
        *means, marks = self.gradients.collect()
        anyone = mine if all(mine) else [mark > 0 for mark in marks.tolist()]
        for parameter, mean, somebody in zip(self.parameters, means, anyone, strict=True):
            parameter.grad = mean if somebody else None
        self.marks.grad = None
        self.gradients.release()
