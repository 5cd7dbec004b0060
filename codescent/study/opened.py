"""In: the folder of a study. Out: the study, evaluated from its run folders; its repeats.
Does not run anything and does not compute statistics (evaluate.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.plan import FlopFormula
from codescent.plan.line import model_line
from codescent.results import Run, State, differing
from codescent.study.evaluate import Taken, evaluated
from codescent.study.file import config_named
from codescent.study.folder import Attempt, StudyFolder
from codescent.study.marks import MarkKind, mark
from codescent.study.points import Spec, growing
from codescent.study.repeat import Repeat, going_on, repeat_of
from codescent.study.result import PointState, Study

OF_THE_MODEL = ("model.", "lora.", "data.tokenizer")
"""Beginnings of keys that make another model."""

DONE = PointState.DONE
FAILED = (PointState.FAILED, PointState.OUT_OF_MEMORY)

NOT_ENDED = {
    State.UNFINISHED: MarkKind.UNFINISHED,
    State.STOPPED: MarkKind.STOPPED,
    State.FAILED: MarkKind.BROKEN,
}
"""The mark of a repeat whose run has this state."""

DECIDE = ("device", "processor", "cores", "torch")
"""Facts in which the machines of one comparison must agree."""

MACHINE = ("codescent", "torch", "python", "system", "processor", "cores", "memory_bytes", "device")
"""Facts of environment.json that say on what a study was run."""


def open_study(path: Path | str, formula: FlopFormula = FlopFormula.ATTENTION) -> Study:
    """Evaluate the study in a folder. `formula`: by which FLOPs are counted.

    Raises UserError: it is no folder of a study, a run folder is damaged, or its runs are of different models.
    """
    return evaluate_folder(StudyFolder.open(path), formula=formula)[0]


class StudyRuns:
    """The runs of a study's folder, which is read once; `again` reads a point whose repeat has just ended.

    `formula`: by which FLOPs are counted.
    """

    def __init__(self, folder: StudyFolder, formula: FlopFormula = FlopFormula.ATTENTION) -> None:
        self.folder, self.formula = folder, formula
        self.attempts = {spec.name: folder.attempts(spec) for spec in folder.definition.specs}

    def again(self, spec: Spec) -> None:
        """Read the runs of a point again."""
        self.attempts[spec.name] = self.folder.attempts(spec)

    @property
    def done(self) -> list[Run]:
        """The runs that are done, in order of the points."""
        refused = self.folder.definition.refused
        known = [one for name, attempts in self.attempts.items() if name not in refused for one in attempts]
        return [one.run for one in known if one.state is DONE and one.run]

    @property
    def machine(self) -> dict[str, Any]:
        """On what the first run was done; empty: none is."""
        return {name: run.environment.get(name) for run in self.done[:1] for name in MACHINE}

    def points(self) -> list[tuple[Taken, list[Attempt]]]:
        """Each point before its evaluation, with its attempts."""
        definition, machine, found = self.folder.definition, self.machine, []
        for spec in definition.specs:
            attempts = self.attempts[spec.name]
            state, why = self.folder.state(spec, attempts)
            done = [attempt for attempt in attempts if attempt.state is DONE] if state is DONE else []
            repeats = [_repeat(attempt, definition.warmup, machine, self.formula) for attempt in done]
            failed = [attempt.why for attempt in attempts if repeats and attempt.state in FAILED]
            workers = growing(definition.kind, spec.axes)
            began = [one.run for one in (*done, *attempts) if one.run is not None]
            prediction = next((run.prediction for run in began if run.prediction is not None), None)
            taken = Taken(spec.axes, workers, state, why, repeats, definition.repeats, failed, prediction)
            found.append((taken, attempts))
        return found


def evaluate_folder(
    folder: StudyFolder, baseline: Mapping[str, Any] | None = None, formula: FlopFormula = FlopFormula.ATTENTION
) -> tuple[Study, list[tuple[Taken, list[Attempt]]]]:
    """Evaluate a study, with another baseline if one is given. Returns also each point with its attempts.

    `formula`: by which FLOPs are counted.
    """
    definition, runs = folder.definition, StudyRuns(folder, formula)
    found = runs.points()
    refuse_other_models(runs.done, {key for spec in definition.specs for key in spec.overrides}, definition.name)
    given = definition.baseline if baseline is None else baseline
    taken = [one for one, _ in found]
    study = evaluated(definition.name, definition.kind, given, taken, runs.machine, str(folder.path))
    models = tuple(dict.fromkeys(model_line(run.plan) for run in runs.done if run.plan is not None))
    config = config_named(definition.config)
    return replace(study, warmup=definition.warmup, config=config, models=models, formula=formula), found


def refuse_other_models(runs: Sequence[Run], varied: set[str], name: str) -> None:
    """Raise UserError if runs are of models that differ in a key which no axis varies."""
    found = {
        key: values for key, values in differing(runs).items() if key.startswith(OF_THE_MODEL) and key not in varied
    }
    if found:
        listed = "; ".join(
            f"{key} = {' and '.join(map(str, dict.fromkeys(map(str, values))))}" for key, values in found.items()
        )
        other = next(run for run in runs if any(run.keys.get(key) != runs[0].keys.get(key) for key in found))
        raise UserError(
            f"{name}: its runs are of different models, such as {runs[0].folder.path} and {other.folder.path}, which "
            f"differ in {listed}; compare equal models only"
        )


def _repeat(attempt: Attempt, warmup: int, machine: Mapping[str, Any], formula: FlopFormula) -> Repeat:
    """What a done repeat measured; with a note if its run has not ended, or was on another machine than the first."""
    assert attempt.run is not None
    _refuse_damage(attempt.run)
    repeat, notes = repeat_of(attempt.run, attempt.number, warmup, attempt.record, formula), []
    if (state := attempt.run.state) is not State.DONE:
        notes.append(mark(NOT_ENDED[state], repeat=attempt.number))
    facts = attempt.run.environment
    notes += [
        mark(MarkKind.MACHINE, fact=name, here=facts.get(name), there=machine[name])
        for name in DECIDE
        if facts.get(name) != machine[name]
    ]
    return replace(repeat, notes=(*repeat.notes, *notes))


def _refuse_damage(run: Run) -> None:
    """Raise UserError: a file that the evaluation needs is damaged. It says how the study goes on."""
    try:
        _ = run.columns, run.plan, run.ranks
    except UserError as error:
        advice = going_on(run.folder.path)
        raise UserError(*(f"{problem}; mend the file, or {advice}" for problem in error.problems)) from error
