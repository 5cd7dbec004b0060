"""In: the environment. Out: the user's folder of what can be had again: downloads, notes.
Does not make it."""

from __future__ import annotations

import os
from pathlib import Path

from codescent.base.home import expanded


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/codescent`, by default `~/.cache/codescent`. Raises UserError: there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expanded("~/.cache")) / "codescent"
