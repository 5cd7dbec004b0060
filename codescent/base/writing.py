"""In: the path of a file or folder that this program names. Out: it is opened for writing, made, renamed or deleted.
Does not write through a link: who may write in a folder could else choose where this program writes.

`within` is a folder that the user has named: links on the way to it are the user's own. The names below it are this
program's, and none of them may be a link. They are walked by descriptors, so nobody can put a link there meanwhile.
By default `within` is the folder of the file."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from codescent.base.reading import open_regular, refuse_special

LINK = "is a symbolic link, and nothing is written through it: delete the link"
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_OWN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_COPY_BYTES = 1 << 20


@contextmanager
def place(path: Path, within: Path | None = None) -> Iterator[tuple[int, str]]:
    """The folder of a path as an open descriptor, for `dir_fd`, and the name in it. Raises OSError: a link is below
    `within`, or there is no such folder."""
    within = path.parent if within is None else within
    *folders, name = path.relative_to(within).parts
    handle, reached = os.open(within, _WALK), within
    try:
        for folder in folders:
            reached /= folder
            with _named(reached, handle, folder):
                inner = os.open(folder, _WALK | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle, name
    finally:
        os.close(handle)


def open_new(path: Path, mode: int = 0o666, within: Path | None = None, *, anew: bool = False) -> io.FileIO:
    """Create a file in a folder that this program has made: by default `within` is above this folder.

    `mode`: who may use it, less what the process's umask takes away. `anew`: a file of that name is deleted first.
    Raises OSError: it exists, or cannot be created.
    """
    with place(path, path.parent.parent if within is None else within) as (folder, name), _named(path, folder, name):
        if anew:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        return _opened(path, "w+", os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, folder, name)


def open_own(path: Path, within: Path | None = None, *, appends: bool = False, makes: bool = False) -> io.FileIO:
    """Open a file of this program for reading and writing, unbuffered.

    Args:
        appends: each write goes to the end.
        makes: the file is created if there is none.

    Raises:
        OSError: it is a link, no regular file, or has a second name (a hard link), which may be a file elsewhere.
    """
    flags = os.O_RDWR | (os.O_APPEND if appends else 0) | (os.O_CREAT if makes else 0)
    with place(path, within) as (folder, name), _named(path, folder, name):
        file = _opened(path, "a+" if appends else "r+", flags, 0o666, folder, name)
        try:
            _refuse_foreign(os.fstat(file.fileno()), path)
            os.set_blocking(file.fileno(), True)
        except BaseException:
            file.close()
            raise
        return file


def cut(path: Path, size_bytes: int, within: Path | None = None) -> None:
    """Cut off the bytes of a file after the first `size_bytes` ones. Raises OSError like `open_own`."""
    with open_own(path, within) as file:
        file.truncate(size_bytes)


def make_folder(path: Path, within: Path | None = None, *, mode: int = 0o777, exist_ok: bool = True) -> None:
    """Create a folder; one that is there stays if `exist_ok`. Raises OSError: a link or a file is there."""
    with place(path, within) as (folder, name), _named(path, folder, name):
        try:
            os.mkdir(name, mode, dir_fd=folder)
        except FileExistsError:
            if not exist_ok:
                raise
            os.close(os.open(name, _WALK | os.O_NOFOLLOW, dir_fd=folder))


def make_parents(path: Path) -> None:
    """Create a folder that the user has named, and those above it, if they are not there. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)


def remove_file(path: Path, within: Path | None = None, *, missing_ok: bool = False) -> None:
    """Delete a file or a link, not what the link leads to. Raises OSError."""
    with place(path, within) as (folder, name), _named(path, folder, name):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            if not missing_ok:
                raise


