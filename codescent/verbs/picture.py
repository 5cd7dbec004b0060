"""In: the name of a file, a figure of matplotlib. Out: why no picture can be written there; the bytes of the picture.
Does not draw: timeline.py, curves.py and learning_rate.py do."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES: dict[str, dict[str, str | None]] = {".png": {}, ".svg": {"Creator": None, "Date": None}}
"""The suffix of each picture format, with metadata for matplotlib. None leaves out the date and the version."""
SVG: dict[Any, str] = {"svg.hashsalt": "codescent", "svg.fonttype": "none"}
"""Settings of matplotlib for SVG: equal pictures are equal files, and text is stored as text."""
MAX_NAME_BYTES = 200  # file systems allow 255; a temporary file's name is longer
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of the palette of Okabe and Ito, which colour-blind readers can distinguish. Yellow is left out: too pale."""


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
    return ""


def no_matplotlib(otherwise: str = "") -> str:
    """Why no picture can be drawn here, and what mends that; "" if one can.

    Args:
        otherwise: what else would do, such as ", or write a .json trace".
    """
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return f"a picture needs matplotlib: pip install matplotlib{otherwise}"


def picture_bytes(figure: Figure, suffix: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """The figure as a file with this suffix, one of `PICTURES`. Equal figures give equal bytes.

    Args:
        metadata: keys of the format's metadata, such as Software (PNG) or Title (SVG).
    """
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(SVG):
        figure.savefig(content, format=suffix[1:], metadata={**PICTURES[suffix], **(metadata or {})})
    return content.getvalue()


def may_replace(path: Path, mark: str) -> bool:
    """Whether a file is absent, blank, or has the text `mark` near its begin: an earlier file of the same command."""
    try:
        with path.open("rb") as file:
            begin = file.read(4000)
    except OSError:
        return True  # absent; if it cannot be written, the writer says why
    return not begin.strip() or mark.encode() in begin
