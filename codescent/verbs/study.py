"""In: arguments of `codescent study`. Out: the study's points run, listed, collected or read; its tables and words.
Does not evaluate (codescent/study does) and does not train: each point is a `codescent train` of its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from codescent.base.amounts import of_seconds
from codescent.base.console import new_console
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.output import note, say, warn
from codescent.base.visible import visible
from codescent.plan import FlopFormula
from codescent.results import Ended, stopped_by_signals
from codescent.study.accept import check_formula, prepare, refusals
from codescent.study.collect import collect
from codescent.study.evaluate import Taken, check_baseline, evaluated
from codescent.study.file import StudyFile, config_named, read_study
from codescent.study.folder import DEFINITION, Attempt, Definition, StudyFolder
from codescent.study.listing import commands
from codescent.study.opened import StudyRuns, evaluate_folder
from codescent.study.points import axes_of, specs_of
from codescent.study.repeat import repeat_of
from codescent.study.result import Kind, PointState, Study
from codescent.study.runner import Progress, Turn, run_turns, turns_of
from codescent.study.shipped import find
from codescent.study.table import STUDY_CSV, lacking, read_table, rows_of, write_table
from codescent.verbs import study_widths
from codescent.verbs.study_json import study_json
from codescent.verbs.study_scripts import write_scripts
from codescent.verbs.study_tables import show

FOLDER = "study-runs"
"""Where studies are, beside the folder of single runs: `codescent plot runs/*` draws no study."""

MANY = 100
"""With so many points it takes seconds until the first line."""


def main(arguments: Namespace) -> int:
    """Run a study, or do with it what one option says. Returns 1 if a point has failed, else 0."""
    baseline = _baseline(arguments.baseline)
    if not arguments.list and (only := [name for name in ("to", "site") if getattr(arguments, name) is not None]):
        raise UserError(f"--{only[0]}: is for scripts; add --list")
    if arguments.to is not None and arguments.json:
        raise UserError("--json: prints a list, and --to writes scripts; give one of them")
    if arguments.site is not None and arguments.to is None:
        raise UserError("--site: is for scripts; add --to TARGET")
    if (arguments.file / DEFINITION).is_file():
        return _shown(arguments, StudyFolder.open(arguments.file), baseline)
    file = find(arguments.file)
    study = read_study(file)
    _check_formula(arguments, study)
    where = arguments.folder or Path(FOLDER) / study.study.name
    if study.study.kind is Kind.WIDTHS:
        return study_widths.main(arguments, study, baseline, where)
    if arguments.table is not None:
        keys = study.study
        taken = read_table(arguments.table, keys.kind, study.axis_names)
        found = evaluated(keys.name, keys.kind, baseline or keys.baseline, taken)
        found = replace(found, paragraphs=[*found.paragraphs, *lacking(axes_of(study), taken, arguments.table)])
        _tell(found, arguments.table.name, as_json=arguments.json)
        return 0
    specs = specs_of(study)
    if len(specs) >= MANY:  # a point takes 20 ms and more
        note(f"planning {counted(len(specs), 'point')}, to find those that cannot exist")
    definition = Definition.of(study, specs, refusals(study, specs))
    check_formula(study, [spec for spec in specs if spec.name not in definition.refused], _formula(arguments))
    for given in filter(None, (definition.baseline, baseline)):
        check_baseline(replace(definition, baseline=given))
    folder = StudyFolder.create(where, definition)
    if arguments.list:
        if arguments.to is None:
            _list(folder, as_json=arguments.json)
        else:
            write_scripts(arguments, folder)
        return 0
    with folder.hold():
        if arguments.collect:
            lines = collect(folder, study, arguments.collect)
            note(*lines) if arguments.json else say(lines)
        else:
            folder = _run(folder, study, retry=arguments.retry is not None, as_json=arguments.json)
    return _finish(folder, baseline, _formula(arguments), as_json=arguments.json)


def _formula(arguments: Namespace) -> FlopFormula:
    return FlopFormula(arguments.formula or FlopFormula.ATTENTION)


def _check_formula(arguments: Namespace, study: StudyFile) -> None:
    """Raise UserError: --formula has no effect."""
    if arguments.formula is None:
        return
    if study.study.kind is Kind.WIDTHS:
        raise UserError("--formula: has no effect on a study of widths, which measures activations; leave it out")
    if arguments.table is not None:
        raise UserError("--formula: has no effect on a table, whose column flops says the FLOPs; leave it out")
    if arguments.list:
        raise UserError("--formula: has no effect with --list; give it when the study is evaluated")


def _run(folder: StudyFolder, study: StudyFile, *, retry: bool, as_json: bool) -> StudyFolder:
    """Do the runs that there are to do. Returns the folder, with the points that their data refuses.

    `as_json`: what is said of the runs goes to the standard error.
    """
    definition = folder.definition
    names = {turn.spec.name for turn in turns_of(folder, retry=retry)}
    refused = prepare(study, [spec for spec in definition.specs if spec.name in names])
    if refused:
        folder = StudyFolder.create(
            folder.path, replace(definition, refused={**definition.refused, **refused}), held=True
        )
    progress = Progress(turns_of(folder, retry=retry), folder.seconds())
    console = new_console(stderr=as_json)
    total, done, runs = len(progress.turns), 0, StudyRuns(folder)
    to_do = f"{counted(len(definition.specs), 'point')}, {counted(total, 'run')} to do{_about(progress, 0)}"
    config = config_named(definition.config)
    head = [f"study   {definition.name}: {to_do}", f"config  {config}", f"folder  {folder.path}"]
    note(*head) if as_json else say(head)
    try:
        with stopped_by_signals(), console.status("") if console.is_terminal else nullcontext() as status:
            for index, turn, ended in run_turns(folder, progress):
                if ended is None and status is not None:
                    status.update(escape(f"{index + 1} of {total}: {turn.spec.name}, repeat {turn.number}"))
                elif ended is not None:
                    done += 1
                    runs.again(turn.spec)
                    _write(folder, runs.points())  # after each run: an interrupted study has a table, too
                    console.print(visible(_line(folder, progress, index, turn, ended)), markup=False, soft_wrap=True)
                    console.file.flush()
    except (KeyboardInterrupt, SystemExit):
        _write(folder, runs.points())
        warn(f"stopped after {done} of {counted(total, 'run')}; the same command goes on, and repeats the last run")
        raise
    return folder


def _line(folder: StudyFolder, progress: Progress, index: int, turn: Turn, ended: Ended) -> str:
    """One line about a run that has ended."""
    attempt = next(one for one in folder.attempts(turn.spec) if one.number == turn.number)
    what = f"{attempt.state}: {ended.why}"
    if attempt.run is not None and attempt.state is PointState.DONE:
        what = (
            f"{of_seconds(repeat_of(attempt.run, turn.number, folder.definition.warmup, attempt.record).step_s)} a step"
        )
    where = f"{index + 1} of {len(progress.turns)}  {turn.spec.name}, repeat {turn.number}"
    return f"{where}  {what}{_about(progress, index + 1)}"


def _about(progress: Progress, done: int) -> str:
    """How long the rest will take."""
    left_s = progress.left_s(done)
    return f"  about {left_s / 60:.0f} min left" if left_s and left_s >= 30 else ""


def _list(folder: StudyFolder, *, as_json: bool) -> None:
    """Print the command of every repeat that is to do."""
    if as_json:
        found = [{"point": spec.name, "command": line or None, "why": why} for spec, line, why in commands(folder)]
        print(json_text({"config": config_named(folder.definition.config), "folder": folder.path, "points": found}))
        return
    say([f"# config: {config_named(folder.definition.config)}"])
    nodes = False
    for spec, line, why in commands(folder):
        say([f"# {spec.name}{f': {why}' if why else ''}", *([line] if line else [])])
        nodes = nodes or (spec.nodes > 1 and bool(line))
    if nodes:
        note("HOST is the first machine. Every machine runs the command; the study's folder is on a shared disk.")
    note(f"Runs on a disk that is not shared: codescent study FILE --collect FOLDER... Folder: {folder.path}")


def _shown(arguments: Namespace, folder: StudyFolder, baseline: Mapping[str, Any]) -> int:
    """Evaluate a study's folder, without its file."""
    given = [name for name in ("list", "collect", "table", "retry", "folder") if getattr(arguments, name)]
    if given:
        raise UserError(f"--{given[0]}: needs the study file, not the folder {folder.path}")
    return _finish(folder, baseline, _formula(arguments), as_json=arguments.json)


