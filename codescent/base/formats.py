"""In: the number of a format that was found on the disk. Out: None, or why this program does not read it.
Does not read files, and does not say what a format holds: docs/versions.md does."""

from __future__ import annotations

from codescent import __version__


def unreadable(found: object, oldest: int, newest: int, writer: str | None = None) -> str | None:
    """Why formats `oldest` to `newest` do not include the one that was found; None: they do.

    Args:
        found: the number in the file; anything but a whole number of at least 1 is damage.
        oldest: first format that this program reads.
        newest: the format that it writes.
        writer: version of codescent that wrote the file, where the file or its folder says it.
    """
    if type(found) is not int or found < 1:
        return f"format {found!r}: must be a whole number of at least 1: the file is damaged"
    if oldest <= found <= newest:
        return None
    known = f"format {oldest}" if oldest == newest else f"formats {oldest} to {newest}"
    by = f", written by codescent {writer}" if writer else ""
    right = f"codescent {writer}" if writer else "the version that wrote it" if found < oldest else "a newer version"
    newer = " or newer" if writer and found > newest else ""
    return f"format {found}{by}: codescent {__version__} reads {known}: use {right}{newer}"
