"""In: environment variables. Out: the path of codescent's cache folder (downloads, records of verified files).
Does not create the folder."""

from __future__ import annotations

import os
from pathlib import Path

from codescent.base.home import expanded


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/codescent`, by default `~/.cache/codescent`. Raises UserError: the user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expanded("~/.cache")) / "codescent"
