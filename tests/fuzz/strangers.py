"""In: a project, names in it. Out: one of them replaced by what somebody else may have put there.
Does not damage what files contain (damage.py does)."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

OUTSIDE = "outside"
"""A folder of the project that no command is told of: what is in it must stay as it is."""
WAYS = (
    *("link to a file", "link to a folder", "link to nothing", "link to itself", "hard link", "link to /dev/zero"),
    *("link to /dev/full", "link to a pipe", "pipe", "socket", "folder", "endless file"),
)


def make_outside(folder: Path) -> None:
    """Write what must be spared."""
    (folder / OUTSIDE / "kept").mkdir(parents=True)
    (folder / OUTSIDE / "mine.txt").write_text("export PATH\n")
    (folder / OUTSIDE / "kept" / "letter.txt").write_text("dear reader\n")


def spared(folder: Path) -> list[tuple[str, bytes]]:
    """All that is in OUTSIDE."""
    found = sorted((folder / OUTSIDE).rglob("*"))
    return [(str(path), path.read_bytes() if path.is_file() else b"") for path in found]


def plant(folder: Path, names: Sequence[str], rng: random.Random) -> str:
    """Replace a file or folder, or put something where there is none. Returns what was done.

    `names`: glob patterns of what is there. One whose last part has no star may be there or not.
    """
    found = sorted({path for name in names for path in _named(folder, Path(name))})
    path, way = rng.choice(found), rng.choice(WAYS)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    _PLANT[way](path, folder / OUTSIDE)
    return f"{path.relative_to(folder)}: {way}"


def _named(folder: Path, name: Path) -> list[Path]:
    if "*" in name.name:
        return list(folder.glob(str(name)))
    return [
        above / name.name
        for above in (folder.glob(str(name.parent)) if "*" in str(name.parent) else [folder / name.parent])
    ]


def _pipe(path: Path, outside: Path) -> None:
    if not (outside.parent / "pipe").exists():
        os.mkfifo(outside.parent / "pipe")
    path.symlink_to(outside.parent / "pipe")


def _socket(path: Path, _: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _endless(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


_PLANT = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "mine.txt"),
    "link to a folder": lambda path, outside: path.symlink_to(outside / "kept"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "new.txt"),
    "link to itself": lambda path, _: path.symlink_to(path),
    "hard link": lambda path, outside: path.hardlink_to(outside / "mine.txt"),
    "link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "link to /dev/full": lambda path, _: path.symlink_to("/dev/full"),
    "link to a pipe": _pipe,
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": _socket,
    "folder": lambda path, _: path.mkdir(),
    "endless file": _endless,
}
