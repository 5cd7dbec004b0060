"""In: a sample source, a seed, this rank's positions in the global batch. Out: this rank's batches, read ahead.
Does not copy batches to a device. Does not decide the order of the samples (order.py, mixed_order.py)."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch

from codescent.base.device import wide_dtype
from codescent.data.order import Sampler as Sampler
from codescent.data.order import StepOrder
from codescent.data.samples import Numbers, PromptSource, Samples, Source

MOST_STEPS_AT_ONCE = 64  # a longer read is not cheaper per step, and the first step waits for the first read
MOST_TOKENS_AT_ONCE = 1 << 22
PASSES_AHEAD = 2  # of an evaluation: one waits, one is being read


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
        """Copy to a device, asynchronously from page-locked memory; input vectors are converted to `dtype`, and fp64 to
        fp32 if the device has none."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            kept = wide_dtype(device) if tensor.dtype == torch.float64 else tensor.dtype
            return tensor.to(device, kept, non_blocking=True)

        batch = self._each(moved)
        return replace(batch, inputs=batch.inputs.to(dtype)) if batch.inputs.is_floating_point() else batch

    def pinned(self) -> Batch:
        """Copy to page-locked memory."""
        return self._each(torch.Tensor.pin_memory)


@dataclass(frozen=True)
class Portion:
    """One rank's micro-batches of a step.

    `losses` counts the step's losses on all ranks: the mean divides by it. `own_losses` counts those of the replica, if
    replicas train apart; else it is `losses`. `not_finite` names the samples that hold NaN or infinity.
    `numbers`: of the samples in their split, in order.
    """

    batches: list[Batch]
    losses: int
    own_losses: int
    not_finite: tuple[str, ...] = ()
    numbers: Numbers | None = None


class ReadAhead(ABC):
    """Reads portions of one rank, step after step, in a thread that is some steps ahead.

    Args:
        prefetch: largest number of steps read ahead; 0: there is no thread, and `next` reads.
        steps_at_once: how many steps the thread reads in one go.
        stop: number of the step after the last; None: there is no last step.
        waits: the thread begins with the first `next`: until then samples may get more numbers (`ReferencedSource`).

    Attributes:
        complete: what `next` does to a portion of a step before it returns it; None: nothing (`PromptSource`).
    """

    complete: Callable[[Portion, int], Portion] | None = None

    def __init__(
        self, first_step: int, prefetch: int, steps_at_once: int = 1, stop: int | None = None, *, waits: bool = False
    ) -> None:
        self._next_step, self._stop = first_step, stop
        self._closed = threading.Event()
        self._received: deque[Portion | Exception] = deque()
        # Half of the prefetched steps wait in the queue; the thread reads or holds the other half.
        self._steps_at_once = steps_at_once
        self._ready: queue.Queue[list[Portion | Exception]] = queue.Queue(1)
        self._thread = threading.Thread(target=self._read_ahead, args=(first_step,), name="loader", daemon=True)
        self._has_thread = prefetch > 0
        if self._has_thread and not waits:
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
        if self._has_thread and self._thread.ident is None:
            self._thread.start()
        if not self._received:
            self._received.extend(self._ready.get() if self._has_thread else self._attempt(self._next_step, 1))
        outcome = self._received[0]
        if isinstance(outcome, Exception):
            raise outcome
        self._received.popleft()
        self._next_step += 1
        return outcome if self.complete is None else self.complete(outcome, self._next_step - 1)

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
        waits: see `ReadAhead`.
    """

    def __init__(
        self,
        source: Source,
        sampler: StepOrder,
        sample_numbers: int,
        positions: Sequence[tuple[int, int]],
        first_step: int,
        prefetch: int,
        pin_memory: bool = False,
        replica: tuple[int, int] | None = None,
        waits: bool = False,
    ) -> None:
        self._source, self._sampler, self._positions = source, sampler, tuple(positions)
        self.complete = source.complete if isinstance(source, PromptSource) else None
        self._replica = replica
        self._pin_memory = pin_memory
        samples = self._positions[-1][1] - self._positions[0][0] if self._positions else 0
        most = max(1, MOST_TOKENS_AT_ONCE // max(1, samples * sample_numbers))
        at_once = max(1, min(prefetch // 2, MOST_STEPS_AT_ONCE, most))
        super().__init__(first_step, prefetch, at_once, waits=waits)

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
        return [Portion(*of_step) for of_step in zip(parts, losses, own, wrong, numbers)]

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
        self.complete = source.complete if isinstance(source, PromptSource) else None
        super().__init__(0, PASSES_AHEAD if pin_memory else 0, stop=self.passes)

    def _read(self, first: int, count: int) -> list[Portion]:
        return [self._pass(number) for number in range(first, first + count)]

    def _pass(self, number: int) -> Portion:
        numbers = self._numbers[number * self._batch : (number + 1) * self._batch]
        losses = int(self._source.losses(numbers).sum()) if len(numbers) else 0
        read = numbers if len(numbers) else np.zeros(1, np.int64)
        samples = self._source.read(read)
        return Portion([_batch(samples, self._pin_memory)], losses, losses, tuple(samples.not_finite.values()), read)


def _batch(samples: Samples, pin_memory: bool) -> Batch:
    batch = Batch.of(samples)
    return batch.pinned() if pin_memory else batch
