"""In: the words of a command. Out: the command as text for messages, which a shell reads back as the same words.
Does not run a command and does not know which options there are (verbs/arguments.py does)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def command(*words: Path | str) -> str:
    """A command line of codescent, such as "codescent sample runs/one". Words are quoted where a shell needs it."""
    return shlex.join(["codescent", *map(str, words)])


def resume_command(run: Path, *overrides: str) -> str:
    """The command line that continues the run in the folder `run`, with overrides of its config."""
    return command("train", "--resume", run, *overrides)


def how_to_tune(run: Path, missing: Sequence[str]) -> str:
    """How to begin a run with the config, and so with the weights, of the imported run `run`: ", with ...: COMMAND".

    `missing`: keys of [data] for files that the user has not given yet.
    """
    names = " and ".join(key.upper() for key in missing)
    yours = f", with your file{'s' * (len(missing) > 1)} as {names}" if missing else ""
    words = (f"data.{key}={key.upper()}" for key in missing)
    return f"{yours}: {command('train', run / 'config.toml', f'run.folder={run}-tuned', *words)}"
