"""In: a wire, tensors of each rank. Out: their sums over a process group, at once or beside the computation.
Does not decide how a sum travels (plan/wire.py does) and computes nothing of it (wire_sums.py does)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from codescent.base.device import current_stream, make_current, new_stream, offered, on_stream
from codescent.base.ending import is_failing
from codescent.base.stopwatch import waiting
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan.wire import Wire
from codescent.strategies.collectives import ASIDE, BLOCKING, Exchanges
from codescent.strategies.wire_sums import KINDS, Coded


class PendingSum:
    """A sum that a channel's thread computes."""

    def __init__(self, job: Callable[[], None], device: torch.device) -> None:
        self.job: Callable[[], None] | None = job
        self.device = device
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.ready: Any = None  # where there are streams: the caller's stream has written the tensors
        self.done: Any = None  # where there are streams: the thread's stream has replaced them
        if offered(device).streams:
            self.ready = current_stream(device).record_event()

    def wait(self) -> None:
        """Wait until the tensors are replaced by their sums. Raises the error that the thread met. May be repeated."""
        with waiting():
            self.ended.wait()
        if self.error is not None:
            raise self.error
        self.follow()

    def follow(self) -> None:
        """Where there are streams: what the caller computes from now on comes after the sum."""
        if self.done is not None:
            current_stream(self.device).wait_event(self.done)

    def run(self, stream: Any) -> None:
        """Do the job, in the channel's thread. Afterwards nothing here holds its tensors."""
        job, self.job = self.job, None
        assert job is not None
        try:
            if stream is None:
                job()
            else:
                with on_stream(self.device, stream):
                    stream.wait_event(self.ready)
                    job()
                    self.done = stream.record_event()
        except BaseException as error:  # `wait` raises it in the caller's thread
            self.error = error
        finally:
            self.ended.set()

    def give_up(self, error: BaseException) -> None:
        """End without doing the job."""
        self.job, self.error = None, error
        self.ended.set()


class Channel:
    """A thread that computes sums one after the other, in the order in which they were started.

    All sums over one process group need one channel, and nothing else may use the group: the ranks' collectives match
    by their order. After an error the group is of no use, so all later sums end with the same error.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.jobs: queue.SimpleQueue[PendingSum | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.last: PendingSum | None = None

    def start(self, job: Callable[[], None]) -> PendingSum:
        """Do `job` after all jobs before it."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, name="codescent wire", daemon=True)
            self.thread.start()
        self.last = PendingSum(job, self.device)
        self.jobs.put(self.last)
        return self.last

    def drain(self) -> None:
        """Wait until nothing is under way. Raises nothing: `wait` of each sum does."""
        if self.last is not None:
            with waiting():
                self.last.ended.wait()
            self.last.follow()
            self.last = None

    def close(self) -> None:
        """End the thread, after what is under way. A rank that ends by an error does not wait: the others may not come
        (decision 19)."""
        if self.thread is not None:
            self.jobs.put(None)
            self.thread.join(0 if is_failing() else None)
            self.thread = None

    def _serve(self) -> None:
        make_current(self.device)
        stream = new_stream(self.device)
        error: BaseException | None = None
        while (pending := self.jobs.get()) is not None:
            if error is None:
                pending.run(stream)
                error = pending.error
            else:
                pending.give_up(error)


class WireSum:
    """Sums of tensors of fixed shapes over the ranks of a group; all ranks get the same bits.

    What is not finite on one rank is not finite on all afterwards, and all residuals stay as they were.

    Args:
        wire: how the summands travel.
        shapes: of the tensors, in their order; the same on all ranks.
        group: the ranks.
        device: of the tensors.
        dtype: of the tensors and of the sums: fp32 or fp64.
        channel: of `start`, if several WireSums share a group; None: an own one.
    """

    def __init__(
        self,
        wire: Wire,
        shapes: Sequence[Sequence[int]],
        group: ProcessGroup,
        device: torch.device,
        dtype: str,
        channel: Channel | None = None,
    ) -> None:
        self.wire, self.shapes = wire, [tuple(shape) for shape in shapes]
        self.dtype, self.device = TORCH_DTYPE[dtype], device
        self.shared = channel is not None
        self.channel = channel or Channel(device)
        like = torch.empty(0, dtype=self.dtype, device=device)
        self._state = {one.name: like.new_zeros(one.shape) for one in wire.state(shapes, dtype, group.size())}
        self.sends = bool(wire.collectives(shapes, dtype, group.size()))  # False: one rank, or no element
        kind = KINDS.get(wire.method, Coded)
        self.reduction = kind(wire, self.shapes, group, self._state, like) if self.sends else None

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors by their sums over the ranks. Sums that were started before end first.

        Raises ValueError for tensors of other shapes or dtypes than those of this WireSum.
        """
        self._check(tensors)
        self.channel.drain()
        self._sum(tensors, BLOCKING)

    def start(self, tensors: Sequence[Tensor]) -> PendingSum:
        """As `sum_`, in the channel's thread. Until `wait` returns the tensors may neither be read nor changed."""
        self._check(tensors)
        tensors = list(tensors)
        return self.channel.start(lambda: self._sum(tensors, ASIDE))

    def summands(self) -> list[Tensor]:
        """Memory for the tensors of the next sum, in their order. A sum of these tensors copies nothing."""
        if self.reduction is None:
            return [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in self.shapes]
        return [self.reduction.views[index] for index in range(len(self.shapes))]

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs, by the names of `wire.state`. To load it, copy into these tensors.

        Sums that were started before end first.
        """
        self.channel.drain()
        return dict(self._state)

    def buffers(self) -> list[Tensor]:
        """The memory that this object holds: its state and its buffers."""
        return [*self._state.values(), *(self.reduction.buffers if self.reduction else [])]

    def close(self) -> None:
        """End the own thread, and drop the process group: its threads would crash at the end of the process."""
        if not self.shared:
            self.channel.close()
        self.reduction = None

    def _check(self, tensors: Sequence[Tensor]) -> None:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes != self.shapes:
            raise ValueError(f"tensors of shapes {shapes}, not {self.shapes}")
        if other := {tensor.dtype for tensor in tensors} - {self.dtype}:
            raise ValueError(f"tensors of {other.pop()}, not {self.dtype}")

    def _sum(self, tensors: Sequence[Tensor], exchanges: Exchanges) -> None:
        if self.sends:
            assert self.reduction is not None, "the sum is closed"
            with torch.no_grad():
                self.reduction.sum_(tensors, exchanges)
