"""In: ranks that a launcher starts. Out: what they are, which of them may die, and how one has ended, in words.
Does not start or watch ranks (local.py does)."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from codescent.launch.losses import LossCount

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _never() -> LossCount:
    """No rank is started again."""
    return LossCount(0, math.inf, 0)


@dataclass(frozen=True)
class Roles:
    """What ranks are, other than ranks: for messages, and for who may die.

    Attributes:
        names: of some ranks, such as "server 0".
        spare: ranks without which the run goes on, once they have begun to train.
        losses: makes the count of the losses of one spare rank, which says how often it is started again.
        resume: the command that goes on with the run after it has ended; "": all ranks are alike, and nothing is said.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    spare: frozenset[int] = frozenset()
    resume: str = ""
    losses: Callable[[], LossCount] = _never

    def of(self, rank: int) -> str:
        """The name of a rank and a comma, if it has one."""
        return f"{self.names[rank]}, " if rank in self.names else ""

    def over(self, rank: int, code: int, living: Collection[int], *, met: bool) -> str:
        """Why the death of a rank ends the run, the exit code and how to go on; "": where all ranks are alike.

        Args:
            rank: that has died.
            code: exit code of the command.
            living: ranks that lived then.
            met: it was in collectives with the others.
        """
        if not self.resume:
            return ""
        if not [other for other in living if other not in self.names]:
            why = "no worker is left"
        elif rank in self.names:
            why = f"{self.names[rank]} has died, and with it its part of the weights"
        elif rank == 0:
            why = "rank 0 has died, and only rank 0 writes the run folder"
        elif met:
            why = f"rank {rank} has died while all ranks validated or saved"
        else:
            why = f"rank {rank} has died, and this run needs all its workers"
        return f"{why}: the run has ended with exit code {code}; to go on from its last checkpoint: {self.resume}"


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