def remove_folder(path: Path, within: Path | None = None, *, ignore_errors: bool = False) -> None:
    """Delete a folder with all that is in it, and nothing to which links in it lead. Raises OSError: it is a link."""
    try:
        with place(path, within) as (folder, name), _named(path, folder, name):
            os.close(os.open(name, _WALK | os.O_NOFOLLOW, dir_fd=folder))
            shutil.rmtree(name, dir_fd=folder)
    except OSError:
        if not ignore_errors:
            raise


@contextmanager
def hidden_folder(above: Path, within: Path | None = None) -> Iterator[Path]:
    """A new folder in `above` that only this user may enter, for libraries that open files by name; deleted at the end.

    The path that is yielded goes by a descriptor, where the system has such paths. Raises OSError.
    """
    folder = above / f".{os.urandom(8).hex()}.partial"
    within = above if within is None else within
    make_folder(folder, within, mode=0o700, exist_ok=False)
    try:
        with place(folder / "file", within) as (handle, _):
            by_descriptor = Path(f"/proc/self/fd/{handle}")
            yield by_descriptor if by_descriptor.exists() else folder
    finally:
        remove_folder(folder, within, ignore_errors=True)


def remove_empty(path: Path) -> None:
    """Delete an empty folder. Raises OSError: it is not empty."""
    path.rmdir()


def empty_folder(descriptor: int) -> None:
    """Delete all that is in an open folder. Raises OSError."""
    for name in os.listdir(descriptor):
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)


def move(path: Path, to: Path, within: Path | None = None) -> None:
    """Rename a file or folder. A link at `to` is replaced, not followed. Raises OSError."""
    with place(path, within) as (folder, name), place(to, within) as (target, new), _named(path, folder, name):
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=target)


def replace(path: Path, other: Path) -> None:
    """Rename a complete file to `other` in a folder that the user has named. Raises OSError."""
    move(path, other)


def copy_file(source: Path, target: Path, most_bytes: int, within: Path | None = None) -> int:
    """Copy a regular file into a new one. Returns its bytes.

    Raises OSError: `source` is no regular file or has more than `most_bytes` bytes; `target` exists; no space is left.
    """
    copied_bytes = 0
    with open_regular(source) as reader, open_new(target, within=within) as writer:
        size_bytes = os.fstat(reader.fileno()).st_size
        while size_bytes <= most_bytes and (data := reader.read(_COPY_BYTES)):
            write_all(writer, data)
            copied_bytes += len(data)
            size_bytes = max(size_bytes, copied_bytes)  # the file may grow meanwhile
    if size_bytes > most_bytes:
        raise OSError(errno.EINVAL, f"has more than {most_bytes:,} bytes, which no such file has", str(source))
    return copied_bytes


def write_all(file: io.RawIOBase, data: bytes | memoryview) -> None:
    """Write all of the data. On a nearly full disk `write` first writes only a part, and then raises an error."""
    view = memoryview(data)
    while view:
        view = view[file.write(view[: 1 << 26]) or 0 :]


def refuse_special_at(folder: int, name: str, path: Path) -> None:
    """Raise OSError if a file that is to be replaced is a device, a pipe or a link to one: they must stay."""
    for follow in (False, True):
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=follow).st_mode
            if not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode):
                refuse_special(mode, str(path))


def _opened(path: Path, kind: str, flags: int, mode: int, folder: int, name: str) -> io.FileIO:
    return io.FileIO(path, kind, opener=lambda *_: os.open(name, flags | _OWN, mode, dir_fd=folder))


def _refuse_foreign(status: os.stat_result, path: Path) -> None:
    refuse_special(status.st_mode, str(path))
    if status.st_nlink > 1:
        what = "has a second name (a hard link), and would be changed there, too: replace it by a copy"
        raise OSError(errno.EMLINK, what, str(path))


@contextmanager
def _named(path: Path, folder: int, name: str) -> Iterator[None]:
    """Give an OSError of the block the whole path, and say so if the name is a link."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, name):
            raise
        is_link = False
        with suppress(OSError):
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        if is_link and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
            raise OSError(errno.ELOOP, LINK, str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error
