"""In: nothing. Out: a thread that ends this process, and those that it has started, soon after its parent has ended.
Does not save anything: a new start resumes the run from its last checkpoint."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from codescent.base.proc import shows_own_numbers

PARENT = "CODESCENT_PARENT"
"""The process id of the command that has started a run and waits for its end, such as `codescent study`."""
LOOK_EVERY_S = 0.5
EXIT_CODE = 1

_HANDED_ON = "CODESCENT_NOTED_PARENT"

# codescent imports this file first: the parent may end while torch is imported, or before exec replaces the program
_pid, _, _noted = os.environ.pop(_HANDED_ON, "").partition(" ")
_parent = int(_noted) if _pid == str(os.getpid()) else os.getppid()


def _note() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_note)


def handed_on() -> dict[str, str]:
    """A variable for exec: the next program of this process knows the parent of this one, which may end meanwhile."""
    return {_HANDED_ON: f"{os.getpid()} {_parent}"}


def _has_parent() -> bool:
    """Whether the parent lives that this process had when codescent was imported."""
    return os.getppid() == _parent


def end_with_command() -> None:
    """`end_with_parent`, if this process is a run that such a command has started. Its own ranks end with it."""
    if os.environ.get(PARENT) == str(_parent):
        end_with_parent("this run")


def end_with_parent(who: str) -> None:
    """Start a thread that ends this process when its parent has ended. So two launchers never train one run.

    The kernel signal PR_SET_PDEATHSIG is not used: the kernel sends it when the parent's starting *thread* ends.
    Some launchers end that thread before the process.

    Args:
        who: name of this process in the message, such as "rank 3".
    """

    def watch() -> None:
        while _has_parent():
            time.sleep(LOOK_EVERY_S)
        words = f"codescent: {who} ends, because its parent process {_parent} has ended\n"
        try:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())
            _kill_children()
        finally:
            os._exit(EXIT_CODE)

    threading.Thread(target=watch, name="codescent parent", daemon=True).start()


def _kill_children() -> None:
    """Kill the processes that this one has started, and those that they have: nobody else would end them now."""
    import psutil  # noqa: PLC0415 - codescent imports this file first, and needs these two once

    from codescent.base.temporary_folder import is_remover  # noqa: PLC0415

    for child in psutil.Process().children(recursive=True) if shows_own_numbers() else ():
        with suppress(psutil.Error):  # it has ended
            if not is_remover(child.cmdline()):
                child.kill()
