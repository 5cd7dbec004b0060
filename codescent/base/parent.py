"""In: nothing. Out: this process ends when the one that started it does.
Does not save anything: whoever starts the run again resumes it from its last checkpoint."""

from __future__ import annotations

import os
import sys
import threading
import time

LOOK_EVERY_S = 0.5
EXIT_CODE = 1


def end_with_parent(who: str) -> None:
    """End this process, at once, soon after its parent. Two launchers must not train one run.

    The kernel's own signal for it (PR_SET_PDEATHSIG) comes when the parent's *thread* ends that started us: not with
    every launcher is that the parent's last one.

    Args:
        who: this process, in the message.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY_S)
        words = f"codescent: {who}: process {parent}, which started it, has gone: it ends, too\n"
        try:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())
        finally:
            os._exit(EXIT_CODE)

    threading.Thread(target=watch, name="codescent parent", daemon=True).start()
