"""In: a tensor and a process group. Out: torch's collectives. In: a function. Out: its call at the end of backward.
A collective that blocks counts as waiting (base/stopwatch.py), except in code that torch.compile compiles. A profile
has each collective's name (base/ranges.py).
Does not decide what is sent. Names that are private in torch, or differ between versions, are used only here."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from codescent.base.ranges import Flight, named_collective
from codescent.base.stopwatch import waiting
from codescent.plan import Collective
from codescent.strategies.by_messages import SumOfParts, compiled_sum_of_parts, gather_of_two, over_gloo
from codescent.strategies.pieces import all_gather_in_pieces, all_to_all_in_pieces

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed the first two and warns if the old names are used.
torch_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
assert_async: Any = torch._assert_async
abort_groups: Callable[[], None] = distributed_c10d._abort_process_group
"""Give up the NCCL communicators of all process groups, without the other ranks. Only NCCL has this."""


def _all_gather(gathered: torch.Tensor, own: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    """The backend's all-gather. Over gloo two ranks send each other messages: see by_messages.py."""
    if group.size() != 2 or torch.compiler.is_compiling() or not over_gloo(own, group):
        return torch_all_gather(gathered, own, group=group, async_op=async_op)
    work = gather_of_two(gathered, own, group)
    return work if async_op else work.wait()


def _reduce_scatter(part: torch.Tensor, summands: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    """The backend's sum. Over gloo an exchange of parts and a local sum send half as much: see by_messages.py."""
    if not over_gloo(summands, group):
        return torch_reduce_scatter(part, summands, group=group, async_op=async_op)
    if torch.compiler.is_compiling():
        return compiled_sum_of_parts(part, summands, group)
    work = SumOfParts(part, summands, group)
    return work if async_op else work.wait()


class Awaited(dist.Work):
    """The handle of a collective. To wait for it counts as waiting, if `counts`."""

    def __init__(self, work: Any, flight: Flight, counts: bool = True) -> None:
        super().__init__()
        self.work, self.flight, self.counts = work, flight, counts

    @property
    def received(self) -> list[torch.Tensor]:
        """Memory that the collective itself holds until it is done."""
        return self.work.received if isinstance(self.work, SumOfParts) else []

    def wait(self, *timeout: Any) -> bool:
        """Wait until the collective is done."""
        with waiting() if self.counts else nullcontext():
            done = bool(self.work.wait(*timeout))
        self.flight.waited()
        return done


def _waited(function: Callable[..., Any]) -> Callable[..., None]:
    """A function that returns when its collective is done. Its time counts as waiting."""

    def wait_for(*arguments: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():
            function(*arguments, **options)
            return
        with waiting():
            function(*arguments, **options)

    return wait_for


def _blocking(kind: Collective, collective: Callable[..., Any]) -> Callable[..., None]:
    """A collective that returns when it is done."""

    def named(*arguments: Any, group: dist.ProcessGroup | None, **options: Any) -> None:
        if torch.compiler.is_compiling():
            collective(*arguments, group=group, **options)
            return
        with named_collective(kind, group, arguments[0] if arguments else None):
            collective(*arguments, group=group, **options)

    return _waited(named)


def _starting(kind: Collective, collective: Callable[..., Any], *, counts: bool = True) -> Callable[..., Awaited]:
    """A collective that runs beside the computations that follow. `counts`: see Awaited."""

    def start(*arguments: Any, group: dist.ProcessGroup | None, **options: Any) -> Awaited:
        flight = Flight(kind, group, arguments[0] if arguments else None)
        work = collective(*arguments, group=group, async_op=True, **options)
        flight.ends_with(work)
        return Awaited(work, flight, counts)

    return start


def _aside(kind: Collective, collective: Callable[..., Any]) -> Callable[..., None]:
    """A collective that a second thread waits for. The computation goes on, so its time does not count as waiting."""
    start = _starting(kind, collective, counts=False)

    def run(*arguments: Any, **options: Any) -> None:
        start(*arguments, **options).wait()

    return run


def _in_pieces(
    all_gather: Callable[..., None], all_to_all: Callable[..., None], *, counts: bool
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Both collectives in pieces, for `Exchanges`."""
    start_gather = _starting(Collective.ALL_GATHER, torch_all_gather, counts=counts)
    start_all_to_all = _starting(Collective.ALL_TO_ALL, dist.all_to_all_single, counts=counts)
    return all_gather_in_pieces(all_gather, start_gather), all_to_all_in_pieces(all_to_all, start_all_to_all)


all_gather_into = _blocking(Collective.ALL_GATHER, _all_gather)
reduce_scatter_into = _blocking(Collective.REDUCE_SCATTER, _reduce_scatter)
all_reduce = _blocking(Collective.ALL_REDUCE, dist.all_reduce)
all_to_all = _blocking(Collective.ALL_TO_ALL, dist.all_to_all_single)
broadcast = _blocking(Collective.BROADCAST, dist.broadcast)
start_all_gather = _starting(Collective.ALL_GATHER, _all_gather)
start_reduce_scatter = _starting(Collective.REDUCE_SCATTER, _reduce_scatter)
start_all_reduce = _starting(Collective.ALL_REDUCE, dist.all_reduce)


@dataclass(frozen=True)
class Exchanges:
    """The collectives of sums that travel in another form (strategies/wire.py)."""

    all_reduce: Callable[..., None]
    all_gather: Callable[..., None]
    all_to_all: Callable[..., None]


BLOCKING = Exchanges(
    all_reduce, *_in_pieces(_blocking(Collective.ALL_GATHER, torch_all_gather), all_to_all, counts=True)
)
ASIDE = Exchanges(
    _aside(Collective.ALL_REDUCE, dist.all_reduce),
    *_in_pieces(
        _aside(Collective.ALL_GATHER, torch_all_gather),
        _aside(Collective.ALL_TO_ALL, dist.all_to_all_single),
        counts=False,
    ),
)
"""For a thread beside the one that computes."""


FULLY_SHARD_WAITS = ("wait_for_unshard", "post_backward", "finalize_backward")
"""Methods of a unit of fully_shard in which the computation waits for collectives on fully_shard's CUDA streams. They
also copy into and out of the memory of its messages."""


def count_fully_shard_waits(unit: FSDPModule) -> None:
    """Count what a unit of fully_shard waits for on CUDA as waiting. torch has no public hook around these waits."""
    for group in fully_shard_groups(unit):
        for name in FULLY_SHARD_WAITS:
            setattr(group, name, _waited(getattr(group, name)))


def fully_shard_groups(unit: FSDPModule) -> list[Any]:
    """The parameters of a unit of fully_shard, in groups that are gathered together."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group at most
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]  # None: a unit without parameters


def at_end_of_backward(scheduled: Container[int], act: Callable[[int], None]) -> int:
    """Schedule `act(number)` for the end of the running backward pass, and return the number of this pass.

    Hooks on gradients call this function. `scheduled`: numbers that it returned before; for these it does nothing. A
    number is unique in the process. A backward pass inside another one (as in torch.utils.checkpoint) has its own
    number.
    """
    number = int(torch._C._current_graph_task_id())
    if number not in scheduled:
        torch.autograd.Variable._execution_engine.queue_callback(partial(act, number))
    return number


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return int(torch._C._current_graph_task_id()) >= 0
