"""In: a folder. Out: the processes that bear the mark of a run or script below it, and those of them that are ranks.
Does not ask for names of launchers: the mark is in the environment of all that `codescent launch` has started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def processes(folder: Path) -> Iterator[int]:
    """All of them."""
    mark = f"CODESCENT_MARK={folder}/".encode()
    for path in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is a zombie
            if path.name.isdigit() and mark in (path / "environ").read_bytes():
                yield int(path.name)


def ranks(folder: Path) -> list[int]:
    """Those that run `codescent train`, no launcher or shell above them."""
    found = []
    for pid in processes(folder):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"python" in words[0] and b"train" in words and b"codescent.launch.agent" not in words:
                found.append(pid)
    return sorted(found)


def wait_for_none(find: Callable[[], list[int]], seconds: float = 60) -> None:
    """Wait until there is no such process."""
    end = time.monotonic() + seconds
    while left := find():
        assert time.monotonic() < end, {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left}
        time.sleep(0.05)


def kill(folder: Path) -> None:
    """End all of them, as a test does whose run did not end."""
    for pid in processes(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
