"""In: a file of memory that the launcher has made for this rank. Out: stacks of all threads there, whenever it asks.
Does not read them (launch/stacks.py does). faulthandler writes them in C, so it needs no GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from codescent.base.memory_file import file_of_memory

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


def listen_on_own_file() -> int:
    """The same, where no launcher has made a file: on one of this process. Returns its descriptor."""
    descriptor = file_of_memory("codescent stacks")
    faulthandler.register(ASKS, file=descriptor, all_threads=True, chain=False)
    return descriptor


def borrowed(pid: int, descriptor: int, inode: int) -> int | None:
    """A descriptor of a file of memory that another process has open; None: it is not there, or is another file."""
    with suppress(OSError):
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(found).st_ino == inode:
            return found
        os.close(found)
    return None


def named(descriptor: int) -> str:
    """The value of STACKS_FD for a file that a rank inherits."""
    return f"{descriptor} {os.fstat(descriptor).st_ino}"


listen(os.environ)  # codescent imports this file before torch, whose import may hang, too
