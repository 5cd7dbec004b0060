"""In: local work, the same on every rank. Out: its result on each rank, or one error raised on all of them.
Does not time out (the process group does) and sends no pickle: ranks send each other JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from codescent.base.errors import UserError

LISTED_PROBLEMS = 20
T = TypeVar("T")
R = TypeVar("R")


class RanksFailed(RuntimeError):
    """The work of some ranks raised what is no UserError; every rank has reported, and none is at work any more."""


def alone() -> bool:
    """Whether this process has no process group."""
    return not (dist.is_available() and dist.is_initialized())


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return 0 if alone() else dist.get_rank()


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return 1 if alone() else dist.get_world_size()


def together(error: type[UserError], work: Callable[[], T]) -> list[T]:
    """The results of local work on every rank, by rank. Collective: no rank waits for one whose work failed.

    Args:
        error: the class of what is raised.
        work: returns JSON data.

    Raises:
        error: the UserErrors of all the ranks, each problem once.
        RanksFailed: any other exception on any rank, with the rank named; it comes first. One process alone raises the
            exception itself.
    """
    return decided(error, work, list)


def decided(error: type[UserError], work: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
    """Rank 0 is sent the results of all ranks, by rank; what it decides is returned on each. Otherwise as `together`.

    Args:
        error: the class of what is raised.
        work: on every rank; returns JSON data.
        decide: on rank 0 alone; returns JSON data.
    """
    if alone():
        return decide([work()])
    mine, cause = _tried(work)
    answer: _Answer = {}
    if (sent := _gathered(json.dumps(mine).encode())) is not None:
        everyone: list[_Answer] = [json.loads(one) for one in sent]
        answer = {key: list(dict.fromkeys(chain.from_iterable(one[key] for one in everyone))) for key in _RAISED}
        if not any(answer.values()):
            answer, cause = _tried(lambda: decide([one["value"] for one in everyone]))
    result: R = _shared(error, answer, cause)
    return result


def from_first(error: type[UserError], make: Callable[[], T]) -> T:
    """What `make` returns on rank 0 (JSON data), on every rank. Otherwise as `together`."""
    if alone():
        return make()
    answer, cause = _tried(make) if rank() == 0 else ({}, None)
    result: T = _shared(error, answer, cause)
    return result


_Answer = dict[str, Any]
_RAISED = ("problems", "faults")


def _tried(work: Callable[[], Any]) -> tuple[_Answer, Exception | None]:
    """What the work returned or raised, as JSON data, and the exception."""
    try:
        return {"value": work(), "problems": [], "faults": []}, None
    except UserError as problem:
        return {"value": None, "problems": problem.problems, "faults": []}, problem
    except Exception as fault:
        words = f"rank {rank()}: {type(fault).__name__}: {fault}"
        return {"value": None, "problems": [], "faults": [words]}, fault


def _shared(error: type[UserError], answer: _Answer, cause: Exception | None) -> Any:
    """The value of rank 0's answer, on every rank, or what it says to raise."""
    answer = json.loads(_broadcast(json.dumps(answer).encode()))
    if answer["faults"]:
        raise RanksFailed("; ".join(answer["faults"])) from cause
    if answer["problems"]:
        raise error(*answer["problems"]) from cause
    return answer["value"]


def _gathered(data: bytes) -> list[bytes] | None:
    """The bytes of every rank, by rank, on rank 0; None on the others. Collective."""
    size = torch.tensor([len(data)])
    sizes = [torch.zeros_like(size) for _ in range(world_size())]
    dist.all_gather(sizes, size)
    longest = int(max(sizes))
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if rank():
        dist.gather(mine, dst=0)
        return None
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.gather(mine, everyone, dst=0)
    return [one[: int(length)].numpy().tobytes() for one, length in zip(everyone, sizes, strict=True)]


def _broadcast(data: bytes) -> bytes:
    """The bytes that rank 0 hands in, on every rank. Collective."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if rank() == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


def shortened(problems: list[str] | tuple[str, ...]) -> list[str]:
    """At most LISTED_PROBLEMS lines, and how many more there are."""
    more = len(problems) - LISTED_PROBLEMS
    return list(problems) if more <= 1 else [*problems[:LISTED_PROBLEMS], f"and {more:,} more"]
