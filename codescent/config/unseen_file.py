"""In: a config file that a program makes for one call. Out: the name that messages give it: nobody sees the file.
Does not write or read the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_names: dict[Path, str] = {}


@contextmanager
def named(file: Path, name: str) -> Iterator[None]:
    """A block in which messages give a file another name, and no line of it."""
    _names[file] = name
    try:
        yield
    finally:
        del _names[file]


def name_of(file: Path) -> str:
    """The name of such a file; "": it is an ordinary file."""
    return _names.get(file, "")
