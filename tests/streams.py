"""In: work on stand-ins for CUDA's streams and events, a schedule. Out: the work, done on the CPU in an allowed order.
Does not know what is computed. A device may do the operations of a stream at any time that streams, events and waits of
the host allow; a schedule chooses when."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Operation:
    """Something that a stream does once what it `needs` is done."""

    stream: Stream
    act: Callable[[], object]
    needs: list[Operation]
    begins: bool = False  # a copy: what it writes to is lost from here on
    done: bool = False


@dataclass(eq=False)
class Stream:
    """Stand-in for torch.cuda.Stream. `deaf`: it does not wait for other streams (a fault)."""

    device: Device
    name: str
    deaf: bool = False
    last: list[Operation] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        """What is added from here on begins after all that the other stream has been given so far."""
        if not self.deaf:
            self.last = [*self.last, *other.last]


@dataclass(eq=False)
class Event:
    """Stand-in for torch.cuda.Event. `deaf`: nobody records it, or waits for it (a fault)."""

    device: Device
    deaf: bool = False
    at: list[Operation] = field(default_factory=list)

    def record(self, stream: Stream) -> None:
        """It happens when the stream has done all that it has been given so far."""
        self.at = [] if self.deaf else list(stream.last)

    def synchronize(self) -> None:
        """The host waits until the event has happened."""
        self.device.finish(self.at)


Schedule = Callable[[list[Operation]], Sequence[Operation]]
"""Which of the operations that may be done now are done now."""


def late(ready: list[Operation]) -> Sequence[Operation]:
    """Nothing is done before somebody waits for it."""
    return ()


def half(ready: list[Operation]) -> Sequence[Operation]:
    """Copies begin as early as they may, and end as late."""
    return [one for one in ready if one.begins]


def early(ready: list[Operation]) -> Sequence[Operation]:
    """All is done as early as it may be."""
    return ready


def copies_early(ready: list[Operation]) -> Sequence[Operation]:
    """Copies are done early, computations late."""
    return [one for one in ready if one.stream.name != "compute"]


def one_early(name: str) -> Schedule:
    """Only the operations of one stream are done early."""
    return lambda ready: [one for one in ready if one.stream.name == name]


def at_random(seed: int) -> Schedule:
    """Some operation, or none, at every opportunity."""
    draw = random.Random(seed)
    return lambda ready: ready and draw.choices([[], [draw.choice(ready)]])[0]


class Device(TorchDispatchMode):
    """A device whose memory is the CPU's. Inside it, asynchronous copies are given to the current stream.

    A copy first writes NaN where it writes to, and reads what it copies when it ends. Any other operator runs at once,
    as the host's work; if it reads one of `memory`, after all that the stream "compute" has been given.
    """

    def __init__(self, schedule: Schedule, memory: Sequence[Tensor]) -> None:
        super().__init__()
        self.schedule, self.pending = schedule, list[Operation]()
        self.memory = {tensor.untyped_storage().data_ptr() for tensor in memory}
        self.compute = self.current = Stream(self, "compute")
        self.working = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.working:
            name = func._schema.name
            if name == "aten::copy_" and (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.copy(self.current, args[0], args[1])
                return args[0]
            self.advance()
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if not func.is_view and any(one.untyped_storage().data_ptr() in self.memory for one in tensors):
                self.finish(self.compute.last)
        return func(*args, **kwargs)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A block in which the functions of torch for a kind of device use this one."""
        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(torch.cpu, "current_stream", lambda _: self.current)  # where the weights are
            patch.setattr(torch.cpu, "stream", self.using)
            yield
            self.finish(self.pending)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """A block in which this stream is the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, stream: Stream, to: Tensor, given: Tensor) -> None:
        """Give a copy to a stream."""
        to, given = to.detach(), given.detach()
        self.give(stream, lambda: to.fill_(torch.nan), begins=True)
        self.give(stream, lambda: to.copy_(given))

    def give(self, stream: Stream, act: Callable[[], object], *, begins: bool = False) -> None:
        """Give an operation to a stream."""
        stream.last = [Operation(stream, act, stream.last, begins)]
        self.pending += stream.last
        self.advance()

    def advance(self) -> None:
        """Do what the schedule wants, while it wants something."""
        while wanted := self.schedule([one for one in self.pending if all(other.done for other in one.needs)]):
            self.finish(wanted)

    def finish(self, operations: Sequence[Operation]) -> None:
        """Do these operations, and first what they need."""
        self.working = True
        for one in list(operations):
            if not one.done:
                self.finish(one.needs)
                self.working = True
                one.act()
                one.done = True
                self.pending.remove(one)
        self.working = False
