"""In: a dataset's length, a global batch size, a seed. Out: this rank's sample indices of each step, for a DataLoader:
of training, shuffled, or of a validation, in order.
Does not read samples, and does not store permutations: data/order.py computes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized
from typing import ClassVar

import torch

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.data.loader import MOST_STEPS_AT_ONCE
from codescent.data.order import Sampler as Order
from codescent.own.arguments import DATASET, WHOLE, public
from codescent.own.session import joined


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """The batch sampler that `codescent.sampler` returns. Each iteration over it is one epoch of batches.

    Attributes:
        epoch: number of the next epoch, from 0.
        given: batches that all of them in this process have yielded.
        begun: epochs that all of them in this process have begun.
    """

    given: ClassVar[int] = 0
    begun: ClassVar[int] = 0

    def __init__(self, order: Order, start: int, stop: int) -> None:
        self.order, self.start, self.stop = order, start, stop
        self.epoch = self._first_step = 0

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return self.order.steps_per_epoch

    @public("codescent.sampler.set_epoch", epoch=WHOLE, first_step=WHOLE)
    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Set the next epoch and its first step, to continue from a checkpoint."""
        if epoch < 0 or not 0 <= first_step <= len(self):
            raise UserError(
                f"codescent.sampler: epoch {epoch}, step {first_step}: must be at least 0, and the step at most "
                f"{len(self)}, the steps of an epoch"
            )
        self.epoch, self._first_step = epoch, first_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next epoch.

        The epoch is chosen when the first batch is read, not when the iterator is created: a DataLoader with workers
        creates two iterators and uses only the second.

        Raises:
            UserError: a DataLoader has it as sampler=, and so would take its batches for samples.
        """
        caller = sys._getframe(1).f_locals.get("self")  # whoever reads the first batch
        if isinstance(caller, torch.utils.data.BatchSampler):
            raise UserError(
                "codescent.sampler: it was given as sampler=, so a batch of batches would be one step: give "
                "DataLoader(dataset, batch_sampler=codescent.sampler(dataset, batch_size)), without batch_size="
            )
        epoch, first = self.epoch, self._first_step
        self.epoch, self._first_step = epoch + 1, 0
        BatchSampler.begun += 1
        step, end = epoch * len(self) + first, (epoch + 1) * len(self)
        while step < end:
            count = min(MOST_STEPS_AT_ONCE, end - step)
            for indices in self.order.indices_of_steps(step, count, self.start, self.stop).tolist():
                BatchSampler.given += 1
                yield indices
            step += count


@public("codescent.sampler", dataset=DATASET, batch_size=WHOLE, seed=WHOLE)
def sampler(dataset: Sized, batch_size: int, seed: int = 0) -> BatchSampler:
    """Create a batch sampler of this rank's part of every batch, for `torch.utils.data.DataLoader`.

        loader = DataLoader(dataset, batch_sampler=codescent.sampler(dataset, batch_size=32))

    Each epoch is a permutation of the samples, a function of (seed, epoch), cut into steps of `batch_size` samples.
    Each rank takes an equal part of a step. So a step has the same samples on any number of ranks, and the learning
    rate need not change. Samples after the last full step are left out; they are different ones in every epoch. Each
    iteration is the next epoch; `set_epoch` sets it.

    Args:
        dataset: any object with a length.
        batch_size: number of samples in a step, over all ranks.
        seed: any integer.

    Raises:
        UserError: the batch size is not a multiple of the number of ranks, or the dataset is smaller than a batch.
    """
    ranks = joined("sampler")
    count, world_size, batch_size = len(dataset), ranks.world_size, int(batch_size)
    problems = list(_undivided(batch_size, world_size))
    if count < max(1, batch_size):
        problems.append(f"the dataset has {counted(count, 'sample')}, fewer than one step of batch_size = {batch_size}")
    if problems:
        raise UserError(*(f"codescent.sampler: {problem}" for problem in problems))
    share = batch_size // world_size
    return BatchSampler(Order(int(seed), count, batch_size), ranks.rank * share, (ranks.rank + 1) * share)


class OrderedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """The batch sampler that `codescent.validation_sampler` returns. Each iteration yields the same batches.

    Attributes:
        samples: the samples of this rank.
    """

    def __init__(self, samples: range, steps: int) -> None:
        self.samples, self._steps = samples, steps

    def __len__(self) -> int:
        """The number of batches, equal on every rank."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches in order. Their sizes differ by 1 at most."""
        for step in range(self._steps):
            yield list(_part(self.samples, step, self._steps))


@public("codescent.validation_sampler", dataset=DATASET, batch_size=WHOLE)
def validation_sampler(dataset: Sized, batch_size: int) -> OrderedBatchSampler:
    """Create a batch sampler that gives every sample once, in order: for validation and prediction.

        loader = DataLoader(dataset, batch_sampler=codescent.validation_sampler(dataset, batch_size=32))

    Each rank has consecutive samples: rank 0 the first ones, the last rank the last ones. So tensors that the ranks
    compute from their samples are in the order of the dataset after `ranks.gather`, called once after the loop. No
    sample is repeated or left out: a rank may have one sample more than another. Use `ranks.mean(..., count=)`.

    All ranks have equally many batches, so collectives in the loop are safe ("zero1" to "zero3" gather weights in
    every forward pass).

    Args:
        dataset: any object with a length.
        batch_size: largest number of samples in a step, over all ranks.

    Raises:
        UserError: the batch size is not a multiple of the number of ranks, or a rank would have an empty batch.
    """
    ranks = joined("validation_sampler")
    count, world_size, batch_size = len(dataset), ranks.world_size, int(batch_size)
    problems = list(_undivided(batch_size, world_size))
    if count < world_size:
        problems.append(f"the dataset has {counted(count, 'sample')}, fewer than {counted(world_size, 'rank')}")
    elif batch_size == world_size and count % world_size:
        problems.append(
            f"batch_size = {batch_size}: one sample for each of {world_size} ranks, but {count} samples do not divide "
            f"among them: {2 * world_size} or more"
        )
    if problems:
        raise UserError(*(f"codescent.validation_sampler: {problem}" for problem in problems))
    longest = -(-count // world_size)
    return OrderedBatchSampler(_part(range(count), ranks.rank, world_size), -(-longest * world_size // batch_size))


def _part(samples: range, index: int, parts: int) -> range:
    """One of several consecutive parts, whose lengths differ by 1 at most."""
    return samples[index * len(samples) // parts : (index + 1) * len(samples) // parts]


def _undivided(batch_size: int, world_size: int) -> Iterator[str]:
    """A problem if the batch does not divide among the ranks."""
    if batch_size < 1 or batch_size % world_size:
        lower = batch_size // world_size * world_size
        near = [str(size) for size in (lower, lower + world_size) if size > 0]
        yield f"batch_size = {batch_size}: must divide among {counted(world_size, 'rank')}: {' or '.join(near)}"
