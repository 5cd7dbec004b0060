"""In: an error that ends this rank. Out: the words with rank, host, pid and step; torchrun's error file.
Does not end the process (ending.py does) and does not ask other ranks whose error came first."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.fallen import fallen
from codescent.base.progress import PROGRESS_FD
from codescent.base.rank import Rank

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of a file. torchrun's summary of failures shows what a rank has written there."""


class _Process:
    """What this process is, for its last words."""

    rank: Rank | None = None
    has_met = False  # the others are connected
    position = math.inf  # steps that are done, with the fraction of the one that is under way; infinite: none is
    is_consequence = False  # the error only says that another rank does not answer


process = _Process()  # a process is one rank


def is_rank(rank: Rank) -> None:
    """From now on this process is one of the ranks of a run."""
    process.rank = rank


def forget() -> None:
    """The run of this process is over: the next one has its own rank and its own last words."""
    global process
    process = _Process()


def has_met() -> None:
    """From now on the ranks of this run are connected."""
    process.has_met = True


def has_begun() -> bool:
    """Whether the ranks have met."""
    return process.has_met


def may_be_shared(env: Mapping[str, str]) -> Rank | None:
    """The rank of this process, if an error comes before the ranks have met: others may have the same one."""
    rank = process.rank
    return None if rank is None or rank.world_size == 1 or process.has_met or PROGRESS_FD in env else rank


def is_consequence(whether: bool) -> None:
    """Whether the error that ends this rank only says that another rank does not answer."""
    process.is_consequence = whether


def who(steps: int | None = None) -> str:
    """This rank in a sentence, such as "rank 2 of 4 (pid 4711 on node1, in step 12)"."""
    rank = process.rank
    of = f"rank {rank.rank} of {rank.world_size} " if rank is not None and rank.world_size > 1 else ""
    return f"{of}({place(steps)})"


def place(steps: int | None = None) -> str:
    """Where this process is, such as "pid 4711 on node1, in step 12". `steps`: those that an own loop has taken."""
    under_way = f", in step {math.floor(process.position) + 1}" if math.isfinite(process.position) else ""
    step = f", after step {steps}" if steps else under_way
    return f"pid {os.getpid()} on {socket.gethostname()}{step}"


def prints(error: BaseException, env: Mapping[str, str]) -> bool:
    """Whether this rank prints an error. All ranks have some errors; then one rank prints them.

    Our own launcher prints the log of one rank by itself, and the rank of our loops that fails first asks the others.
    """
    rank = process.rank
    if rank is None or rank.world_size == 1 or PROGRESS_FD in env or not getattr(error, "everywhere", False):
        return True
    return rank.rank == 0 if isinstance(error, UserError) else error.__cause__ is not None


def last_words(error: BaseException, env: Mapping[str, str]) -> list[str]:
    """Lines after the message of an error: whose it is, and whether it is the cause. None for an error of all ranks."""
    rank = process.rank
    if rank is None or rank.world_size == 1 or PROGRESS_FD in env or isinstance(error, SystemExit | KeyboardInterrupt):
        return []
    if getattr(error, "everywhere", False):
        return []
    if process.is_consequence:
        what = fallen() or "another rank does not answer"
        return [f"codescent: {who()} ends as a consequence: {what}"]
    return [f"codescent: {who()} has failed"]


def write_error_file(error: BaseException, env: Mapping[str, str], steps: int | None = None) -> None:
    """Write torchrun's error file, if it wants one, in the form of torch's ErrorHandler.

    torchrun takes the failure with the earliest second for the cause. So the second of a consequence is rounded up.
    """
    path = env.get(ERROR_FILE, "")
    if not path or isinstance(error, SystemExit | KeyboardInterrupt):
        return
    consequence = " as a consequence: another rank does not answer" if process.is_consequence else ""
    head = f"{who(steps)} failed{consequence}"
    trace = [] if isinstance(error, UserError) else traceback.format_exception(error)
    text = "".join(trace).rstrip() or "\n".join(f"error: {problem}" for problem in _problems(error))
    now_s = time.time()
    second = math.ceil(now_s) if process.is_consequence else math.floor(now_s)
    more = {"py_callstack": f"{head}\n{text}", "timestamp": str(second)}
    with suppress(OSError):  # the temporary folder is full or gone: the message is on standard error
        Path(path).write_text(json.dumps({"message": {"message": f"{head}: {_first_line(error)}", "extraInfo": more}}))


def _problems(error: BaseException) -> tuple[str, ...]:
    return error.problems if isinstance(error, UserError) else (f"{type(error).__name__}: {error}",)


def _first_line(error: BaseException) -> str:
    return next(iter(_problems(error)), "").partition("\n")[0] or type(error).__name__
