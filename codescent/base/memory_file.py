"""In: a name, for people. Out: a file of memory without a path.
Does not say what is in it (progress.py and stacks.py do)."""

from __future__ import annotations

import os


def file_of_memory(name: str) -> int:
    """A file without a path, which other processes get by its descriptor. The last one that closes it frees it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile  # noqa: PLC0415 - not on Linux

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
