"""In: the arguments of `codescent train`. Out: the resolved config of the run to begin, or of the run to resume.
Does not check whether the run can be resumed (preflight and train/open.py do), and does not import torch."""

from __future__ import annotations

import dataclasses
import difflib
from argparse import Namespace
from pathlib import Path

from codescent.base.command import command, resume_command
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.config.load import COMMAND_LINE, LoadedConfig, shipped
from codescent.preflight import imported, is_begun, run_folder
from codescent.record import CONFIG, PLAN, RunFolder
from codescent.verbs.config import resolved_of


def config_of(arguments: Namespace) -> LoadedConfig:
    """The config that the arguments name. With --resume they may name a run folder: then its config, with overrides.

    The run is in the folder that the arguments name, even if it was renamed or moved since the config was written.

    Raises UserError: every problem of the config; with --resume, there is no run that has training steps; with
    --resume=auto, there are files that are not of such a run.
    """
    loaded = _named(arguments)
    if arguments.resume is not False:
        path, beside = run_folder(loaded.config), expanded(arguments.config).parent
        if not path.exists() and (beside / PLAN).is_file():  # a config in a run folder that was renamed or copied
            raise UserError(f"{path}: no such run folder; did you mean: {resume_command(beside)}")
        if arguments.resume or is_begun(loaded.config):
            _refuse_untrained(path)
    return loaded


def _named(arguments: Namespace) -> LoadedConfig:
    """See `config_of`."""
    word, path, may_resume = arguments.config, expanded(arguments.config), arguments.resume is not False
    try:
        is_folder, is_missing = path.is_dir(), not path.exists()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if word in shipped():  # a shipped config wins over a folder of its name; ./NAME is the folder
        return resolved_of(arguments)
    if may_resume and is_missing and path.suffix != ".toml":
        raise _missing(path)
    if is_folder and not may_resume and (path / CONFIG).is_file():
        begin = command("train", path / CONFIG, f"run.folder={path}-2")
        raise UserError(
            f"{path}: is a run folder; to continue this run: {resume_command(path)}; to begin another run with its "
            f"config: {begin}"
        )
    return _config_in(path, arguments) if is_folder and may_resume else resolved_of(arguments)


def _refuse_untrained(path: Path) -> None:
    """Raise UserError if there is no run in the folder, or only an imported one."""
    if [event.get("kind") for event in RunFolder.open(path).read_events()] == ["import"]:
        raise imported(path)


def _config_in(path: Path, arguments: Namespace) -> LoadedConfig:
    """The config in a run folder, with the overrides of the command line, for a run in this folder."""
    RunFolder.open(path)
    loaded = resolved_of(Namespace(**{**vars(arguments), "config": str(path / CONFIG)}))
    given = [name for name in ("run.name", "run.folder") if loaded.origins[name] == COMMAND_LINE]
    if given:
        raise UserError(*(f"{name}: given, but --resume {path} names the run; leave it out" for name in given))
    if run_folder(loaded.config) == path:
        return loaded
    run = loaded.config.run.model_copy(update={"folder": path})
    config = loaded.config.model_copy(update={"run": run})
    return dataclasses.replace(loaded, config=config, origins={**loaded.origins, "run.folder": COMMAND_LINE})


def _missing(path: Path) -> UserError:
    """The error for a run folder that does not exist, with the nearest run folder or shipped config."""
    files = [*Path("runs").glob(f"*/{CONFIG}"), *path.parent.glob(f"*/{CONFIG}")]
    names = {file.parent.name: str(file.parent) for file in files} | {name: name for name in shipped()}
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"did you mean {names[near[0]]}?" if near else "give the folder of the run, or its CONFIG"
    return UserError(f"{path}: no such run folder; {hint}")
