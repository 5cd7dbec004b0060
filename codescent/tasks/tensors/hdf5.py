"""In: an HDF5 file. Out: its datasets by name, those of samples only if all their numbers lie in this file.
Does not follow a link to another file, and does not let the library follow a link that it has not looked at."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from codescent.base.errors import UserError

MOST_LINKS = 16
"""Most links of one file that lead to each other; more are a circle."""
ALONE = "copy its numbers into one file: h5repack, or h5py"


def datasets(library: ModuleType, path: Path, wanted: Collection[str]) -> dict[str, Any]:
    """The datasets at the top of a file, open for reading. Of a name that is not `wanted`, a link is not followed.

    Raises OSError: it is not HDF5. Raises UserError: every problem of the datasets that are wanted.
    """
    opened = library.File(path, "r", locking=False)
    found, problems = {}, []
    for name in opened:
        if name not in wanted and not isinstance(opened.get(name, getlink=True), library.HardLink):
            continue
        try:
            item = _at(library, opened, name)
            problem = _elsewhere(item) if isinstance(item, library.Dataset) and name in wanted else ""
        except _Foreign as error:
            item, problem = None, str(error)
        if problem:
            problems.append(f'{path}: "{name}" {problem}')
        elif isinstance(item, library.Dataset):
            found[name] = item
    if problems:
        raise UserError(*problems)
    return found


class _Foreign(Exception):
    """What a name leads to is not in this file."""


def _at(library: ModuleType, opened: Any, name: str) -> Any:
    """What a path in the file leads to, with each link on the way looked at; None: nothing."""
    group, parts, links = opened, _parts(name), 0
    while parts:
        part = parts.pop(0)
        if not isinstance(group, library.Group):
            return None
        link = group.get(part, getlink=True)
        if isinstance(link, library.ExternalLink):
            raise _Foreign(f"is a link to another file, {link.filename!r}: no other file is read; {ALONE}")
        if isinstance(link, library.SoftLink):
            if (links := links + 1) > MOST_LINKS:
                raise _Foreign("leads in a circle of links")
            group, parts = opened if link.path.startswith("/") else group, [*_parts(link.path), *parts]
        elif link is None:
            raise _Foreign("is a link that leads nowhere")
        else:
            group = group[part]
    return group


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _elsewhere(item: Any) -> str:
    """Why a dataset has numbers outside the file; "": it has none."""
    if item.external:
        return f"has its numbers in another file, {item.external[0][0]!r}: no other file is read; {ALONE}"
    return f"is a virtual dataset, of numbers of other datasets and files: {ALONE}" if item.is_virtual else ""
