"""In: a word of a command line, such as 16MiB. Out: its number of bytes.
Does not limit sizes: each command does."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)


def size_bytes(word: str) -> int:
    """Argument type: a number of bytes, rounded down. Raises ArgumentTypeError: no size, or below one byte."""
    found = _SIZE.fullmatch(word.strip())
    if found is None or found[2] not in UNITS or (size := int(float(found[1]) * UNITS[found[2]])) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a size, such as 16MiB, 64KiB, 1.5GB or 4096 (bytes)")
    return size
