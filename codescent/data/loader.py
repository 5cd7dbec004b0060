"""In: a split, a sampler, and which positions of the global batch are this rank's. Out: each step's batches, ready.
Does not move them to a device, does not choose samples, and keeps no state but the number of the next step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codescent.data.dataset import Split
from codescent.data.sampler import Sampler


@dataclass(frozen=True)
class Batch:
    """One micro-batch: B samples of T tokens.

    Attributes:
        tokens_BT: int64, the inputs.
        targets_BT: int64, the token after each input.
        sample_ids_B: int64, the position of each sample in the global batch of its step: what dropout masks follow.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    sample_ids_B: torch.Tensor


@dataclass(frozen=True)
class _Failure:
    error: Exception


class Loader:
    """The micro-batches of one rank, step after step, read by a thread that keeps some steps ahead.

    Args:
        positions: (start, stop) in the global batch, of each micro-batch of this rank.
        first_step: the step that the first `next` gives.
        prefetch: how many steps are kept ready; 0: read in `next`, without a thread.
        pin_memory: page-locked tensors, for copies to a CUDA device that do not block.
    """

    def __init__(
        self,
        split: Split,
        sampler: Sampler,
        seq_len: int,
        positions: Sequence[tuple[int, int]],
        first_step: int,
        prefetch: int,
        pin_memory: bool = False,
    ) -> None:
        self._split = split
        self._sampler = sampler
        self._seq_len = seq_len
        self._positions = tuple(positions)
        self._pin_memory = pin_memory
        self._next_step = first_step
        self._failure: _Failure | None = None
        self._closed = threading.Event()
        self._ready: queue.Queue[list[Batch] | _Failure] = queue.Queue(max(1, prefetch))
        self._thread = threading.Thread(target=self._read_ahead, args=(first_step,), name="loader", daemon=True)
        self._has_thread = prefetch > 0
        if self._has_thread:
            self._thread.start()

    def next(self) -> list[Batch]:
        """The micro-batches of the next step.

        Raises:
            UserError: what reading met, e.g. a token outside the vocabulary.
            ValueError: the loader is closed.
        """
        if self._failure:
            raise self._failure.error
        if self._closed.is_set():
            raise ValueError("the loader is closed")
        if not self._has_thread:
            batches = self._read(self._next_step)
            self._next_step += 1
            return batches
        outcome = self._ready.get()
        if isinstance(outcome, _Failure):
            self._failure = outcome
            raise outcome.error
        return outcome

    def close(self) -> None:
        """End the thread and wait for it; may be called more than once."""
        self._closed.set()
        while self._has_thread and self._thread.is_alive():
            try:
                self._ready.get_nowait()  # room for what the thread may be about to put
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self, step: int) -> None:
        outcome: list[Batch] | _Failure = []
        while not self._closed.is_set() and not isinstance(outcome, _Failure):
            try:
                outcome = self._read(step)
            except Exception as error:  # raised in `next`, by whoever waits for this step
                outcome = _Failure(error)
            self._ready.put(outcome)
            step += 1

    def _read(self, step: int) -> list[Batch]:
        numbers = [self._sampler.indices(step, start, stop) for start, stop in self._positions]
        rows = self._split.read(np.concatenate(numbers), self._seq_len) if numbers else np.empty((0, self._seq_len + 1))
        tokens = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
        targets = torch.from_numpy(np.ascontiguousarray(rows[:, 1:]))
        if self._pin_memory:
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        batches, first = [], 0
        for start, stop in self._positions:
            last = first + stop - start
            batches.append(Batch(tokens[first:last], targets[first:last], torch.arange(start, stop)))
            first = last
        return batches
