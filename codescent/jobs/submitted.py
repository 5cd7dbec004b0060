"""In: a run folder, a script that was submitted. Out: the jobs of the run, each with script and number, in RUN/jobs.
Does not ask a scheduler (schedulers.py does)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from codescent.base.durable import write_json
from codescent.base.errors import UserError
from codescent.record.beginning import JOBS

RECORD = "job-{}.json"
SUCCESSORS, HOSTS = "successors", "hosts"
"""Files that scripts append to: numbers of the jobs that they have submitted; hosts on which they have run."""


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
    """A new folder for a job of the run. Raises UserError: it cannot be created."""
    above = run / JOBS
    try:
        above.mkdir(parents=True, exist_ok=True)
        while True:
            number = 1 + max((int(one.name) for one in above.iterdir() if one.name.isdigit()), default=0)
            path = above / f"{number:04}"
            with suppress(FileExistsError):  # another command has created it a moment before
                path.mkdir()
                return path
    except OSError as error:
        raise UserError(f"{above}: {error.strerror}") from error


def absent(run: Path) -> list[Path]:
    """The folders that a new folder for a job of the run needs and that are not there, the innermost first."""
    above = run / JOBS
    return [path for path in (above, *above.parents) if not path.exists()]


def discard(path: Path, created: Sequence[Path]) -> None:
    """Delete the folder of a job that was refused, and those above it that were created for it, if they are empty."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # not empty
        for above in created:
            above.rmdir()


def keep(path: Path, target: str, job: str, name: str, script: str, folder: Path) -> Submitted:
    """Write down a job that was submitted. Raises UserError: the file cannot be written, with the job's number."""
    made = Submitted(target, job, name, script, str(folder), datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        write_json(path / RECORD.format(job), asdict(made))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: job {job} is submitted, but not written down") from error
    return made


def jobs_of(run: Path) -> list[Submitted]:
    """The jobs of a run, oldest first, each before those that its script has submitted.

    Raises UserError: it has none, or a record cannot be read.
    """
    found: list[tuple[tuple[int, int], Submitted, Path]] = []
    for path in (run / JOBS).glob(f"*/{RECORD.format('*')}"):
        try:
            made = Submitted(**json.loads(path.read_text(encoding="utf-8")))
            found.append(((int(path.parent.name), _number(made.job)), made, path.parent))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: not the record of a job ({error})") from error
    if not found:
        raise UserError(f"{run}: no job of this run was submitted by codescent launch --submit")
    found.sort(key=lambda one: one[0])
    return [job for _, made, folder in found for job in (made, *_successors(made, folder))]


def _number(job: str) -> int:
    """The number in the name of a job, such as 4711.server or 4711[].server. Raises ValueError: there is none."""
    return int(job[: next((at for at, one in enumerate(job) if not one.isdecimal()), None)])


def _successors(made: Submitted, folder: Path) -> Iterator[Submitted]:
    """The jobs that the script of a job has submitted."""
    for number, moment in _lines(folder / SUCCESSORS):
        yield replace(made, job=number, moment=moment)


def hosts_of(run: Path) -> list[str]:
    """The hosts on which submitted jobs of a run have run; empty: none are known."""
    files = sorted((run / JOBS).glob(f"*/{HOSTS}"))
    return list(dict.fromkeys(host for file in files for host in file.read_text(encoding="utf-8").split()))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The words of a file of numbers and moments. Raises UserError: a line is something else."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        number, _, moment = line.partition(" ")
        if not (number and moment):
            raise UserError(f"{path}: not the number of a job and a moment: {line}")
        yield number, moment
