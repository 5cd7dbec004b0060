"""In: a run folder, a script that was submitted. Out: the jobs of the run, each with script and number, in RUN/jobs.
Does not ask a scheduler (schedulers.py does)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.durable import write_json
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_json, read_text
from codescent.base.writing import make_parents
from codescent.jobs.job import HOST
from codescent.jobs.schedulers import NUMBER, SCHEDULERS
from codescent.record.beginning import JOBS

RECORD = "job-{}.json"
SUCCESSORS, HOSTS = "successors", "hosts"
"""Files that scripts append to: numbers of the jobs that they have submitted; hosts on which they have run."""
SHOWN_CHARS = 60


@dataclass(frozen=True)
class Submitted:
    """A job of a run.

    Attributes:
        target: such as "slurm".
        job: its number.
        name: of the job.
        script: its file in the folder.
        folder: where it was submitted, and where its log is.
        moment: of the submission, UTC.
    """

    target: str
    job: str
    name: str
    script: str
    folder: str
    moment: str


def new_folder(run: Path) -> Path:
    """A new folder for a job of the run. Raises UserError: it cannot be created; then nothing is."""
    above, created = run / JOBS, absent(run)
    try:
        make_parents(run)
        writing.make_folder(above)
        while True:
            number = 1 + max((int(one.name) for one in above.iterdir() if _is_number(one.name)), default=0)
            path = above / f"{number:04}"
            with suppress(FileExistsError):  # another command has created it a moment before
                writing.make_folder(path, run, exist_ok=False)
                return path
    except OSError as error:
        _remove_empty(created)
        raise UserError(f"{above}: {error.strerror}; the records of the run's jobs have to be there") from error


def _is_number(name: str) -> bool:
    """Whether a name has only the digits 0 to 9: others, such as ², are no numbers for `int`."""
    return name.isascii() and name.isdigit()


def absent(run: Path) -> list[Path]:
    """The folders that a new folder for a job of the run needs and that are not there, the innermost first."""
    above = run / JOBS
    return [path for path in (above, *above.parents) if not path.exists()]


def discard(path: Path, created: Sequence[Path]) -> None:
    """Delete the folder of a job that was refused, and those above it that were created for it, if they are empty."""
    writing.remove_folder(path, ignore_errors=True)
    _remove_empty(created)


def _remove_empty(created: Sequence[Path]) -> None:
    for above in created:
        with suppress(OSError):  # not empty, or not there
            writing.remove_empty(above)


def keep(path: Path, target: str, job: str, name: str, script: str, folder: Path) -> Submitted:
    """Write down a job that was submitted. Raises UserError: the file cannot be written, with the job's number."""
    made = Submitted(target, job, name, script, str(folder), datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        write_json(path / RECORD.format(job), asdict(made), path.parent.parent)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: job {job} is submitted, but not written down") from error
    return made


def jobs_of(run: Path) -> list[Submitted]:
    """The jobs of a run, oldest first, each before those that its script has submitted.

    Raises UserError: it has none, or a record cannot be read.
    """
    found: list[tuple[tuple[int, int], Submitted, Path]] = []
    problems: list[str] = []
    for path in files_of_jobs(run, RECORD.format("*")):
        try:
            made = _read(path)
        except (OSError, ValueError, RecursionError) as error:
            problems.append(
                f"{path}: not the record of a job ({json_problem(error)}); delete this file: its job is not known "
                "then, so look before whether it waits or runs"
            )
        else:
            found.append(((int(path.parent.name), int(re.split(r"\D", made.job)[0])), made, path.parent))
    if problems:
        raise UserError(*problems)
    if not found:
        raise UserError(f"{run}: no job of this run was submitted by codescent launch --submit")
    found.sort(key=lambda one: one[0])
    return [job for _, made, folder in found for job in (made, *_successors(made, folder))]


def files_of_jobs(run: Path, name: str) -> list[Path]:
    """The files of that name, which may have a star, of all jobs of a run. Raises UserError: they cannot be read."""
    above = run / JOBS
    try:
        folders = [path for path in above.iterdir() if path.is_dir()]
        return sorted(path for folder in folders for path in folder.iterdir() if fnmatch(path.name, name))
    except (FileNotFoundError, NotADirectoryError):  # of the run, or of its jobs
        return []
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}: the records of the run's jobs are there") from error


def _read(path: Path) -> Submitted:
    """A record. Raises OSError, RecursionError or ValueError, with all that is wrong in it."""
    wrong = [] if _is_number(path.parent.name) else ["its folder is not a number, such as 0001"]
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    names = [field.name for field in fields(Submitted)]
    wrong += [f"unknown: {name}" for name in data if name not in names]
    wrong += [f"{name}: {said}" for name in names if (said := _wrong(name, data.get(name)))]
    if wrong:
        raise ValueError(", ".join(wrong))
    return Submitted(**data)


def _wrong(name: str, value: Any) -> str:
    """What is wrong with a value of a record; empty: nothing. The folder may have any name that a file may have."""
    if not isinstance(value, str) or not value or "\0" in value:
        return "is no text"
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return "has half of a surrogate pair, which no name of a file has"
    if name != "folder" and not value.isprintable():
        return "has characters that do not print"
    if name == "target" and value not in SCHEDULERS:
        return f"is none of {', '.join(SCHEDULERS)}"
    return "is not the number of a job" if name == "job" and NUMBER.fullmatch(value) is None else ""


def _successors(made: Submitted, folder: Path) -> Iterator[Submitted]:
    """The jobs that the script of a job has submitted."""
    for number, moment in _lines(folder / SUCCESSORS):
        yield replace(made, job=number, moment=moment)


def hosts_of(run: Path) -> list[str]:
    """The hosts on which submitted jobs of a run have run; empty: none are known.

    Raises UserError: a file is not a list of hosts.
    """
    hosts = [(host, file) for file in files_of_jobs(run, HOSTS) for host in _text(file).split()]
    if wrong := {file: host for host, file in hosts if HOST.fullmatch(host) is None}:
        raise UserError(
            *(f'{file}: "{host[:SHOWN_CHARS]}" is not the name of a host; name the hosts yourself: --kill --hosts '
              "node1,node2" for file, host in wrong.items())
        )  # fmt: skip
    return list(dict.fromkeys(host for host, _ in hosts))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The words of a file of numbers and moments; of no file none. Raises UserError: a line is something else."""
    for line in _text(path).splitlines() if os.path.lexists(path) else []:
        number, _, moment = line.partition(" ")
        if NUMBER.fullmatch(number) is None or not moment or not moment.isprintable():
            raise UserError(
                f"{path}: not the number of a job and a moment: {line[:SHOWN_CHARS]}; delete this line, or write it "
                "as 4711.server 2026-01-31T12:00:00+00:00"
            )
        yield number, moment


def _text(path: Path) -> str:
    """What scripts have written, with bytes that are not UTF-8 replaced. Raises UserError: it cannot be read."""
    try:
        return read_text(path, errors="replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: scripts of the run write this file; move it away") from error
