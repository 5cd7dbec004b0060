"""In: the path of a file, the most bytes that it can have. Out: the file, open for reading, or its content.
Does not wait for a pipe, and reads no device and no endless file: it reads regular files only."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.base.messages import detail_once
from codescent.base.visible import one_line

MOST_BYTES = 64 << 20
"""Most bytes of a file that is read as a whole, unless the caller names another number. Tokenizers have up to 35 MB."""

_PIECE_BYTES = 1 << 16
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Names of what this process was given, such as by `<(...)` of a shell. A link elsewhere has another name."""

_SYSTEM = ("/proc/", "/sys/", "/dev/")
"""What the system says of itself: --verbose does not list it."""


def open_regular(path: Path | str) -> io.BufferedReader:
    """Open a file for reading. Raises OSError like `open_unbuffered`."""
    return io.BufferedReader(open_unbuffered(path))


def open_unbuffered(path: Path | str) -> io.FileIO:
    """Open a file for reading, without waiting. What a user names by _STREAMS may be a pipe.

    Raises OSError: there is none, it cannot be read, or it is a folder, a pipe or a device.
    """
    return io.FileIO(path, opener=opener)


def opener(path: Path | str, _: int = 0) -> int:
    """The descriptor of `open_unbuffered`, for what opens by a function of this form."""
    name = os.fspath(path)
    is_stream = name.startswith(_STREAMS)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC if is_stream else _READ)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise OSError(errno.EINVAL, "is a socket or a device, not a regular file", name) from error
        raise
    try:
        refuse_special(os.fstat(descriptor).st_mode, name, may_be_stream=is_stream)
        os.set_blocking(descriptor, True)
        _report(name)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _report(name: str) -> None:
    """Log a file that is read."""
    if not name.startswith(_SYSTEM):
        with suppress(OSError):  # the standard error is closed: this file is not to blame
            detail_once(f"reads {one_line(name)}")


def refuse_special(mode: int, name: str, *, may_be_stream: bool = False) -> None:
    """Raise OSError with the name if the mode of a file (`st_mode`) says that it is not a regular one."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not (stat.S_ISREG(mode) or may_be_stream):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise OSError(errno.EINVAL, f"is a {kind}, not a regular file", name)


def refuse_unreadable(path: Path | str) -> None:
    """Raise OSError as `open_regular` does. For libraries that open files themselves."""
    open_regular(path).close()


def read_bytes(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file. Raises OSError: see `open_regular`, or it has more than `most_bytes` bytes."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        pieces, left = [b""], most_bytes + 1 if size_bytes <= most_bytes else 0
        while left and (piece := file.read(min(left, max(size_bytes + 1, _PIECE_BYTES)))):  # of /proc the size is 0
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise OSError(errno.EINVAL, f"has more than {most_bytes:,} bytes, which no such file has", os.fspath(path))
    return b"".join(pieces)


def read_text(path: Path | str, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """The content of a UTF-8 text file, with newlines as \\n. Raises OSError like `read_bytes`, UnicodeDecodeError."""
    text = read_bytes(path, most_bytes).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path | str, most_bytes: int = MOST_BYTES) -> Any:
    """The value of a JSON file. Raises OSError like `read_bytes`; ValueError or RecursionError: it is not JSON."""
    return json.loads(read_bytes(path, most_bytes))
