"""In: arguments of `codescent report`. Out: a page (HTML) or Markdown about runs or a study, and files of its figures.
Does not evaluate or draw (the room report/ does) and does not write a run folder. It does not import torch."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.base.published import in_words
from codescent.plan import FlopFormula
from codescent.report.content import Picture, Report, Timeline
from codescent.report.frame import standing
from codescent.report.markdown import MARK as MARKDOWN_MARK
from codescent.report.markdown import markdown
from codescent.report.page import MARK, page
from codescent.report.requests import requests_report
from codescent.report.run_figures import step_picture
from codescent.report.sections import file_name, report
from codescent.report.style import marked, no_matplotlib, picture_bytes
from codescent.results import Run, State, open_runs
from codescent.results.answered import read_log
from codescent.study import Study, open_study
from codescent.study.folder import DEFINITION
from codescent.study.table import STUDY_CSV
from codescent.verbs.learning_rate import FILES
from codescent.verbs.picture import no_file, no_replacement

PAGE = Path("report.html")
"""The page's file without --out."""


def main(arguments: Namespace) -> int:
    """Write the report, and say where it is; or print what a profile says."""
    if arguments.profile is not None:
        return _profile(arguments)
    if not arguments.runs:
        raise UserError("give run folders, the folder of a study, or --profile RUN")
    if arguments.window is not None:
        raise UserError("--window: has no effect without --profile")
    if arguments.format is not None and arguments.figures is None:
        raise UserError("--format: has no effect without --figures")
    out: Path | None = arguments.out
    if out is None and not arguments.markdown:
        out = PAGE
    problems = list(refusals(out, arguments.figures, is_markdown=arguments.markdown))
    runs: list[Run] = []
    study: Study | None = None
    try:
        runs, study = opened(arguments.runs, arguments.formula)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    _warn_of_few_steps(runs)
    found = report(runs, study) if arguments.requests is None else _of_requests(runs, study, arguments.requests)
    links = (
        write_figures(found, arguments.figures, arguments.format or "svg", out) if arguments.figures is not None else {}
    )
    text = markdown(found, links) if arguments.markdown else page(found)
    if out is None:
        print(text, end="")
        return 0
    write(out, text)
    if missing := no_matplotlib():
        warn(f"{out}: has no figures: {missing}")
    say([f"{out}: {counted(len(runs), 'run')}" + (f" of the study {study.name}" if study is not None else "")])
    return 0


def _of_requests(runs: Sequence[Run], study: Study | None, log: Path) -> Report:
    """The report about the requests that a run's model has answered. Raises UserError: not of one run, no such log."""
    if study is not None or len(runs) != 1:
        raise UserError("--requests: is about the model of one run; give its folder alone")
    prompts, damaged = read_log(log)
    return requests_report(runs[0], prompts, damaged)


def _warn_of_few_steps(runs: Sequence[Run]) -> None:
    """Say which runs have no step, or not all. Raises UserError: a file is damaged."""
    for run in runs:
        if not run.steps:
            warn(f"{run.folder.path}: has no row of metrics yet")
        elif run.state is State.UNFINISHED:
            warn(f"{run.folder.path}: has not ended; its steps so far are used")


def _profile(arguments: Namespace) -> int:
    """Print what a profile says. Raises UserError: words of the other way are given, too."""
    given = {
        "RUN": arguments.runs,
        "--out": arguments.out,
        "--figures": arguments.figures,
        "--format": arguments.format,
        "--formula": arguments.formula,
        "--requests": arguments.requests,
    }
    given["--markdown"] = arguments.markdown
    if found := [name for name, value in given.items() if value]:
        raise UserError(f"--profile: prints what one profile says, without {' and '.join(found)}")
    from codescent.verbs.report_profile import main as print_profile

    return print_profile(arguments)


