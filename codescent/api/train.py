"""In: a config and other values of its keys. Out: a trained run. This process is the one rank, or starts the ranks.
Does not contain the loop (train/loop.py does) and starts no rank itself (verbs/train.py and launch/ do)."""

from __future__ import annotations

import dataclasses
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.api.own_code import refuse_stale
from codescent.api.process import as_before
from codescent.api.public import public
from codescent.api.rank_errors import errors_of_ranks
from codescent.api.run import Run
from codescent.api.words import KEYWORDS, ConfigGiven, arguments_of
from codescent.base.errors import RunFailed, UserError
from codescent.base.output import warn
from codescent.base.own_names import in_a_sentence
from codescent.base.stopping import LATER, SAVING, STOPPING, exit_code_of, reported
from codescent.config.load import COMMAND_LINE
from codescent.launch.environment import read
from codescent.preflight import run_folder
from codescent.verbs import train as verb
from codescent.verbs.resume import config_of

WRONG_INPUT, INTERRUPTED = 2, exit_code_of(signal.SIGINT)
ENDED = {LATER, *map(exit_code_of, (*STOPPING, *SAVING))}
"""Exit codes of a run that was asked to stop."""


@public
def train(config: ConfigGiven = None, *, resume: bool = False, **overrides: Mapping[str, Any]) -> Run:
    """Train as `codescent train` does, and return the run.

    One rank trains in this process; several (`parallel={"ranks": 4}`) are processes of this machine. What is printed
    is the same. Afterwards signals, the environment and the settings of torch are as before, so a program may call this
    as often as it likes, one call at a time. A Ctrl-C saves the run; then it interrupts the program, as ever.

    Args:
        config: the name of a shipped config or a TOML file; or its sections as a dict, with "base" for a config below
            it; None: the default job.
        resume: continue the run if it has begun, else begin it, as --resume=auto does.
        overrides: a dict for each section, such as `train={"num_steps": 20}, run={"name": "first"}`. They win over
            the config. None is "auto".

    Returns:
        The run in its folder.

    Raises:
        UserError: the input is wrong; `problems` has a sentence for each problem. Nothing has begun. Or another call
            of this process trains or samples now.
        RunFailed: a UserError, too: the run cannot continue, such as with losses that are not finite.
        KeyboardInterrupt: a Ctrl-C came. After the first one the run is saved, if it has done a step: `Run(path)` opens
            it.
        SystemExit: the process was asked to end by another signal than Ctrl-C, or its job's time is over. The run is
            saved. The code is that of the command: 143 after SIGTERM, 75 after SIGUSR1. With CODESCENT_EXIT_FILE, which
            scripts of `codescent launch` set, it is in this file, and the code is 0.
    """
    with arguments_of("train", config, overrides) as arguments:
        arguments.resume = None if resume else False
        return trained(arguments)


def resumed(run: Path, overrides: Mapping[str, Any]) -> Run:
    """Continue the run in a folder; see `train`."""
    with arguments_of("train", run, overrides) as arguments:
        arguments.resume = True
        return trained(arguments)


def trained(arguments: Namespace) -> Run:
    """Do the command with these arguments in this process. Raises what `train` raises."""
    if (rank := read(os.environ)) is not None and rank.world_size > 1:
        raise UserError(
            f"codescent.train: {rank.launcher} has started this process as rank {rank.rank} of {rank.world_size}; give "
            "the launcher the command `codescent train CONFIG`, or call codescent.train in one process, which starts "
            'ranks: parallel={"ranks": N}'
        )
    loaded = config_of(arguments)
    origins = {key: KEYWORDS if origin == COMMAND_LINE else origin for key, origin in loaded.origins.items()}
    folder = run_folder(loaded.config)
    refuse_stale(loaded.config)
    here = loaded.config.parallel.ranks == 1 and loaded.config.survive.on_loss == "stop"
    with as_before(computes=here), in_a_sentence(), errors_of_ranks() as problems:
        code = verb.main(arguments, dataclasses.replace(loaded, origins=origins))
    if code == 0 or code in ENDED:
        warn(*problems)  # of a rank whose end is no failure
    if code == INTERRUPTED:
        raise KeyboardInterrupt(f"{folder}: stopped")
    if code in ENDED:
        raise SystemExit(reported(code, os.environ))
    if code:
        error = UserError if code == WRONG_INPUT else RunFailed
        raise error(*problems or [f"{folder}: a rank has ended the run; what it has printed says why"])
    return Run(folder)
