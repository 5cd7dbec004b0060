"""In: an error. Out: whether an allocation failed, and the bytes that it asked for.
Does not say what held the memory (out_of_memory.py does)."""

from __future__ import annotations

import errno
import re

import torch

from codescent.base.agreement import RanksFailed
from codescent.base.errors import RunFailed
from codescent.base.sizes import UNITS

TEXTS = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",  # the same, on other systems
    "std::bad_alloc",
    "out of memory",  # libraries of GPUs
)
ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)")


class OutOfMemory(RunFailed):
    """The memory of a rank's device, or of its process, ran out."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is a failed allocation on this rank."""
    if error is None or isinstance(error, OutOfMemory):
        return False
    if isinstance(error, RanksFailed):  # its words may be those of another rank
        return is_out_of_memory(error.__cause__)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS):
        return True
    return is_out_of_memory(error.__cause__)


def asked_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed; None: the error does not say it."""
    found = ASKED.search(str(error))
    if found is None:
        return None if error.__cause__ is None else asked_bytes(error.__cause__)
    return round(float(found[1]) * UNITS[found[2].removeprefix("bytes")])
