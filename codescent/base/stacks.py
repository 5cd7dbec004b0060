"""In: a file of memory that the launcher has made for this rank. Out: stacks of all threads there, whenever it asks.
Does not read them (launch/stacks.py does). faulthandler writes them in C, so it needs no GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

STACKS_FD = "CODESCENT_STACKS_FD"
"""Environment variable with the descriptor of the file, and its inode: a descendant may have another file there."""
ASKS = signal.SIGURG
"""Asks for the stacks. A process that does not listen to it ignores it."""


def listen(env: Mapping[str, str]) -> bool:
    """From now on this process writes its stacks when the launcher asks. Returns whether a launcher can ask."""
    descriptor, _, inode = env.get(STACKS_FD, "").partition(" ")
    if not (descriptor.isdigit() and inode.isdigit()):
        return False
    with suppress(OSError):  # closed
        if os.fstat(int(descriptor)).st_ino == int(inode):
            faulthandler.register(ASKS, file=int(descriptor), all_threads=True, chain=False)
            return True
    return False


def named(descriptor: int) -> str:
    """The value of STACKS_FD for a file that a rank inherits."""
    return f"{descriptor} {os.fstat(descriptor).st_ino}"


listen(os.environ)  # codescent imports this file before torch, whose import may hang, too
