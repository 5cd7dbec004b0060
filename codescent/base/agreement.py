"""In: local work, the same on every rank. Out: its result on each rank, or one error raised on all of them.
Does not time out (the process group does) and does not restart anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from codescent.base.errors import UserError

LISTED_PROBLEMS = 20
T = TypeVar("T")


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
    """The small results of local work on every rank, by rank. Collective: no rank waits for one whose work failed.

    Raises:
        error: the UserErrors of all the ranks, each problem once.
        RuntimeError: any other exception on any rank, with the rank named; it comes first.
    """
    mine: tuple[T | None, tuple[str, ...], str] = (None, (), "")
    cause: Exception | None = None
    try:
        mine = (work(), (), "")
    except UserError as problem:
        mine, cause = (None, problem.problems, ""), problem
    except Exception as fault:
        if alone():
            raise
        mine, cause = (None, (), f"rank {rank()}: {type(fault).__name__}: {fault}"), fault
    everyone: list[Any] = [mine] * world_size()
    if not alone():
        dist.all_gather_object(everyone, mine)
    if faults := [fault for _, _, fault in everyone if fault]:
        raise RuntimeError("; ".join(faults)) from cause
    if problems := list(dict.fromkeys(problem for _, found, _ in everyone for problem in found)):
        raise error(*problems) from cause
    return [result for result, _, _ in everyone]


def explained(failure: CheckpointException, error: type[UserError], advice: str = "") -> BaseException:
    """The exception to raise for DCP's, which derives from BaseException and carries those of all ranks.

    KeyboardInterrupt if any rank was interrupted; `error` with every problem and the advice if the user or the disk is
    at fault; else RuntimeError with the tracebacks.
    """
    causes = [cause for _, (cause, _) in sorted(failure.failures.items())]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return KeyboardInterrupt()
    if causes and all(isinstance(cause, UserError | OSError) for cause in causes):
        lines = [line for cause in causes for line in getattr(cause, "problems", (str(cause),))]
        return error(*shortened(list(dict.fromkeys(lines))), *([advice] if advice else []))
    return RuntimeError(str(failure))


def shortened(problems: list[str] | tuple[str, ...]) -> list[str]:
    """At most LISTED_PROBLEMS lines, and how many more there are."""
    more = len(problems) - LISTED_PROBLEMS
    return list(problems) if more <= 1 else [*problems[:LISTED_PROBLEMS], f"and {more:,} more"]
