"""In: a sample source, a seed, this rank's positions in the global batch. Out: this rank's batches, read ahead.
Does not copy batches to a device. Does not store a sample order: it is computed from the seed and the step number."""

from __future__ import annotations

import hashlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from codescent.base.errors import UserError
from codescent.data.samples import Numbers, Samples, Source

NUM_ROUNDS = 10
MOST_STEPS_AT_ONCE = 64  # a longer read is not cheaper per step, and the first step waits for the first read
MOST_TOKENS_AT_ONCE = 1 << 22
Places = npt.NDArray[np.uint64]
PASSES_AHEAD = 2  # of an evaluation: one waits, one is being read


class Sampler:
    """The order of the samples. An epoch is a permutation of them without replacement, cut into whole steps.

    Position i of step s is sample P(s mod E * B + i). B is the global batch size over all ranks, E = num_samples // B
    the number of steps of an epoch, P the permutation of epoch s // E. Each epoch skips the last num_samples mod B
    samples of its permutation, so that a step never spans two permutations and never contains a sample twice.

    Raises UserError: the split has fewer samples than one step needs.
    """

    def __init__(self, seed: int, num_samples: int, global_batch_size: int) -> None:
        if num_samples < 1:
            raise UserError(
                "the corpus is shorter than one sample (data.seq_len + 1 tokens): lower data.seq_len or give more text"
            )
        if num_samples < global_batch_size:
            raise UserError(
                f"the corpus has {num_samples} samples of data.seq_len tokens, fewer than one step of "
                f"train.global_batch_size = {global_batch_size}: lower one of the two or give more text"
            )
        self.seed, self.num_samples, self.global_batch_size = seed, num_samples, global_batch_size
        self.steps_per_epoch = num_samples // global_batch_size

    def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample numbers of `count` steps from `first` on, at positions [start, stop): int64 [count, stop - start]."""
        if first < 0 or not 0 <= start <= stop <= self.global_batch_size:
            raise IndexError(f"step {first}, positions [{start}, {stop}) of {self.global_batch_size}")
        rows: list[npt.NDArray[np.int64]] = []
        step = first
        while step < first + count:
            epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
            steps = min(first + count - step, self.steps_per_epoch - step_of_epoch)
            firsts = np.arange(step_of_epoch, step_of_epoch + steps)[:, None] * self.global_batch_size
            places = (firsts + np.arange(start, stop)).ravel().astype(np.uint64)
            numbers = permute(places, self.num_samples, _round_keys(self.seed, epoch))
            rows.append(numbers.astype(np.int64).reshape(steps, stop - start))
            step += steps
        return np.concatenate(rows)


def permute(places: Places, count: int, keys: Places) -> Places:
    """A pseudo-random permutation of [0, count), evaluated at `places` (each < count), without a table.

    A Feistel network permutes the smallest power of two >= `count` (its halves may differ by a bit). Results outside
    [0, count) go through the network again: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002). On average there are less than two passes. `keys` has NUM_ROUNDS numbers.
    """
    bits = max(2, (count - 1).bit_length())
    out = _feistel(places, bits, keys)
    while (outside := np.flatnonzero(out >= count)).size:
        out[outside] = _feistel(out[outside], bits, keys)
    return out


def _feistel(places: Places, bits: int, keys: Places) -> Places:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = places & low_mask, places >> low_bits
    for turn in range(0, NUM_ROUNDS, 2):
        low = low ^ (_mixed(high, keys[turn]) & low_mask)
        high = high ^ (_mixed(low, keys[turn + 1]) & high_mask)
    return (high << low_bits) | low


def _mixed(values: Places, key: np.uint64) -> Places:
    """Hash each value with a key: upper half of SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> npt.NDArray[Any]:
    """The round keys of an epoch's permutation: BLAKE2b of (seed, epoch, round)."""
    digests = (hashlib.blake2b(f"{seed} {epoch} {turn}".encode(), digest_size=8).digest() for turn in range(NUM_ROUNDS))
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B samples as tensors; see `Samples`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Samples) -> Batch:
        """The samples as tensors, in the same memory."""
        extras = {name: torch.from_numpy(array) for name, array in samples.extras.items()}
        return cls(torch.from_numpy(samples.inputs), torch.from_numpy(samples.targets), extras)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        extras = {name: change(tensor) for name, tensor in self.extras.items()}
        return Batch(change(self.inputs), change(self.targets), extras)

    def __getitem__(self, rows: slice) -> Batch:
        return self._each(lambda tensor: tensor[rows])

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Copy to a device, asynchronously from page-locked memory; input vectors are converted to `dtype`."""
        batch = self._each(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(batch, inputs=batch.inputs.to(dtype)) if batch.inputs.is_floating_point() else batch

    def pinned(self) -> Batch:
        """Copy to page-locked memory."""
        return self._each(torch.Tensor.pin_memory)


@dataclass(frozen=True)
class Portion:
    """One rank's micro-batches of a step.

    `losses` counts the step's losses on all ranks: the mean divides by it. `own_losses` counts those of the replica, if
    replicas train apart; else it is `losses`. `not_finite` names the samples that hold NaN or infinity.
    """

    batches: list[Batch]
    losses: int
    own_losses: int
    not_finite: tuple[str, ...] = ()


class ReadAhead(ABC):
    """Reads portions of one rank, step after step, in a thread that is some steps ahead.

    Args:
        prefetch: largest number of steps read ahead; 0: there is no thread, and `next` reads.
        steps_at_once: how many steps the thread reads in one go.
        stop: number of the step after the last; None: there is no last step.
    """

    def __init__(self, first_step: int, prefetch: int, steps_at_once: int = 1, stop: int | None = None) -> None:
        self._next_step, self._stop = first_step, stop
        self._closed = threading.Event()
        self._received: deque[Portion | Exception] = deque()
        # Half of the prefetched steps wait in the queue; the thread reads or holds the other half.
        self._steps_at_once = steps_at_once
        self._ready: queue.Queue[list[Portion | Exception]] = queue.Queue(1)
        self._thread = threading.Thread(target=self._read_ahead, args=(first_step,), name="loader", daemon=True)
        self._has_thread = prefetch > 0
        if self._has_thread:
            self._thread.start()

    @abstractmethod
    def _read(self, first: int, count: int) -> list[Portion]:
        """This rank's parts of `count` steps from `first` on."""

    def next(self) -> Portion:
        """This rank's part of the next step. Raises what `Source.read` raises, or ValueError: the loader is closed, or
        the last step is behind."""
        if self._closed.is_set():
            raise ValueError("the loader is closed")
        if self._next_step == self._stop:
            raise ValueError(f"there are {self._stop} steps")
        if not self._received:
            self._received.extend(self._ready.get() if self._has_thread else self._attempt(self._next_step, 1))
        outcome = self._received[0]
        if isinstance(outcome, Exception):
            raise outcome
        self._received.popleft()
        self._next_step += 1
        return outcome

    def close(self) -> None:
        """End the thread and wait for it. Further calls do nothing."""
        self._closed.set()
        while self._has_thread and self._thread.is_alive():
            try:
                self._ready.get_nowait()  # the thread may be blocked in `put`
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self, step: int) -> None:
        while not self._closed.is_set() and step != self._stop:
            outcomes = self._attempt(step, self._steps_at_once)
            self._ready.put(outcomes)
            step += len(outcomes)
            if isinstance(outcomes[-1], Exception):
                return

    def _attempt(self, first: int, count: int) -> list[Portion | Exception]:
        """The portions of `count` steps. If a step cannot be read: the portions before it, then its error."""
        try:
            return list(self._read(first, count))
        except Exception as error:  # `next` raises it at this step
            if count == 1:
                return [error]
        outcomes: list[Portion | Exception] = []
        for step in range(first, first + count):
            outcomes += self._attempt(step, 1)
            if isinstance(outcomes[-1], Exception):
                break
        return outcomes


