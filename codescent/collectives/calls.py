"""In: this rank among some ranks, a device and a dtype. Out: each collective of torch, called, and what is right.
Does not catch what torch raises and does not compare (probe.py does). Which backend offers what is not written here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from codescent.meeting.store import Store
from codescent.strategies.collectives import torch_all_gather, torch_reduce_scatter

MAX_RANKS = 64
"""The largest number of ranks for which every sum below is exact in bf16."""
BASE, DIGITS = 4, 3  # BASE**DIGITS = MAX_RANKS
LATE_S = 0.1


class Result(NamedTuple):
    """A tensor that a collective gave and the right one. `rounding`: the largest relative difference that is right."""

    found: Tensor
    right: Tensor
    rounding: float = 0.0


@dataclass(frozen=True)
class Here:
    """This rank of the default group, the device and dtype of its tensors, and the store of the ranks."""

    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    store: Store

    @property
    def following(self) -> int:
        """The next rank of the ring."""
        return (self.rank + 1) % self.ranks

    @property
    def preceding(self) -> int:
        """The rank before in the ring."""
        return (self.rank - 1) % self.ranks

    @property
    def last(self) -> int:
        """The root of collectives that have one: not 0, which a backend that ignores the root would take."""
        return self.ranks - 1

    def part(self, rank: int, to: int = 0) -> Tensor:
        """[2 DIGITS] what `rank` gives, or sends to `to`: the digits of both, plus 1.

        Different for each pair. Its sum over MAX_RANKS is at most 256, up to which bf16 has every whole number.
        """
        digits = [number // BASE**place % BASE + 1 for number in (rank, to) for place in range(DIGITS)]
        return torch.tensor(digits, dtype=self.dtype, device=self.device)

    def parts(self, to: int | None = None) -> list[Tensor]:
        """What each rank gives, or sends to `to`."""
        return [self.part(rank, to or 0) for rank in range(self.ranks)]

    def outgoing(self) -> list[Tensor]:
        """What this rank sends to each rank."""
        return [self.part(self.rank, to) for to in range(self.ranks)]

    def sum(self, to: int = 0) -> Tensor:
        """The sum of what all ranks give, or send to `to`."""
        return torch.stack(self.parts(to)).sum(0)

    def blank(self) -> Tensor:
        """Room for one part."""
        return torch.zeros_like(self.part(0))

    def blanks(self) -> list[Tensor]:
        """Room for a part of every rank."""
        return [self.blank() for _ in range(self.ranks)]


Call = Callable[[Here], list[Result]]


def _around(here: Here, send: Callable[[], Any], receive: Callable[[], Any]) -> None:
    """A message from each rank to the next: rank 0 begins, so that nobody waits for a rank that waits for it."""
    for act in (send, receive) if here.rank == 0 else (receive, send):
        act()


def _done(work: Any) -> None:
    work.wait()


def _send(here: Here) -> list[Result]:
    sent, found = here.part(here.rank), here.blank()
    receive = partial(dist.irecv, found, here.preceding)
    _around(here, partial(dist.send, sent, here.following), lambda: _done(receive()))
    return [Result(found, here.part(here.preceding))]


def _recv(here: Here) -> list[Result]:
    sent, found = here.part(here.rank), here.blank()
    send = partial(dist.isend, sent, here.following)
    _around(here, lambda: _done(send()), partial(dist.recv, found, here.preceding))
    return [Result(found, here.part(here.preceding))]


def _batch(here: Here) -> list[Result]:
    sent, found = here.part(here.rank), here.blank()
    messages = [dist.P2POp(dist.isend, sent, here.following), dist.P2POp(dist.irecv, found, here.preceding)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [Result(found, here.part(here.preceding))]


def _broadcast(here: Here) -> list[Result]:
    found = here.part(here.rank)
    dist.broadcast(found, here.last)
    return [Result(found, here.part(here.last))]


def _all_reduce(here: Here) -> list[Result]:
    found = here.part(here.rank)
    dist.all_reduce(found)
    return [Result(found, here.sum())]


def _all_reduce_mean(here: Here) -> list[Result]:
    found = here.part(here.rank)
    dist.all_reduce(found, dist.ReduceOp.AVG)
    return [Result(found, here.sum() / here.ranks, rounding=here.ranks * torch.finfo(here.dtype).eps)]


def _reduce(here: Here) -> list[Result]:
    found = here.part(here.rank)
    dist.reduce(found, here.last)
    return [Result(found, here.sum())] if here.rank == here.last else []  # elsewhere it may hold anything


def _all_gather(here: Here) -> list[Result]:
    found = here.blanks()
    dist.all_gather(found, here.part(here.rank))
    return list(map(Result, found, here.parts()))


def _all_gather_into(here: Here) -> list[Result]:
    found = torch.cat(here.blanks())
    torch_all_gather(found, here.part(here.rank))
    return [Result(found, torch.cat(here.parts()))]


def _gather(here: Here) -> list[Result]:
    found = here.blanks() if here.rank == here.last else None
    dist.gather(here.part(here.rank), found, here.last)
    return list(map(Result, found or [], here.parts()))


def _scatter(here: Here) -> list[Result]:
    found = here.blank()
    dist.scatter(found, here.outgoing() if here.rank == here.last else None, here.last)
    return [Result(found, here.part(here.last, here.rank))]


def _reduce_scatter(here: Here) -> list[Result]:
    found = here.blank()
    dist.reduce_scatter(found, here.outgoing())
    return [Result(found, here.sum(here.rank))]


def _reduce_scatter_tensor(here: Here) -> list[Result]:
    found = here.blank()
    torch_reduce_scatter(found, torch.cat(here.outgoing()))
    return [Result(found, here.sum(here.rank))]


def _all_to_all(here: Here) -> list[Result]:
    found = here.blanks()
    dist.all_to_all(found, here.outgoing())
    return list(map(Result, found, here.parts(here.rank)))


def _all_to_all_single(here: Here) -> list[Result]:
    found = torch.cat(here.blanks())
    dist.all_to_all_single(found, torch.cat(here.outgoing()))
    return [Result(found, torch.cat(here.parts(here.rank)))]


def _barrier(here: Here) -> list[Result]:
    """The last rank comes late. Whoever leaves before it has come finds that its key is not in the store."""
    keys = [f"at the barrier in {here.dtype}: {rank}" for rank in range(here.ranks)]
    if here.rank == here.last:
        time.sleep(LATE_S)
    here.store.set(keys[here.rank], "")
    dist.barrier()
    return [Result(torch.tensor(here.store.check(keys)), torch.tensor(True))]


CALLS: Mapping[str, Call] = {
    "send": _send,
    "recv": _recv,
    "batch_isend_irecv": _batch,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "all_reduce (mean)": _all_reduce_mean,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
"""torch's collectives and messages by their names in torch.distributed, in the order of the table."""
