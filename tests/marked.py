"""In: a folder. Out: the processes that bear the mark of a run or script below it, and those of them that are ranks.
Does not ask for names of launchers: the mark is in the environment of all that `codescent launch` has started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from host_ranks import LISTENS, address_of


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


def agents(folder: Path) -> list[int]:
    """The agents of codescent, of which each starts the ranks of its host."""
    found = []
    for pid in processes(folder):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"python" in words[0] and b"codescent.launch.agent" in words:
                found.append(pid)
    return sorted(found)


def environment(pid: int) -> list[bytes]:
    """The variables with which a process was started, each as NAME=VALUE."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def program(pid: int) -> str:
    """The name of the program that a process runs, as the kernel knows it."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which this process listens, of those of its host."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(path.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in sockets:
                found.add(address_of(words[1]))
    return found


def token(folder: Path) -> str:
    """The secret of the run that is under way: each of its ranks has it in the environment."""
    found = {one for pid in ranks(folder) for one in environment(pid) if one.startswith(b"CODESCENT_TOKEN=")}
    (only,) = found
    return only.decode().partition("=")[2]


def command_lines_with(secret: str) -> list[bytes]:
    """The command lines of this machine that show it to every user."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdigit() and secret.encode() in (words := (path / "cmdline").read_bytes()):
                found.append(words)
    return found


def files_with(folder: Path, secret: str) -> list[Path]:
    """The files below a folder that have it in them."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


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
