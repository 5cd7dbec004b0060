"""In: a function that each rank calls. Out: on every rank, the results of all ranks in rank order.
If the function fails on one rank or more, every rank raises the same error.
Does not set a timeout (the process group does) and sends no pickle: ranks exchange JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from codescent.base.errors import UserError
from codescent.base.ranges import begins

LISTED_PROBLEMS = 20
NUMBER, FEW = 20, 1004
"""Bytes of the first message of a broadcast: how many bytes follow, in digits; and those that follow there."""
T = TypeVar("T")
R = TypeVar("R")


class RanksFailed(RuntimeError):
    """Some ranks raised an exception other than UserError. By now every rank has finished its work and reported."""

    everywhere = True


class Past(Protocol):
    """What all ranks have agreed on, in order, for a rank that comes late and takes the same way alone."""

    @property
    def is_read(self) -> bool:
        """Whether this rank reads what the others agreed on, instead of agreeing with them."""

    def kept(self, make: Callable[[], T]) -> T:
        """Call `make`, which returns the same JSON data on every rank, and keep the data; or return what was kept."""


_past: Past | None = None


@contextmanager
def with_past(past: Past | None) -> Iterator[None]:
    """Keep what the ranks agree on, or read it, until the end of the block. None: neither."""
    global _past  # as the default process group: one for each process
    before, _past = _past, past
    try:
        yield
    finally:
        _past = before


def kept(make: Callable[[], T]) -> T:
    """What all ranks agree on, as JSON data: by `make`, a collective; a rank that comes late reads it."""
    return make() if _past is None else _past.kept(make)


def _reads_past() -> bool:
    return _past is not None and _past.is_read


def alone() -> bool:
    """Whether this process runs without a process group."""
    return not (dist.is_available() and dist.is_initialized())


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return 0 if alone() else dist.get_rank()


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return 1 if alone() else dist.get_world_size()


def together(error: type[UserError], work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank. Returns the results in the order of the ranks, on every rank.

    Collective: if `work` fails on one rank, every rank raises and no rank waits.

    Args:
        error: the class of the exception to raise for UserErrors.
        work: local work; returns JSON data.

    Raises:
        error: some ranks raised a UserError. It lists the problems of all ranks, each once.
        RanksFailed: a rank raised another exception. The text names the rank. It takes precedence over `error`.
            Without a process group the exception itself is raised.
    """
    return decided(error, work, list)


def decided(error: type[UserError], work: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
    """Run `work` on every rank, then `decide` on rank 0 with all results. Every rank returns what `decide` returned.

    Errors of `work` and of `decide` are raised as in `together`.

    Args:
        error: the class of the exception to raise for UserErrors.
        work: runs on every rank; returns JSON data.
        decide: runs on rank 0 only, with the results in the order of the ranks; returns JSON data.
    """
    if alone():
        return decide([work()])
    mine, cause = _tried(work)
    if _reads_past() and cause is not None:
        raise cause
    answer: _Answer = {}
    if not _reads_past() and (sent := _gathered(json.dumps(mine).encode())) is not None:
        everyone: list[_Answer] = [json.loads(one) for one in sent]
        answer = {key: list(dict.fromkeys(chain.from_iterable(one[key] for one in everyone))) for key in _RAISED}
        if not any(answer.values()):
            answer, cause = _tried(lambda: decide([one["value"] for one in everyone]))
    result: R = _shared(error, answer, cause)
    return result


def from_first(error: type[UserError], make: Callable[[], T]) -> T:
    """Run `make` on rank 0 only. Every rank returns its result (JSON data). Errors are raised as in `together`."""
    if alone():
        return make()
    answer, cause = _tried(make) if rank() == 0 and not _reads_past() else ({}, None)
    result: T = _shared(error, answer, cause)
    return result


def all_same(mine: Sequence[int]) -> bool:
    """Whether the numbers are the same on every rank, which all give equally many. One collective."""
    if alone():
        return True

    def compare() -> bool:
        least, less = torch.tensor(mine), -torch.tensor(mine)
        values = torch.cat((least, less))
        begins("all_reduce", memory=values)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        least, less = values.chunk(2)
        return bool(least.equal(-less))

    return kept(compare)


def gather_numbers(mine: Sequence[float]) -> list[list[float]]:
    """The numbers of every rank, equally many, on rank 0 in the order of the ranks; elsewhere none. One collective."""
    if alone():
        return [list(mine)]
    numbers = torch.tensor(mine, dtype=torch.float64)
    everyone = [torch.empty_like(numbers) for _ in range(world_size())] if rank() == 0 else None
    begins("gather", memory=numbers)
    dist.gather(numbers, everyone, dst=0)
    return [one.tolist() for one in everyone or []]


_Answer = dict[str, Any]
_RAISED = ("problems", "faults")


def _tried(work: Callable[[], Any]) -> tuple[_Answer, Exception | None]:
    """Run the work. Returns its result or its error as JSON data, and the exception (None without one)."""
    try:
        return {"value": work(), "problems": [], "faults": []}, None
    except UserError as problem:
        return {"value": None, "problems": problem.problems, "faults": []}, problem
    except Exception as fault:
        words = f"rank {rank()}: {type(fault).__name__}: {fault}"
        return {"value": None, "problems": [], "faults": [words]}, fault


def _shared(error: type[UserError], answer: _Answer, cause: Exception | None) -> Any:
    """Broadcast the answer of rank 0. Every rank returns its value, or raises its errors."""
    answer = kept(lambda: json.loads(_broadcast(json.dumps(answer).encode())))
    if answer["faults"]:
        raise RanksFailed("; ".join(answer["faults"])) from cause
    if answer["problems"]:
        raised = error(*answer["problems"])
        raised.everywhere = True
        raise raised from cause
    return answer["value"]


def _gathered(data: bytes) -> list[bytes] | None:
    """Gather the bytes of every rank on rank 0, in the order of the ranks; None on the other ranks. Collective."""
    size = torch.tensor([len(data)])
    sizes = [torch.zeros_like(size) for _ in range(world_size())]
    begins("all_gather", memory=size)
    dist.all_gather(sizes, size)
    longest = int(max(sizes))
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    begins("gather", memory=mine)
    if rank():
        dist.gather(mine, dst=0)
        return None
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.gather(mine, everyone, dst=0)
    return [one[: int(length)].numpy().tobytes() for one, length in zip(everyone, sizes, strict=True)]


def _broadcast(data: bytes) -> bytes:
    """Broadcast the bytes of rank 0 to every rank. Collective. The first message has their number, and all if few."""
    head = torch.frombuffer(bytearray(f"{len(data):<{NUMBER}}".encode() + data[:FEW].ljust(FEW)), dtype=torch.uint8)
    begins("broadcast", memory=head)
    dist.broadcast(head, 0)
    size, found = int(head[:NUMBER].numpy().tobytes()), head[NUMBER:].numpy().tobytes()
    if size <= FEW:
        return found[:size]
    rest = torch.empty(size - FEW, dtype=torch.uint8)
    if rank() == 0:
        rest.copy_(torch.frombuffer(bytearray(data[FEW:]), dtype=torch.uint8))
    begins("broadcast", memory=rest)
    dist.broadcast(rest, 0)
    return found + rest.numpy().tobytes()


def shortened(problems: list[str] | tuple[str, ...]) -> list[str]:
    """The first LISTED_PROBLEMS problems, then a line with the number of the others."""
    more = len(problems) - LISTED_PROBLEMS
    return list(problems) if more <= 1 else [*problems[:LISTED_PROBLEMS], f"and {more:,} more"]
