"""In: a path as a user writes it. Out: the same with ~ or ~USER at its beginning as a folder.
Does not look whether anything is there."""

from __future__ import annotations

import os
from pathlib import Path

from codescent.base.errors import UserError


def expanded(path: Path | str) -> Path:
    """The path, from the home folder that it begins with. Raises UserError: there is none."""
    if problem := unknown_home(path):
        raise UserError(f"{path}: {problem}")
    return Path(_expand(path))


def unknown_home(path: Path | str) -> str:
    """Why a path that begins with ~ has no home folder; "" where it has one, or needs none."""
    user = str(path).partition("/")[0]
    if not _expand(path).startswith("~"):
        return ""
    who = f"there is no user {user[1:]} on this machine" if user != "~" else "this user has none: HOME is not set"
    return f"{user} is a home folder, and {who}; write the whole path, or ./{user} for a file of that name"


def _expand(path: Path | str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111  Path.expanduser raises RuntimeError for an unknown user
