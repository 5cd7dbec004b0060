"""In: the path of a run folder, texts of its files. Out: whether a run can be created there; its files, all or none.
Does not read runs (run_folder.py does) and does not lock them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from codescent.base import writing
from codescent.base.command import resume_command
from codescent.base.durable import sync_folder, write_synced
from codescent.base.errors import UserError

CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"
JOBS = "jobs"
"""What jobs/ keeps of the jobs that start the run; it may be there before the run begins."""
MAKING = ".partial"
"""In a folder with jobs: the files of a run that is being created."""

ANOTHER = "choose a new run.name (or run.folder)"


def is_free(path: Path) -> bool:
    """Whether a run can be created: there is nothing, or only what a job that starts the run has put there."""
    if not os.path.lexists(path):
        return True
    if not path.is_dir() or (path / CONFIG).is_file():
        return False
    names = {one.name for one in path.iterdir()}
    return names <= {JOBS} or {JOBS, MAKING} <= names


def refuse_taken(path: Path) -> None:
    """Raise UserError if a run cannot be created: `path` is a file or a folder with files."""
    if path.is_dir() and not is_free(path):
        is_run = (path / CONFIG).is_file()
        what = f"there is a run already: continue it ({resume_command(path)})" if is_run else "is not empty"
        raise UserError(f"{path}: {what}{', or' if is_run else ':'} {ANOTHER}")
    if not path.is_dir() and os.path.lexists(path):
        raise UserError(f"{path}: is a file, not a folder: choose another run.name or run.folder")
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise UserError(f"{path}: {above} is a file, not a folder: choose another run.folder")


def write_new(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files of a run that has no step, by name."""
    writing.make_folder(folder / CHECKPOINTS, folder.parent, exist_ok=False)
    for name, text in texts.items():
        write_synced(folder / name, text)


def write_beside_jobs(path: Path, texts: Mapping[str, str]) -> None:
    """Create the run in a folder that has jobs, to which others may add some meanwhile. The caller has locked it.

    The last of `texts` is config.toml: before it is there, there is no run. After a kill the folder MAKING is left, and
    the next call begins anew.

    Raises UserError: another process has created the run meanwhile.
    """
    refuse_taken(path)
    making = path / MAKING
    writing.remove_folder(making)
    writing.make_folder(making, exist_ok=False)
    write_new(making, texts)
    for name in (CHECKPOINTS, *texts):
        writing.move(making / name, path / name, path)
    sync_folder(path)
    writing.remove_empty(making)


def delete_new(path: Path) -> None:
    """Delete a run that has not begun. What a job that starts it has put there stays."""
    if not (path / JOBS).is_dir():
        writing.remove_folder(path, ignore_errors=True)
        return
    making = path / MAKING  # after a kill it says that the rest is of no run
    writing.make_folder(making)
    writing.remove_file(path / CONFIG)
    for one in path.iterdir():
        if one.name not in (JOBS, MAKING):
            is_folder = one.is_dir() and not one.is_symlink()
            writing.remove_folder(one) if is_folder else writing.remove_file(one)
    writing.remove_empty(making)
