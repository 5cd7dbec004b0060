"""In: the batches with which each rank trains a distributed module. Out: a line where two ranks have the same one.
Makes no collective (a rank may call its module alone) and does not change a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from codescent.base.device import is_capturing
from codescent.base.output import warn
from codescent.base.rank import Rank
from codescent.meeting.store import Store
from codescent.own.compared import Compared
from codescent.own.labels import LabelCounts
from codescent.own.sampler import BatchSampler
from codescent.strategies.collectives import in_backward


class Batches:
    """Compares the batches of the ranks, and the numbers of labels in them.

    The calls 1, 2, 4, 8, ... of the module are compared. Calls whose batch is not from `codescent.sampler` are counted
    a second time: of these, too, the calls 1, 2, 4, 8, ... are compared. So a later loader without it is seen.
    A module that torch.compile has compiled is not compared.

    Args:
        module: only its training calls are counted.
        optimizer: rank 0 looks at the comparisons after each of its steps, and before each call.
        averages: whether the gradients are averaged in each step. If not, numbers of labels need not be equal.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, store: Store, this_rank: Rank, *, averages: bool
    ) -> None:
        self._compared = Compared(store, this_rank)
        self._labels = LabelCounts(self._compared)
        self._calls = self._others = self._given = 0
        self._is_due, self._said_at = False, -1
        self._hooks: list[Any] = []
        if this_rank.world_size > 1:
            self._hooks.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            if averages:
                self._hooks.append(module.register_forward_hook(self._after_forward, with_kwargs=True))
            if this_rank.rank == 0:
                self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._compared.look()))

    def __deepcopy__(self, _memo: object) -> Batches:
        """What a copied module has as its hook: it compares nothing."""
        idle = object.__new__(type(self))
        idle._hooks, idle._is_due = [], False
        return idle

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling() or in_backward() or not (module.training and torch.is_grad_enabled()):
            return
        if not self._hooks:
            return
        self._compared.look()
        self._is_due = self._counts() and not is_capturing()
        if self._is_due:
            judge = partial(self._judge, self._calls, BatchSampler.begun)
            self._compared.put(f"batch {self._calls}", _hash(leaves([args, kwargs])), judge)

    def _after_forward(self, _module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if not torch.compiler.is_compiling() and self._is_due:
            self._is_due = False
            self._labels.watch(self._calls, list(leaves([args, kwargs])), output)

    def _counts(self) -> bool:
        """Count a call. Whether it is one that is compared."""
        is_other, self._given = self._given == BatchSampler.given, BatchSampler.given
        self._calls, self._others = self._calls + 1, self._others + is_other
        return _is_power_of_two(self._calls) or (is_other and _is_power_of_two(self._others))

    def _judge(self, call: int, epochs: int, batches: list[str]) -> None:
        """Say which ranks have equal batches: once, and once more after each epoch with the sampler."""
        ranks_of: dict[str, list[int]] = {}
        for rank, batch in enumerate(batches):
            ranks_of.setdefault(batch, []).append(rank)
        equal = [ranks for batch, ranks in ranks_of.items() if batch and len(ranks) > 1]
        if equal and epochs != self._said_at:
            self._said_at = epochs
            which = "; ".join(", ".join(map(str, ranks)) for ranks in equal)
            warn(
                f"codescent: training batch {call} is the same on ranks {which}: the ranks would do the same work "
                "twice. Give the DataLoader batch_sampler=codescent.sampler(dataset, batch_size)"
            )

    def close(self) -> None:
        """Look once more, and remove the hooks."""
        self._compared.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _hash(batch: Iterator[object]) -> str:
    """A hash of all tensors in a batch; "": it has none."""
    digest, found = hashlib.blake2b(digest_size=16), False
    for tensor in batch:
        if isinstance(tensor, torch.Tensor):
            whole = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(whole.view(torch.uint8).numpy().tobytes())
            found = found or tensor.numel() > 0
    return digest.hexdigest() if found else ""


def leaves(value: object) -> Iterator[object]:
    """What is in lists and dicts of any depth; of tensors, those that have values."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, Mapping):
        yield from leaves(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value