def _finish(folder: StudyFolder, baseline: Mapping[str, Any], formula: FlopFormula, *, as_json: bool) -> int:
    """Write study.csv and print what the study says."""
    study, points = evaluate_folder(folder, baseline or None, formula)
    _tell(study, str(_write(folder, points)), as_json=as_json)
    failed = (PointState.FAILED, PointState.OUT_OF_MEMORY)
    return int(any(attempt.state in failed for _, attempts in points for attempt in attempts))


def _tell(study: Study, source: str, *, as_json: bool) -> None:
    """Print what a study says: as tables, or as JSON. `source`: the file with all its numbers."""
    if as_json:
        print(json_text(study_json(study, source)))
    else:
        show(study, source)


def _write(folder: StudyFolder, points: Sequence[tuple[Taken, Sequence[Attempt]]]) -> Path:
    """Write study.csv: a row for each repeat."""
    rows: list[dict[str, Any]] = []
    for taken, attempts in points:
        others = [(one.number, one.state, one.why) for one in attempts if one.state is not PointState.DONE]
        rows += rows_of(taken, others)
    file = folder.path / STUDY_CSV
    write_table(file, folder.definition.axes, rows)
    return file


def _baseline(words: Sequence[str]) -> dict[str, Any]:
    """The baseline of the command line. Raises UserError: a word is not AXIS=VALUE."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise UserError(f"--baseline: {word!r} is not AXIS=VALUE, such as ranks=1")
        found[name.strip()] = value.strip()
    return found
