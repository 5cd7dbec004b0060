"""In: ranks that a launcher starts. Out: what they are, which of them may die, and how one has ended, in words.
Does not start or watch ranks (local.py does)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Roles:
    """What ranks are, other than ranks: for messages, and for who may die.

    Attributes:
        names: of some ranks, such as "server 0".
        spare: ranks without which the run goes on, once they have begun to train.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    spare: frozenset[int] = frozenset()

    def of(self, rank: int) -> str:
        """The name of a rank and a comma, if it has one."""
        return f"{self.names[rank]}, " if rank in self.names else ""


def ended_by(code: int) -> str:
    """How a process with a negative return code ended, in words."""
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "signal"
    return f"was killed by {name} ({-code})"


def die_with_parent() -> Callable[[], None] | None:
    """A function to run between fork and exec: it makes the kernel kill the rank when its parent dies (Linux only).

    Both system calls are looked up before the fork. So the function never waits for a lock of a parent's thread.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def request() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent died before prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return request