class Loader(ReadAhead):
    """Reads the micro-batches of one rank for training.

    The thread reads several steps at a time: every read takes a core and the interpreter lock from the training step.

    Args:
        sample_numbers: approximate count of numbers (tokens, vector components) in a sample.
        positions: for each micro-batch of this rank its (start, stop) in the global batch; they are consecutive.
        prefetch: see `ReadAhead`.
        pin_memory: return page-locked tensors, for asynchronous copies to a CUDA device.
        replica: (start, stop) in the global batch of the samples of this rank's replica; None: all.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        sample_numbers: int,
        positions: Sequence[tuple[int, int]],
        first_step: int,
        prefetch: int,
        pin_memory: bool = False,
        replica: tuple[int, int] | None = None,
    ) -> None:
        self._source, self._sampler, self._positions = source, sampler, tuple(positions)
        self._replica = replica
        self._pin_memory = pin_memory
        samples = self._positions[-1][1] - self._positions[0][0] if self._positions else 0
        most = max(1, MOST_TOKENS_AT_ONCE // max(1, samples * sample_numbers))
        super().__init__(first_step, prefetch, max(1, min(prefetch // 2, MOST_STEPS_AT_ONCE, most)))

    def _read(self, first: int, count: int) -> list[Portion]:
        losses = own = self._losses(first, count, 0, self._sampler.global_batch_size)
        if self._replica is not None:
            own = self._losses(first, count, *self._replica)
        if not self._positions:
            return [Portion([], *numbers) for numbers in zip(losses, own)]
        start, stop = self._positions[0][0], self._positions[-1][1]
        numbers = self._sampler.indices_of_steps(first, count, start, stop)
        samples = self._source.read(numbers.ravel())
        batch, size = _batch(samples, self._pin_memory), stop - start
        offsets = [step * size - start for step in range(count)]
        parts = ([batch[begin + offset : end + offset] for begin, end in self._positions] for offset in offsets)
        wrong = [
            tuple(what for row, what in samples.not_finite.items() if row // size == step) for step in range(count)
        ]
        return [Portion(*of_step) for of_step in zip(parts, losses, own, wrong)]

    def part(self, step: int, part: int, parts: int) -> Portion:
        """The micro-batches of another part of a step than this rank's own. Parts are of equal size."""
        size = self._sampler.global_batch_size // parts
        start = self._positions[0][0]
        numbers = self._sampler.indices_of_steps(step, 1, part * size, (part + 1) * size)
        samples = self._source.read(numbers.ravel())
        batch = _batch(samples, self._pin_memory)
        batches = [batch[begin - start : end - start] for begin, end in self._positions]
        (losses,) = self._losses(step, 1, 0, self._sampler.global_batch_size)
        (own,) = self._losses(step, 1, part * size, (part + 1) * size)
        return Portion(batches, losses, own, tuple(samples.not_finite.values()))

    def _losses(self, first: int, count: int, start: int, stop: int) -> list[int]:
        """Number of losses of each step, of the samples [start, stop) of the global batch. No rank needs another one
        for it."""
        each = self._source.losses_per_sample
        if each is not None:
            return [(stop - start) * each] * count
        numbers = self._sampler.indices_of_steps(first, count, start, stop)
        found: list[int] = self._source.losses(numbers.ravel()).reshape(count, stop - start).sum(1).tolist()
        return found


