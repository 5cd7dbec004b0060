"""In: a run folder, a script that was submitted. Out: the jobs of the run, each with script and number, in RUN/jobs.
Does not ask a scheduler (schedulers.py does)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from codescent.base.durable import write_json
from codescent.base.errors import UserError
from codescent.record.run_folder import JOBS

RECORD = "job-{}.json"


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
        number = 1 + max((int(one.name) for one in above.iterdir() if one.name.isdigit()), default=0)
        path = above / f"{number:04}"
        path.mkdir()
    except OSError as error:
        raise UserError(f"{above}: {error.strerror}") from error
    return path


def keep(path: Path, target: str, job: str, name: str, script: str, folder: Path) -> Submitted:
    """Write down a job that was submitted."""
    made = Submitted(target, job, name, script, str(folder), datetime.now(UTC).isoformat(timespec="seconds"))
    write_json(path / RECORD.format(job), asdict(made))
    return made


def jobs_of(run: Path) -> list[Submitted]:
    """The jobs of a run, oldest first. Raises UserError: it has none, or a record cannot be read."""
    found = []
    for path in sorted((run / JOBS).glob(f"*/{RECORD.format('*')}")):
        try:
            found.append(Submitted(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: not the record of a job ({error})") from error
    if not found:
        raise UserError(f"{run}: no job of this run was submitted by codescent launch --submit")
    return sorted(found, key=lambda one: one.moment)
