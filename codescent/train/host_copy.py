"""In: weights on a device, master copies in host memory. Out: gradients copied to the host, new weights to the device.
Does not update weights (optimize.py does). It copies one group of tensors while the host updates another group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from codescent.base.device import Event, Stream, current_stream, new_event, new_stream, offered, on_stream

if TYPE_CHECKING:
    from codescent.train.optimize import Weight

SLOTS = 2
"""Page-locked buffers in each direction: one is filled while the other is read."""


class HostCopy:
    """Copies gradients to the host and weights to the device, one unit at a time, on one stream for each direction.

    While the host updates a unit, the next unit's gradients are copied to the host, and the previous unit's weights to
    the device (Ren et al. 2021, "ZeRO-Offload", section 5). Only the copy buffers are page-locked, and all units share
    them. torch rounds page-locked memory up to a power of two: page-locked master copies could take twice their size.

    `weights` are on one device. Each of `units` is a list of indices of weights that are copied together.
    """

    def __init__(self, weights: Sequence[Weight], units: Sequence[Sequence[int]]) -> None:
        self.weights, self.units = weights, units
        self.device, self.wide_dtype = weights[0].tensor.device, weights[0].master.dtype
        kind = offered(self.device)
        self.pins = kind.pins
        self.numels = [sum(weights[index].master.numel() for index in unit) for unit in units]
        most = max(self.numels)
        self.incoming = [self._slot(most) for _ in range(SLOTS)]
        self.outgoing = [self._slot(most) for _ in range(SLOTS)]
        self.wide: torch.Tensor | None = None
        self.down, self.up = (new_stream(self.device) for _ in range(2))
        self.arrived, self.left = (
            [new_event(self.device) if kind.streams else None for _ in range(SLOTS)] for _ in range(2)
        )
        self.sent = 0

    def _slot(self, numel: int) -> torch.Tensor:
        """A buffer of bytes for `numel` elements of the master copies' dtype."""
        return torch.empty(numel * self.wide_dtype.itemsize, dtype=torch.uint8, pin_memory=self.pins)

    def fetch(self, gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield each unit's gradients on the host, in the master copies' dtype. The next unit overwrites them."""
        for stream in (self.down, self.up):  # copies begin after all gradients are computed and all weights are read
            if stream is not None:
                stream.wait_stream(current_stream(self.device))
        self._begin(0, gradients)
        for number, unit in enumerate(self.units):
            if number + 1 < len(self.units):
                self._begin(number + 1, gradients)
            self._wait(self.arrived[number % SLOTS])
            flat = self._flat(self.incoming[number % SLOTS], number, gradients[unit[0]].dtype)
            yield self._views(self._widened(flat), unit)

    def send(self, unit: Sequence[int]) -> None:
        """Copy a unit's master copies to the device. The host rounds them to the weights' dtype first, to copy less."""
        slot = self.sent % SLOTS
        self._wait(self.left[slot])  # the previous copy from this slot
        dtype = self.weights[unit[0]].tensor.dtype
        numel = sum(self.weights[index].master.numel() for index in unit)
        flat = self.outgoing[slot][: numel * dtype.itemsize].view(dtype)
        for index, view in zip(unit, self._views(flat, unit), strict=True):
            view.copy_(self.weights[index].master)
            with self._on(self.up):
                self.weights[index].tensor.copy_(view, non_blocking=True)
        self._mark(self.left[slot], self.up)
        self.sent += 1

    def buffers(self) -> Iterator[torch.Tensor]:
        """Its page-locked buffers, and the wide copy of a unit's gradients."""
        yield from (*self.incoming, *self.outgoing)
        if self.wide is not None:
            yield self.wide

    def finish(self) -> None:
        """Make the device's next computation wait until the weights are copied."""
        if self.up is not None:
            current_stream(self.device).wait_stream(self.up)

    def _begin(self, number: int, gradients: Sequence[torch.Tensor]) -> None:
        """Begin to copy the gradients of unit `number` to the host."""
        unit, slot = self.units[number], number % SLOTS
        flat = self._flat(self.incoming[slot], number, gradients[unit[0]].dtype)
        with self._on(self.down):
            for index, view in zip(unit, self._views(flat, unit), strict=True):
                view.copy_(gradients[index], non_blocking=True)
        self._mark(self.arrived[slot], self.down)

    def _flat(self, slot: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
        return slot[: self.numels[number] * dtype.itemsize].view(dtype)

    def _widened(self, flat: torch.Tensor) -> torch.Tensor:
        """Cast to the master copies' dtype, if the dtype differs."""
        if flat.dtype == self.wide_dtype:
            return flat
        if self.wide is None:
            self.wide = torch.empty(max(self.numels), dtype=self.wide_dtype)
        return self.wide[: flat.numel()].copy_(flat)

    def _views(self, flat: torch.Tensor, unit: Sequence[int]) -> list[torch.Tensor]:
        shapes = [self.weights[index].master.shape for index in unit]
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _on(self, stream: Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else on_stream(self.device, stream)

    def _mark(self, event: Event | None, stream: Stream | None) -> None:
        if event is not None and stream is not None:
            event.record(stream)

    def _wait(self, event: Event | None) -> None:
        if event is not None:
            event.synchronize()
