"""In: processes that this one has started. Out: the exit code of each, also of one that the kernel cannot remove yet.
Does not end a process (local.py does)."""

from __future__ import annotations

import subprocess
import time

from codescent.base.errors import RunFailed
from codescent.launch.process_state import state_of

KEPT_S = 1.0
"""Seconds after its end from which the kernel is taken to keep a process: usually it takes milliseconds."""


class Endings:
    """How processes have ended.

    A process that ends is kept by the kernel as long as one of its threads waits for a disk that does not answer. It
    runs no line of its program any more, but nobody learns its exit code.
    """

    def __init__(self) -> None:
        self._gone_s: dict[int, float] = {}

    def code(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code; None: it runs. Of a process that the kernel keeps it is that of a run that has failed."""
        code = process.poll()
        if code is None and state_of(process.pid).word == "gone":
            since_s = self._gone_s.setdefault(process.pid, time.monotonic())
            return RunFailed.exit_code if time.monotonic() - since_s > KEPT_S else None
        return code

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process has ended that was killed."""
        while self.code(process) is None:
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
