"""In: a word of a command line, such as 16MiB. Out: its number of bytes; of a device's memory, the word too.
Does not limit other sizes: each command does."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from codescent.base.counted import counted

LEAST_MEMORY_BYTES = 10**6
"""No device has less memory: who writes less has left out the unit."""
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)


def size_bytes(word: str) -> int:
    """Argument type: a number of bytes, rounded down. Raises ArgumentTypeError: no size, or below one byte."""
    found = _SIZE.fullmatch(word.strip())
    if found is None or found[2] not in UNITS or (size := int(float(found[1]) * UNITS[found[2]])) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a size, such as 16MiB, 64KiB, 1.5GB or 4096 (bytes)")
    return size


class MemorySize(NamedTuple):
    """The memory of a device: as the user wrote it, and in bytes."""

    text: str
    size_bytes: int


def memory_size(word: str) -> MemorySize:
    """Argument type: the memory of a device. Raises ArgumentTypeError: no size, or less than any device has."""
    size = size_bytes(word)
    if size < LEAST_MEMORY_BYTES:
        number = word.strip() if word.strip().isdecimal() and size <= 1000 else "8"
        raise argparse.ArgumentTypeError(
            f"{word!r} is {counted(size, 'byte')}, less than any device has; with a unit, such as {number}GB"
        )
    return MemorySize(word.strip(), size)
