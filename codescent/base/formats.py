"""In: the format number of a file or folder. Out: None if this program reads it, else the reason for the user.
Does not read files and does not describe formats (docs/versions.md does)."""

from __future__ import annotations

import json
from typing import Any

from codescent import __version__

LONGEST = 40
"""Characters of a wrong number that are shown."""


def shortened(found: Any) -> str:
    """A value as it is in the JSON file, in at most LONGEST characters."""
    said = json.dumps(found)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3]}..."


def unreadable(found: object, oldest: int, newest: int, writer: str | None = None) -> str | None:
    """Why the format `found` is not one of `oldest` to `newest`, in words; None if it is.

    Args:
        found: the format number in the file. A value that is not a whole number >= 1 means damage.
        oldest: the oldest format that this program reads.
        newest: the format that this program writes.
        writer: the version of codescent that wrote the file; None: unknown.
    """
    shown = shortened(found)
    if type(found) is not int or found < 1:
        return f"format {shown}: must be a whole number of at least 1: the file is damaged"
    if oldest <= found <= newest:
        return None
    if writer == __version__:  # another copy of this version wrote it: its number does not say which one
        writer = None
    known = f"format {oldest}" if oldest == newest else f"formats {oldest} to {newest}"
    by = f", written by codescent {writer}" if writer else ""
    right = f"codescent {writer}" if writer else "the version that wrote it" if found < oldest else "a newer version"
    newer = " or newer" if writer and found > newest else ""
    return f"format {shown}{by}: codescent {__version__} reads {known}: use {right}{newer}"
