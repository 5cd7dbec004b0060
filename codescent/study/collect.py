"""In: run folders from other machines. Out: repeats of a study: each run copied to the point whose keys it has.
Does not run anything. Runs that match no point are named, with the keys that differ."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.published import published
from codescent.base.writing import copy_file, make_folder, make_parents
from codescent.config import decided
from codescent.config.effects import effective
from codescent.config.load import to_toml
from codescent.record import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    METRICS_CSV,
    METRICS_JSONL,
    PLAN,
    PREDICTION,
    TOKENIZER,
)
from codescent.record.memory import MEMORY_CSV
from codescent.record.ranks import RANKS_CSV
from codescent.results import Run, State, open_runs
from codescent.study.accept import config_of, plan_for
from codescent.study.file import StudyFile
from codescent.study.folder import StudyFolder
from codescent.study.points import Spec
from codescent.study.result import PointState

NOT_COMPARED = (
    *("run.folder", "run.name", "data.folder", "train.device", "train.allocator", "train.num_steps"),
    *("parallel.ranks", "parallel.restarts", "parallel.timeout_s", "log.", "checkpoint."),
)
"""Beginnings of keys that may differ between machines, or change nothing that is measured. Ranks are counted."""

COPIED = (CONFIG, PLAN, ENVIRONMENT, PREDICTION, METRICS_CSV, METRICS_JSONL, EVENTS, RANKS_CSV, MEMORY_CSV, TOKENIZER)
"""What is copied of a run folder. A link or a pipe of such a name is refused: others may have made it."""
MOST_BYTES = 4 << 30
"""Of a file that is copied: metrics of some ten million steps."""


def collect(folder: StudyFolder, study: StudyFile, paths: Iterable[Path]) -> list[str]:
    """Copy finished runs into a study, each as a repeat of its point. Returns a sentence about each run.

    A run that has not ended is used if it has steps after the warm-up.

    Raises UserError: a folder is no run; runs match no point, with the keys that differ. Then none is copied.
    """
    definition = folder.definition
    runs = open_runs(paths)
    wanted = {spec.name: _keys_of(study, spec) for spec in definition.specs if spec.name not in definition.refused}
    specs = {spec.name: spec for spec in definition.specs}
    problems, found = [], []
    for run in runs:
        differ = {name: _differing(run, keys, specs[name]) for name, keys in wanted.items()}
        nearest = min(differ, key=lambda name: len(differ[name]))
        if differ[nearest]:
            problems.append(
                f"{run.folder.path}: is no point of {definition.name}; nearest is {nearest}, which has "
                f"{'; '.join(differ[nearest][:4])}"
            )
        elif not len(run.after(definition.warmup, "step_s")):
            problems.append(f"{run.folder.path}: has no step after the {definition.warmup} of the warm-up")
        else:
            found.append((run, specs[nearest]))
    if problems:
        raise UserError(*problems)
    return [_take(folder, run, spec) for run, spec in found]


def _take(folder: StudyFolder, run: Run, spec: Spec) -> str:
    """Copy a run to the next free repeat of a point; a run that is there already is left."""
    attempts = folder.attempts(spec)
    source = str(run.folder.path.resolve())
    for attempt in attempts:
        if attempt.record.get("collected") == source and attempt.state is PointState.DONE:
            return f"{run.folder.path}: is repeat {attempt.number} of {spec.name} already"
    taken = {attempt.number for attempt in attempts}
    number = next(number for number in range(1, len(taken) + 2) if number not in taken)
    path = folder.run_path(spec, number)
    make_parents(folder.path)
    folder.make_point(spec)
    _copy(run.folder.path, path)
    folder.note(spec, number, {"code": 0, "why": "", "collected": source})
    unfinished = "" if run.state is State.DONE else f"; it has not ended ({run.state}): its steps so far are used"
    return f"{run.folder.path}: repeat {number} of {spec.name}{unfinished}"


def _copy(source: Path, target: Path) -> None:
    """Copy the files of COPIED. Raises UserError: one is a link or no regular file, or no space is left."""
    names = [name for name in COPIED if os.path.lexists(source / name)]
    if links := [name for name in names if (source / name).is_symlink()]:
        raise UserError(*(f"{source / name}: is a symbolic link, and is not copied: replace it" for name in links))
    needed_bytes = sum((source / name).stat().st_size for name in names)
    with published(target, min(needed_bytes, len(names) * MOST_BYTES)) as making:
        for name in names:
            copy_file(source / name, making / name, MOST_BYTES)
        make_folder(making / CHECKPOINTS)


def _keys_of(study: StudyFile, spec: Spec) -> Mapping[str, Any]:
    """The keys of a point as its run folder has them."""
    config = config_of(study, spec)
    if config.train.global_batch_tokens is not None:
        config = decided.without_tokens(decided.with_samples(config, plan_for(config, spec.ranks).work.positions(-1)))
    sections = tomllib.loads(to_toml(effective(config)))
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _differing(run: Run, keys: Mapping[str, Any], spec: Spec) -> Sequence[str]:
    """The keys in which a run is not a point, each with both values."""
    found = [
        f"{key} = {keys.get(key)} instead of {run.keys.get(key)}"
        for key in sorted(keys.keys() | run.keys.keys())
        if not key.startswith(NOT_COMPARED) and keys.get(key) != run.keys.get(key)
    ]
    hosts = len(set(run.hosts)) or 1
    if run.num_ranks != spec.ranks:
        found.insert(0, f"{spec.ranks} ranks instead of {run.num_ranks}")
    if hosts != spec.nodes:
        found.append(f"{spec.nodes} machines instead of {hosts}")
    return found
