"""In: a block of this process's work on files. Out: what it brought to the disk and renamed, in order.
Does not stand in for os.fsync or a rename: they are real. A test cannot cut the power, so it checks their order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Noted:
    """Syncs as (inode, size) and renames as the new path, in order."""

    steps: list[tuple[int, int] | Path] = field(default_factory=list)

    def at(self, path: Path) -> int:
        """The number of the step that gave a file or folder its name."""
        return self.steps.index(path)

    def is_synced(self, path: Path, *, before: int | None = None, after: int = 0) -> bool:
        """Whether a file, as it is now, or a folder was brought to the disk in these steps."""
        status = path.stat()
        synced = [step for step in self.steps[after:before] if not isinstance(step, Path)]
        if path.is_dir():
            return status.st_ino in [inode for inode, _ in synced]
        return (status.st_ino, status.st_size) in synced


_listening: list[Noted] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.rename":
        for noted in _listening:
            folder = Path(f"/proc/self/fd/{arguments[3]}").readlink() if arguments[3] >= 0 else Path()
            noted.steps.append(folder / os.fsdecode(arguments[1]))


@contextmanager
def noted() -> Iterator[Noted]:
    """Note the syncs and renames of a block."""
    if not hasattr(_hook, "installed"):
        sys.addaudithook(_hook)
        _hook.installed = True  # type: ignore[attr-defined]
    found, fsync = Noted(), os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        found.steps.append((status.st_ino, status.st_size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note)
        _listening.append(found)
        try:
            yield found
        finally:
            _listening.remove(found)
