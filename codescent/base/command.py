"""In: the words of a command. Out: the command as text for messages, which a shell reads back as the same words.
Does not run a command and does not know which options there are (verbs/arguments.py does)."""

from __future__ import annotations

import shlex
from pathlib import Path


def command(*words: Path | str) -> str:
    """A command line of codescent, such as "codescent sample runs/one". Words are quoted where a shell needs it."""
    return shlex.join(["codescent", *map(str, words)])


def resume_command(run: Path, *overrides: str) -> str:
    """The command line that continues the run in the folder `run`, with overrides of its config."""
    return command("train", "--resume", run, *overrides)


def tune_command(run: Path, *overrides: str) -> str:
    """The command line that begins a run with the config, and so with the weights, of the imported run `run`."""
    return command("train", run / "config.toml", f"run.folder={run}-tuned", *overrides)