class InOrder(ReadAhead):
    """Reads samples once, in their order, for an evaluation. A step is a pass: one batch.

    Where there are page-locked tensors, on CUDA, a thread reads ahead. A CPU has better use for its core.

    Args:
        numbers: of the samples.
        batch: largest number of samples of a pass.
        passes: number of passes; None: as many as the samples need. In a pass that has no samples left, the split's
            first sample is read, and `Portion.losses` is 0: every rank makes the same number of passes.
        pin_memory: see `Loader`.
    """

    def __init__(
        self, source: Source, numbers: Numbers, batch: int, passes: int | None = None, pin_memory: bool = False
    ) -> None:
        self._source, self._numbers, self._batch, self._pin_memory = source, numbers, batch, pin_memory
        self.passes = -(-len(numbers) // batch) if passes is None else passes
        super().__init__(0, PASSES_AHEAD if pin_memory else 0, stop=self.passes)

    def _read(self, first: int, count: int) -> list[Portion]:
        return [self._pass(number) for number in range(first, first + count)]

    def _pass(self, number: int) -> Portion:
        numbers = self._numbers[number * self._batch : (number + 1) * self._batch]
        losses = int(self._source.losses(numbers).sum()) if len(numbers) else 0
        read = numbers if len(numbers) else np.zeros(1, np.int64)
        samples = self._source.read(read)
        return Portion([_batch(samples, self._pin_memory)], losses, losses, tuple(samples.not_finite.values()))


def _batch(samples: Samples, pin_memory: bool) -> Batch:
    batch = Batch.of(samples)
    return batch.pinned() if pin_memory else batch
