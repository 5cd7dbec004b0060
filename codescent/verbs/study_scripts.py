"""In: a study's folder, a target and a site. Out: a script for each run that is to do, in the folder of the study.
Does not say what a script looks like (jobs/ does) and submits nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.output import note, say, warn
from codescent.base.visible import one_line
from codescent.jobs.job import Job, job_name
from codescent.jobs.targets import TARGETS
from codescent.study.folder import StudyFolder
from codescent.study.listing import to_do
from codescent.study.points import Spec
from codescent.verbs.launch import job_of
from codescent.verbs.script_file import save

SCRIPTS = "scripts"
"""Folder of the scripts in that of the study. Scripts of before are replaced."""


def write_scripts(arguments: Namespace, folder: StudyFolder) -> None:
    """Write a script for each run that is to do. Raises UserError: every reason why one cannot be; then none is."""
    jobs: list[Job] = []
    notes: list[str] = []
    problems: dict[str, list[str]] = {}
    for spec, number in _runs(folder):
        try:
            job, said = job_of(_of_launch(arguments, folder, spec, number))
        except UserError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(spec.name)
            continue
        name = f"{folder.definition.name}-{spec.slug}-{number}"
        file = folder.path / SCRIPTS / f"{name}{TARGETS[arguments.to].suffix}"
        jobs.append(replace(job, name=job_name(name), saved_as=file.absolute()))
        notes += said
    if problems:
        raise UserError(*(f"{_whose(names)}: {problem}" for problem, names in problems.items()))
    for sentence in dict.fromkeys(notes):
        warn(one_line(sentence))
    within = folder.path.absolute()
    for job in jobs:
        assert job.saved_as is not None
        save(TARGETS[arguments.to].script(job), job.saved_as, secret=arguments.to == "kubernetes", within=within)
    say([str(folder.path / SCRIPTS / job.saved_as.name) for job in jobs if job.saved_as is not None])
    what = counted(len(jobs), "script")
    note(f"{what} written; start each as its first lines say. Then: codescent study {folder.path}")


def _whose(names: Sequence[str]) -> str:
    """The points that have a problem; more than three are counted."""
    points = list(dict.fromkeys(names))
    return ", ".join(points) if len(points) <= 3 else counted(len(points), "point")


def _runs(folder: StudyFolder) -> Iterator[tuple[Spec, int]]:
    for spec, numbers, _ in to_do(folder):
        yield from ((spec, number) for number in numbers)


def _of_launch(arguments: Namespace, folder: StudyFolder, spec: Spec, number: int) -> Namespace:
    """The arguments with which `codescent launch` would write the script of a run."""
    path = Path(folder.run_path(spec, number))
    return Namespace(
        config=folder.definition.config, overrides=[*spec.words, f"run.folder={path}"], script_words=[],
        to=arguments.to, site=arguments.site, nodes=(spec.nodes, spec.nodes), devices=spec.ranks // spec.nodes,
        hosts=None, max_restarts=None, times=None, submit=False, out=None, said=arguments.said,
    )  # fmt: skip
