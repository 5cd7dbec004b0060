"""In: this rank's tensors at a call. Out: a checkpoint with these values, written and hashed while the rank trains on.
Does not decide when to save or what a failure means (train/saving.py does). Its thread takes part in no collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codescent.base.agreement import decided, from_first
from codescent.base.device import Event, new_event, offered, synchronize
from codescent.base.errors import UserError
from codescent.checkpoint.box import Box
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.checkpoint.manifest import CheckpointError
from codescent.checkpoint.parts import TensorChunk, bytes_of
from codescent.checkpoint.storage import CheckpointWriter, Division

Place = tuple[str, tuple[int, ...]]
"""A chunk: the name of its tensor, and its offsets."""

IsSound = Callable[[Collection[torch.Tensor]], bool]
"""Whether values may be saved."""


class Snapshot:
    """A copy of this rank's values, made while the rank computes. They must not change before `wait` has returned.

    A device copies where its current stream is, so what is launched there afterwards may change the values.

    Args:
        pairs: for each chunk the memory of its copy, and the values.
    """

    def __init__(self, pairs: Mapping[Place, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs, self._copied = pairs, threading.Event()
        on_devices = [pair for pair in pairs.values() if pair[1].device.type != "cpu"]
        for memory, value in on_devices:
            memory.copy_(value, non_blocking=True)
        self._events = [_event(device) for device in {value.device for _, value in on_devices}]

    def take(self) -> Mapping[Place, torch.Tensor]:
        """The copy. A thread copies what is in the host's memory here, and waits for devices."""
        try:
            for pair in self._pairs.values():
                if pair[1].device.type == "cpu":
                    _copy(pair)
        finally:
            self._copied.set()
        for event in self._events:
            if event is not None:
                event.synchronize()
        return {place: memory for place, (memory, _) in self._pairs.items()}

    def wait(self) -> None:
        """Wait until the values may change."""
        self._copied.wait()


class Staging:
    """Host memory for a copy of what this rank writes. It is kept from one save to the next: new pages cost more time
    than the copy. Off the CPU it is page-locked where the device offers that.

    `division`: of the save before, see `CheckpointWriter.divide`. All ranks have one, or none.
    """

    def __init__(self) -> None:
        self.division: Division | None = None
        self._memory: dict[Place, torch.Tensor] = {}

    def copy(self, writer: CheckpointWriter) -> Snapshot:
        """A copy of the values of the writer's chunks, which is to be taken."""
        values = {place_of(chunk): writer.values(chunk) for chunk in writer.chunks}
        self._memory = {place: self._for(place, value) for place, value in values.items()}
        return Snapshot({place: (self._memory[place], value) for place, value in values.items()})

    def _for(self, place: Place, value: torch.Tensor) -> torch.Tensor:
        """The memory of a chunk: that of the save before, if it fits."""
        memory = self._memory.get(place)
        if memory is not None and memory.shape == value.shape and memory.dtype == value.dtype:
            return memory
        pins = value.device.type != "cpu" and offered(value.device).pins
        return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pins)


def _event(device: torch.device) -> Event | None:
    """What happens when a device has done all that it was given. None: it has no events, and has done it now."""
    if not offered(device).events:
        synchronize(device)
        return None
    event = new_event(device)
    event.record()
    return event


def _copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Copy a tensor of the host. torch would divide each copy among its threads, and wait for the slowest one."""
    memory, value = (np.frombuffer(bytes_of(one.contiguous()), np.uint8) for one in pair)
    np.copyto(memory, value)


def place_of(chunk: TensorChunk) -> Place:
    """The name of a chunk's tensor, and its offsets."""
    return chunk.name, chunk.area.offsets


class SaveBeside:
    """A save of one checkpoint beside training. Every rank makes one at the same step; only one may be under way.

    The constructor divides the work among the ranks, and starts a thread that copies this rank's values, writes and
    hashes the copy. Before a value changes, call `wait_for_copy`: later changes do not count. When the files of all
    ranks are on the disk, a thread of rank 0 writes the manifest and gives the folder its name. Only the constructor
    and `go_on` are collective:

        while (path := save.go_on()) is None: ...       # whenever all ranks are `ready`

    Args:
        checkpoints: of the run.
        step, tensors, state, validation_loss: see `Checkpoints.save`.
        staging: memory for the copies, which no other save uses meanwhile.
        is_sound: is asked of the copies, in the thread. False: nothing is written.

    Raises CheckpointError on every rank: the disk has too little room, or the folder cannot be made.

    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        step: int,
        tensors: Mapping[str, torch.Tensor | Box],
        state: Mapping[str, Any],
        validation_loss: float | None,
        staging: Staging,
        is_sound: IsSound,
    ) -> None:
        self._checkpoints = checkpoints
        self._writer = writer = checkpoints.writer(step, state, validation_loss)
        self._written: dict[str, Any] = {}
        self._error: Exception | None = None
        self._given_up = False
        self._handed_over = False  # all files are there, and rank 0 completes the checkpoint
        self._ask, self._is_sound = is_sound, True
        with checkpoints.completing(writer):
            staging.division = writer.divide(tensors, staging.division)
        self._snapshot: Snapshot | None = None
        try:
            self._snapshot = staging.copy(writer)
        except (RuntimeError, MemoryError) as error:  # too little memory: `go_on` tells it to all ranks
            self._error = error
        self._start(self._write)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # `go_on` raises it on every rank
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        if self._snapshot is not None:
            copy = self._snapshot.take()
            self._is_sound = self._ask(copy.values())
            if self._is_sound:  # by one thread: the others' cores train
                self._written = self._writer.write_own(lambda chunk: self._of(copy, chunk), threads=1)

    def _of(self, copy: Mapping[Place, torch.Tensor], chunk: TensorChunk) -> torch.Tensor:
        if self._given_up:
            raise CheckpointError("the save was given up")
        return copy[place_of(chunk)]

    def wait_for_copy(self) -> None:
        """Wait until the tensors may change. Not collective."""
        if self._snapshot is not None:
            self._snapshot.wait()

    @property
    def ready(self) -> bool:
        """Whether the thread of this rank has done its part, or has failed. Not collective."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until `ready`. Not collective."""
        self._thread.join()

    def give_up(self) -> None:
        """Other ranks do not answer: write nothing more. Returns when the thread has ended. Not collective.

        A checkpoint to which only its name is missing gets it before.
        """
        self._given_up = True
        self.wait()

    def go_on(self) -> Path | None:
        """Wait until all ranks are `ready`, and go on. Collective.

        Returns the folder of the checkpoint, if it is complete.

        Raises on every rank:
            Unsound: a rank's values may not be saved. What others have written is deleted.
            CheckpointError: see `Checkpoints.save`.
        """
        self.wait()
        with self._checkpoints.completing(self._writer):
            if self._handed_over:
                from_first(CheckpointError, lambda: self._result() and None)
                return self._writer.final
            self._handed_over = decided(CheckpointError, self._result, self._complete)
        if not self._handed_over:
            self._writer.abandon()
            raise Unsound("a rank refuses the values of this checkpoint")
        return None

    def _result(self) -> dict[str, Any] | None:
        """What this rank has written; None: its values are not sound."""
        if self._error is not None:
            raise self._error
        return self._written if self._is_sound else None

    def _complete(self, ranks: list[dict[str, Any] | None]) -> bool:
        """Begin to complete the checkpoint, on rank 0. False: the values are not sound."""
        written = [one for one in ranks if one is not None]
        if len(written) == len(ranks):
            self._start(lambda: self._writer.complete(written))
        return len(written) == len(ranks)


class Unsound(UserError):
    """Values that may not be saved."""
