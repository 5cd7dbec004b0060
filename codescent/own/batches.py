"""In: the first batch with which each rank trains a distributed module. Out: a line where two ranks have the same one.
Makes no collective (a rank may call its module alone) and does not change a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import nn

from codescent.base.output import warn
from codescent.base.rank import Rank
from codescent.meeting.store import Store


class FirstBatches:
    """Compares the first batches of the ranks. Each rank writes a hash of its batch to the store.

    Rank 0 looks at each step whether all ranks have written theirs, and never waits for one. A module that
    torch.compile has compiled is not compared.
    """

    count: ClassVar[int] = 0  # of modules that this process has distributed: every rank distributes the same ones

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, store: Store, this_rank: Rank) -> None:
        FirstBatches.count += 1
        self._key, self._store, self._rank = f"codescent_first_batch {self.count}", store, this_rank
        self._hooks: list[Any] = []
        self._is_done = False  # torch does not let a step's hook remove itself
        if this_rank.world_size > 1:
            self._hooks.append(module.register_forward_pre_hook(self._on_forward, with_kwargs=True))
            if this_rank.rank == 0:
                self._hooks.append(optimizer.register_step_post_hook(self._on_step))

    def _on_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        self._hooks.pop(0).remove()
        with suppress(RuntimeError):  # rank 0, which serves the store, has ended
            self._store.set(f"{self._key} {self._rank.rank}", _hash([args, kwargs]))

    def _on_step(self, *_: object) -> None:
        keys = [f"{self._key} {rank}" for rank in range(self._rank.world_size)]
        if self._is_done or not self._store.check(keys):
            return
        self._is_done = True
        ranks_of: dict[bytes, list[int]] = {}
        for rank, batch in enumerate(self._store.multi_get(keys)):
            ranks_of.setdefault(batch, []).append(rank)
        if equal := [ranks for batch, ranks in ranks_of.items() if batch and len(ranks) > 1]:
            which = "; ".join(", ".join(map(str, ranks)) for ranks in equal)
            warn(
                f"codescent: the first training batch is the same on ranks {which}: the ranks would do the same work "
                "twice. Give the DataLoader batch_sampler=codescent.sampler(dataset, batch_size)"
            )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _hash(value: object) -> str:
    """A hash of all tensors in a batch; "": it has none."""
    digest, found = hashlib.blake2b(digest_size=16), False
    for tensor in _tensors(value):
        whole = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(whole.view(torch.uint8).numpy().tobytes())
        found = found or tensor.numel() > 0
    return digest.hexdigest() if found else ""


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
