"""In: what a run folder says of earlier starts, the environment of the job. Out: an error if a job starts in vain.
Does not end a run that a person has started: only a scheduler counts its starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from codescent.base.call import AGAIN, ON_LOSS, SURVIVES
from codescent.base.durable import write_json
from codescent.base.early import StopAsked, ending_signal
from codescent.base.errors import RunFailed, UserError
from codescent.base.reading import read_json
from codescent.base.writing import make_folder, make_parents
from codescent.config.sections import Config
from codescent.record import RunFolder
from codescent.record.run_folder import JOBS

if TYPE_CHECKING:
    from codescent.train.world import World

COUNTS = ("SLURM_RESTART_COUNT", "CODESCENT_START")
"""Variables with the number of the starts before this one: of SLURM, and of our script for PBS."""
FIRST = ("SLURM_JOB_ID", "PBS_JOBID")
"""Variables of jobs, which have none of COUNTS at their first start."""
IDLE_STARTS = 2
UNBEGUN = "unbegun.json"
"""In the folder of the run's jobs: the number of the last start that has ended before the run began."""


def refuse_restarts(config: Config, world: World) -> None:
    """Raise UserError if nobody would start a rank again that the config wants to be started again."""
    problems: list[str] = []
    by = f", and {world.this_rank.launcher} has started this one" if world.this_rank.launcher else ""
    if config.parallel.restarts and AGAIN not in os.environ:
        problems.append(
            f"parallel.restarts = {config.parallel.restarts}: only `codescent train --ranks` starts ranks of its "
            f"machine again{by}; set parallel.restarts to 0"
        )
    of_script = os.environ.get(ON_LOSS)
    if of_script not in (None, config.survive.on_loss):
        problems.append(
            f'survive.on_loss = "{config.survive.on_loss}": the script that has started this run was written for '
            f'"{of_script}": write it again with codescent launch'
        )
    elif config.survive.on_loss != "stop" and SURVIVES not in os.environ:
        problems.append(
            f'survive.on_loss = "{config.survive.on_loss}": only `codescent train --ranks`, and the agents of '
            f"`codescent launch --to ssh`, start ranks again{by}; set survive.on_loss to stop"
        )
    if problems:
        raise UserError(*problems)


def refuse_idle(folder: RunFolder | None, world: World) -> None:
    """Raise RunFailed on every rank if a scheduler starts a run again, and the last two starts have saved no step.

    Such a job would be started for ever: its machine fails, or its time is shorter than what a step and a save take.
    `folder`: of the run to resume, on rank 0.
    """
    if problem := world.from_first(lambda: "" if folder is None else _idle(folder, os.environ)):
        raise RunFailed(problem)


def _idle(folder: RunFolder, env: Mapping[str, str]) -> str:
    """Why the run is not started again, in a sentence; "": it is."""
    if (_start(env) or 0) < IDLE_STARTS:
        return ""
    events = folder.read_events()
    starts = [event["step"] for event in events if event["kind"] in ("start", "resume")][-IDLE_STARTS:]
    saved = max((event["step"] for event in events if event["kind"] == "checkpoint"), default=0)
    if len(starts) == IDLE_STARTS and len(set(starts)) == 1 and saved <= starts[0]:
        return (
            f"the last {IDLE_STARTS} starts of this job began at step {starts[0]} and saved no further step: it is not "
            "started again; look at the job's log, give it more time, or save more often (checkpoint.every); a new "
            "submission of the script goes on"
        )
    return ""


def is_started_again(env: Mapping[str, str]) -> bool:
    """Whether a scheduler has started this job before."""
    return bool(_start(env))


@contextmanager
def before_it_begins(path: Path | None, world: World) -> Iterator[None]:
    """A block before the first step. If a rank was asked to stop by its end, every rank raises StopAsked. Collective.

    `path`: of the folder of a new run; None: the run has begun in an earlier command.
    """
    from codescent.base.agreement import together  # noqa: PLC0415 - imports torch, which a process without ranks lacks

    try:
        yield
        if asked := [number for number in together(UserError, ending_signal) if number is not None]:
            raise StopAsked(signal.Signals(asked[0]).name)
    except StopAsked:
        if problem := world.from_first(lambda: "" if path is None else _unbegun(path, os.environ)):
            raise RunFailed(problem) from None
        raise


@contextmanager
def counted_if_stopped(path: Path | None) -> Iterator[None]:
    """A block that one rank does before the ranks have met. If it is asked to stop there, the start is counted.

    `path`: of the folder of a new run; None: the run has begun in an earlier command, or another rank counts.

    Raises RunFailed instead of StopAsked: the start before was counted, too.
    """
    try:
        yield
    except StopAsked:
        if path is not None and (problem := _unbegun(path, os.environ)):
            raise RunFailed(problem) from None
        raise


def _unbegun(path: Path, env: Mapping[str, str]) -> str:
    """A new run was asked to stop before it began. Why it is not started again, if the start before has ended so, too;
    otherwise "". Only a job writes that down.

    `path`: of the run folder that is not there yet.
    """
    start = _start(env)
    if start is None:
        return ""
    file, before = path / JOBS / UNBEGUN, None
    with suppress(OSError, ValueError, KeyError, TypeError):  # none is there, or no start has written it whole
        before = read_json(file)["start"]
    make_parents(path)
    make_folder(file.parent)
    write_json(file, {"start": start}, path)
    if start and before == start - 1:
        return (
            f"the last {IDLE_STARTS} starts of this job ended before the run began: it is not started again; prepare "
            "the data before (codescent data), or give the job more time; a new submission of the script goes on"
        )
    return ""


def _start(env: Mapping[str, str]) -> int | None:
    """How often a scheduler has started this job before; None: this is not a job."""
    counts = [int(text) for name in COUNTS if (text := env.get(name, "")).isascii() and text.isdigit()]
    return max(counts, default=0 if any(name in env for name in FIRST) else None)
