"""In: the folder of a study. Out: the study, evaluated from its run folders; its repeats.
Does not run anything and does not compute statistics (evaluate.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.results import Run, State, differing
from codescent.study.evaluate import Taken, evaluated
from codescent.study.folder import Attempt, StudyFolder
from codescent.study.points import growing
from codescent.study.repeat import Repeat, repeat_of
from codescent.study.result import PointState, Study

OF_THE_MODEL = ("model.", "lora.", "data.tokenizer")
"""Beginnings of keys that make another model."""

FAILED = (PointState.FAILED, PointState.OUT_OF_MEMORY)

DECIDE = ("device", "processor", "cores", "torch")
"""Facts in which the machines of one comparison must agree."""

MACHINE = ("codescent", "torch", "python", "system", "processor", "cores", "memory_bytes", "device")
"""Facts of environment.json that say on what a study was run."""


def open_study(path: Path | str) -> Study:
    """Evaluate the study in a folder.

    Raises UserError: it is no folder of a study, a run folder is damaged, or its runs are of different models.
    """
    return evaluate_folder(StudyFolder.open(path))[0]


def evaluate_folder(
    folder: StudyFolder, baseline: Mapping[str, Any] | None = None
) -> tuple[Study, list[tuple[Taken, list[Attempt]]]]:
    """Evaluate a study, with another baseline if one is given. Returns also each point with its attempts."""
    definition, found = folder.definition, []
    machine: dict[str, Any] = {}
    runs: list[Run] = []
    for spec in definition.specs:
        attempts = folder.attempts(spec)
        state, why = folder.state(spec, attempts)
        done = [attempt for attempt in attempts if attempt.state is PointState.DONE] if state is PointState.DONE else []
        for attempt in done:
            assert attempt.run is not None
            runs.append(attempt.run)
            machine = machine or {name: attempt.run.environment.get(name) for name in MACHINE}
        repeats = [_repeat(attempt, definition.warmup, machine) for attempt in done]
        failed = [attempt.why for attempt in attempts if repeats and attempt.state in FAILED]
        workers = growing(definition.kind, spec.axes)
        found.append((Taken(spec.axes, workers, state, why, repeats, definition.repeats, failed), attempts))
    refuse_other_models(runs, {key for spec in definition.specs for key in spec.overrides}, definition.name)
    given = definition.baseline if baseline is None else baseline
    taken = [one for one, _ in found]
    study = evaluated(definition.name, definition.kind, given, taken, machine, str(folder.path))
    return replace(study, warmup=definition.warmup), found


def refuse_other_models(runs: Sequence[Run], varied: set[str], name: str) -> None:
    """Raise UserError if runs are of models that differ in a key which no axis varies."""
    found = {
        key: values for key, values in differing(runs).items() if key.startswith(OF_THE_MODEL) and key not in varied
    }
    if found:
        listed = "; ".join(
            f"{key} = {' and '.join(map(str, dict.fromkeys(map(str, values))))}" for key, values in found.items()
        )
        raise UserError(
            f"{name}: its runs are of different models, which differ in {listed}; compare equal models only"
        )


def _repeat(attempt: Attempt, warmup: int, machine: Mapping[str, Any]) -> Repeat:
    """What a done repeat measured; with a note if its run has not ended, or was on another machine than the first."""
    assert attempt.run is not None
    repeat, notes = repeat_of(attempt.run, attempt.number, warmup, attempt.record), []
    if attempt.run.state is not State.DONE:
        notes.append(f"repeat {attempt.number}: its run has not ended ({attempt.run.state})")
    facts = attempt.run.environment
    differ = [name for name in DECIDE if facts.get(name) != machine[name]]
    if differ:
        said = ", ".join(f"{name} {facts.get(name)}, not {machine[name]}" for name in differ)
        notes.append(f"other machine: {said}")
    return replace(repeat, notes=(*repeat.notes, *notes))
