"""In: a dataset's length, a global batch size, a seed. Out: this rank's samples of each step, for torch's DataLoader.
Does not read samples, and keeps no table: `data/loader.py` computes the permutations."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch

from codescent.base.errors import UserError
from codescent.data.loader import MOST_STEPS_AT_ONCE
from codescent.data.loader import Sampler as Order
from codescent.own.session import joined


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """What `codescent.sampler` returns: an epoch of batches each time that it is iterated over.

    Attributes:
        epoch: the number of the epoch that comes next, from 0.
    """

    def __init__(self, order: Order, start: int, stop: int) -> None:
        self.order, self.start, self.stop = order, start, stop
        self.epoch = self._first_step = 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.order.steps_per_epoch

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Let `epoch` come next, from its step `first_step` on: to go on where a checkpoint was saved."""
        if epoch < 0 or not 0 <= first_step <= len(self):
            raise UserError(
                f"codescent.sampler: epoch {epoch}, step {first_step}: must be at least 0, and the step at most "
                f"{len(self)}, the steps of an epoch"
            )
        self.epoch, self._first_step = epoch, first_step

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the epoch whose turn it is when the first one is asked for.

        Not before: torch's DataLoader makes two iterators where it has workers, and uses the second.
        """
        epoch, first = self.epoch, self._first_step
        self.epoch, self._first_step = epoch + 1, 0
        step, end = epoch * len(self) + first, (epoch + 1) * len(self)
        while step < end:
            count = min(MOST_STEPS_AT_ONCE, end - step)
            yield from self.order.indices_of_steps(step, count, self.start, self.stop).tolist()
            step += count


def sampler(dataset: Sized, batch_size: int, seed: int = 0) -> BatchSampler:
    """This rank's part of every batch, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

        loader = DataLoader(dataset, batch_sampler=codescent.sampler(dataset, batch_size=32))

    Each epoch is a permutation of the samples, a function of (seed, epoch), cut into steps of `batch_size`; each rank
    takes an equal part of a step. So a step has the same samples on any number of ranks, and the learning rate stays.
    The samples that fill no step are left out, others in every epoch. Each iteration is the next epoch; `set_epoch`
    chooses one.

    Args:
        dataset: anything with a length.
        batch_size: samples of a step, over all ranks.
        seed: any whole number.

    Raises:
        UserError: the batch does not divide among the ranks, or the dataset has fewer samples.
    """
    ranks = joined("sampler")
    count, world_size = len(dataset), ranks.world_size
    problems = []
    if batch_size < 1 or batch_size % world_size:
        lower = batch_size // world_size * world_size
        near = [str(size) for size in (lower, lower + world_size) if size > 0]
        problems.append(f"batch_size = {batch_size}: must divide among {world_size} rank(s): {' or '.join(near)}")
    if count < max(1, batch_size):
        problems.append(f"the dataset has {count} sample(s), fewer than one step of batch_size = {batch_size}")
    if problems:
        raise UserError(*(f"codescent.sampler: {problem}" for problem in problems))
    share = batch_size // world_size
    return BatchSampler(Order(seed, count, batch_size), ranks.rank * share, (ranks.rank + 1) * share)
