"""In: the name of a file that a command is to write. Out: why it cannot be written there; whether it may be replaced.
Does not draw or write: the room report/ draws, and each command writes its own file."""

from __future__ import annotations

from pathlib import Path

from codescent.base.published import in_words
from codescent.base.reading import open_regular

MAX_NAME_BYTES = 200  # file systems allow 255; a temporary file's name is longer


def no_file(option: str, path: Path) -> str:
    """Why no file can be written to `path`, which the option names; "" if one can."""
    size = len(path.name.encode())
    if size > MAX_NAME_BYTES:
        return f"{option}: the file's name has {size} bytes; give at most {MAX_NAME_BYTES}"
    if path.is_dir():
        return f"{option} {path}: is a folder; give the name of a file"
    if not path.parent.is_dir():
        return f"{option} {path}: there is no folder {path.parent}"
    if path.exists() and not path.is_file():
        return f"{option} {path}: is a device or a pipe, not a file; give another name"
    if path.is_symlink():
        return f"{option} {path}: is a link, which a file would replace; give another name"
    return ""


def no_replacement(path: Path, mark: str, command: str) -> str:
    """Why the file at `path` must stay; "" if there is none, it is blank, or the command has written it.

    Args:
        path: without a link, see `no_file`.
        mark: stands near the begin of each file of the command.
        command: its words after `codescent`.
    """
    try:
        with open_regular(path) as file:
            begin = file.read(4000)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"is there already, and cannot be read ({in_words(error)}); give another name"
    if not begin.strip() or mark.encode() in begin:
        return ""
    return f"is there already, and `codescent {command}` has not written it; give another name"