def opened(paths: Sequence[Path], formula: str | None = None) -> tuple[list[Run], Study | None]:
    """The runs of folders, or a study with its runs. Raises UserError with the problems of all folders.

    `formula`: by which FLOPs of a study are counted; None: the usual one.
    """
    paths = [path for path in paths if not path.name.endswith(FILES)]  # `runs/*` has such files, too
    studies = [path for path in paths if (path / DEFINITION).is_file()]
    if lost := [path for path in paths if path not in studies and (path / STUDY_CSV).is_file()]:
        raise UserError(*(f"{path}: has {STUDY_CSV}, but its {DEFINITION} is missing: restore it" for path in lost))
    if not studies:
        if formula is None:
            return open_runs(paths), None
        problem = f"--formula: is for the folder of a study; speeds of runs are by {FlopFormula.ATTENTION}"
        try:
            open_runs(paths)
        except UserError as error:
            raise UserError(problem, *error.problems) from error
        raise UserError(problem)
    if len(paths) > 1:
        raise UserError(f"{studies[0]}: is the folder of a study; give a report one study, or runs")
    study = open_study(studies[0], FlopFormula(formula or FlopFormula.ATTENTION))
    return open_runs(run for group in study.groups for point in group.points for run in point.runs), study


def refusals(out: Path | None, figures: Path | None, *, is_markdown: bool) -> Iterator[str]:
    """Yield why the report cannot be written."""
    suffix, mark = (".md", MARKDOWN_MARK) if is_markdown else (".html", MARK)
    if out is not None:
        if out.suffix.lower() != suffix:
            yield f"--out {out}: the name must end in {suffix}"
        elif problem := no_file("--out", out):
            yield problem
        elif problem := no_replacement(out, mark, "report"):
            yield f"--out {out}: {problem}"
    if figures is not None:
        if figures.exists() and not figures.is_dir():
            yield f"--figures {figures}: is a file; give the name of a folder"
        elif not figures.absolute().parent.is_dir():
            yield f"--figures {figures}: there is no folder {figures.absolute().parent}"
        elif problem := no_matplotlib():
            yield f"--figures {figures}: {problem}, or leave out --figures: the tables need no matplotlib"


def write_figures(found: Report, folder: Path, suffix: str, out: Path | None) -> Mapping[str, str]:
    """Write each figure of the report into a file of the folder. Returns the link to each, from the place of `out`.

    Raises UserError: a file of another origin is there, before any is written; or one cannot be written.
    """
    pictures = [*found.pictures, *_steps(found)]
    files = {picture.name: folder / f"{picture.name}.{suffix}" for picture in pictures}
    if problems := [problem for path in files.values() if (problem := _no_figure(path))]:
        raise UserError(*problems)
    try:
        folder.mkdir(exist_ok=True)  # a link is the user's own word
        for picture in pictures:
            content = picture_bytes(standing(picture), f".{suffix}", marked(f".{suffix}", MARK))
            replace_file(files[picture.name], content)
    except OSError as error:
        raise UserError(f"--figures {folder}: cannot be written: {in_words(error)}") from error
    say([f"{folder}: {counted(len(files), 'figure')}"])
    base = out.absolute().parent if out is not None else Path.cwd()
    return {name: Path(os.path.relpath(path.absolute(), base)).as_posix() for name, path in files.items()}


def _no_figure(path: Path) -> str:
    """Why a figure cannot be written to `path`, whose folder may be absent; "" if it can."""
    if not path.parent.exists():
        return ""
    if problem := no_file("--figures", path):
        return problem
    problem = no_replacement(path, MARK, "report")
    return f"--figures {path}: {problem}" if problem else ""


def _steps(found: Report) -> list[Picture]:
    """A picture of each timeline."""
    timelines = [item for section in found.sections for item in section.items if isinstance(item, Timeline)]
    names = [f"step_{file_name(timeline.run)}" for timeline in timelines]
    unique = [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names)]
    return [step_picture(timeline, name) for timeline, name in zip(timelines, unique, strict=True)]


def write(path: Path, text: str) -> None:
    """Write the report, whole or not at all."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {in_words(error)}") from error
