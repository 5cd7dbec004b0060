"""In: a path as a user writes it. Out: the path with a leading ~ or ~USER replaced by the home folder.
Does not check whether the path exists."""

from __future__ import annotations

import os
from pathlib import Path

from codescent.base.errors import UserError


def expanded(path: Path | str) -> Path:
    """Replace a leading ~ or ~USER by the home folder. Raises UserError: that home folder is unknown."""
    if problem := unknown_home(path):
        raise UserError(f"{path}: {problem}")
    return Path(_expand(path))


def unknown_home(path: Path | str) -> str:
    """Why the home folder of a path with a leading ~ is unknown, as a sentence; "" if the path is usable."""
    user = str(path).partition("/")[0]
    if not _expand(path).startswith("~"):
        return ""
    who = f"there is no user {user[1:]} on this machine" if user != "~" else "this user has none: HOME is not set"
    return f"{user} is a home folder, and {who}; write the whole path, or ./{user} for a file of that name"


def _expand(path: Path | str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111  Path.expanduser raises RuntimeError for an unknown user
