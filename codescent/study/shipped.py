"""In: the path of a study file, or the name of a shipped one. Out: its path.
Does not read it (file.py does)."""

from __future__ import annotations

import difflib
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.home import expanded

PACKAGE = Path(__file__).resolve().parent.parent


def shipped_studies() -> dict[str, Path]:
    """Paths of the shipped study files by name: inside the package in a wheel, next to it in a checkout."""
    folder = next((path for path in (PACKAGE / "studies", PACKAGE.parent / "studies") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def find(path: Path) -> Path:
    """The study file that `path` names. Raises UserError, with similar names: there is none."""
    path, own = expanded(path), shipped_studies()
    if path.is_file():
        return path
    if path.name == str(path) and path.suffix in ("", ".toml") and path.stem in own and not path.is_dir():
        return own[path.stem]
    if path.is_dir():
        raise UserError(f"{path}: is a folder, and not one of a study: it has no study.json; give a study file")
    near = difflib.get_close_matches(path.stem, own)
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped studies are {', '.join(own)}"
    raise UserError(f"{path}: no such file; {hint}")
