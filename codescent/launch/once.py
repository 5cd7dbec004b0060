"""In: lines of an error that all ranks of a start may have, before they have met. Out: one of each machine prints them.
Does not reach other machines (meeting/failure.py does, by the store) and does not end the process."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from codescent.base.output import warn
from codescent.base.progress import PROGRESS_FD
from codescent.base.rank import Rank
from codescent.launch.launchers import is_set, started_by
from codescent.meeting.agent_store import OpenAgent
from codescent.meeting.rendezvous import tell_those_who_wait

PRINTED_S = 3.0
"""Seconds in which the rank that prints has printed. Its launcher may end all ranks as soon as one has ended."""
ALIKE_S = 2.0
"""Seconds in which all ranks of this machine find the same error. Otherwise those that wait for this one are told."""
LOOK_S = 0.02
OLD_S = 3600.0
"""A mark that is older is removed: its ranks have ended."""
MARK = "codescent-said-"
SHOWN_CHARS, MOST_BYTES = 20, 1 << 20


def say_once(lines: Sequence[str], env: Mapping[str, str], more: Sequence[str] = ()) -> Path | None:
    """Print lines, unless another rank that the same process has started on this machine has printed the same.

    Returns the file that marks them, if this process has printed them and is a rank of several; None otherwise. Each
    rank that finds it adds its number. Raises OSError: the standard error is closed.

    `more`: further lines, which may differ between ranks.
    """
    path, rank = _mark(lines, env), _rank(env)
    if path is not None and _is_printed(path, rank):
        return None
    mark = None if path is None else _opened(path, os.O_CREAT | os.O_EXCL)
    if mark is None and path is not None and _is_printed(path, rank):  # another rank was faster
        return None
    try:
        warn(*lines, *more)
    finally:
        if mark is not None:
            os.write(mark, rank)
            os.close(mark)
    if path is not None:
        _tidy(path)
    return None if mark is None else path


def say_once_or_tell(
    lines: Sequence[str], more: Sequence[str], this_rank: Rank, env: Mapping[str, str], open_agent: OpenAgent
) -> None:
    """Print an error of a rank whose others are all on this machine, as `say_once`. If they lack it, they are told.

    Raises OSError: the standard error is closed.
    """
    mark = say_once(lines, env, more)
    if mark is not None and not all_said(mark, this_rank.world_size, ALIKE_S):
        tell_those_who_wait(this_rank, open_agent)


def all_said(path: Path, ranks: int, within_s: float) -> bool:
    """Whether so many ranks have the error of this mark, which is removed then. Waits for them."""
    end_s = time.monotonic() + within_s
    while len(_ranks(path)) < ranks:
        if time.monotonic() > end_s:
            return False
        time.sleep(LOOK_S)
    with suppress(OSError):
        path.unlink()
    return True


def _mark(lines: Sequence[str], env: Mapping[str, str]) -> Path | None:
    """A file of these lines and of this start; None: there is one rank, or our own launcher prints the log of one."""
    launcher = started_by(env)
    if launcher is None or PROGRESS_FD in env or any(env.get(name, "").strip() == "1" for name in launcher.world_size):
        return None
    parent = os.getppid()
    try:
        begun = (
            Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError):  # no Linux: a number alone may be that of an earlier process
        return None
    digest = hashlib.sha256("\n".join([str(parent), begun, *lines]).encode(errors="surrogateescape")).hexdigest()
    return Path(tempfile.gettempdir()) / f"{MARK}{os.getuid()}-{digest[:24]}"


def _rank(env: Mapping[str, str]) -> bytes:
    """The number of this rank, as a line of a mark."""
    launcher = started_by(env)
    number = next((env[name] for name in launcher.rank if is_set(env, name)), "") if launcher else ""
    return os.fsencode(f"{number.strip()[:SHOWN_CHARS]}.\n")


def _is_printed(path: Path, rank: bytes) -> bool:
    """Whether there is a mark of this start. Wait until the rank that has made it has printed, and add this rank.

    A mark that has this rank already is of an earlier start by the same shell or agent, and is removed.
    """
    if not os.path.lexists(path):
        return False
    end_s = time.monotonic() + PRINTED_S
    while not (found := _ranks(path)) and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    if rank in found:
        with suppress(OSError):
            path.unlink()
        return False
    if found and (mark := _opened(path, os.O_APPEND)) is not None:
        os.write(mark, rank)
        os.close(mark)
    return bool(found)


def _ranks(path: Path) -> list[bytes]:
    """The ranks of a mark; none: it is not there, or is not this user's file."""
    mark = _opened(path, 0, os.O_RDONLY)
    if mark is None:
        return []
    with os.fdopen(mark, "rb") as file:
        found = os.fstat(mark)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        return file.read(MOST_BYTES).splitlines(keepends=True) if is_ours else []


def _opened(path: Path, how: int, access: int = os.O_WRONLY) -> int | None:
    """A descriptor; None: it cannot be opened, or is a link."""
    try:
        return os.open(path, access | how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _tidy(own: Path) -> None:
    """Remove old marks of this user."""
    for path in own.parent.glob(f"{MARK}{os.getuid()}-*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > OLD_S:
                path.unlink()
