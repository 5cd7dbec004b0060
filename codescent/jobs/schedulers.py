"""In: a script, a job's number. Out: the job submitted, its state in words, its end; by the scheduler's own commands.
Does not write scripts (slurm.py and pbs.py do) or remember jobs (submitted.py does)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.visible import visible

GONE = "unknown to the scheduler: it has ended long ago"
ANSWER_S = 60.0


@dataclass(frozen=True)
class Scheduler:
    """The commands of a scheduler.

    Attributes:
        submit: takes the script's file as its last word and prints the job's number.
        check: says what is wrong with a script without submitting it; empty: there is none.
        cancel: takes the job's number.
        state: of a job, in words.
        log: name of the log, by the job's name and number.
    """

    submit: tuple[str, ...]
    check: tuple[str, ...]
    cancel: tuple[str, ...]
    state: Callable[[str], str]
    log: Callable[[str, str], str]


def call(words: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints. Raises UserError: it is not there, failed, or does not answer."""
    try:
        done = subprocess.run(words, cwd=folder, check=False, capture_output=True, text=True, timeout=ANSWER_S)
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}; is this a machine that submits jobs?") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{words[0]}: no answer in {ANSWER_S:.0f} seconds: the scheduler is down or busy") from error
    if done.returncode:
        said = visible((done.stderr or done.stdout).strip())
        raise UserError(f"{' '.join(words)}: exit code {done.returncode}: {said}")
    return done.stdout


def submit(scheduler: Scheduler, script: Path, folder: Path) -> str:
    """Submit a script. Returns the job's number. Raises UserError: the scheduler refused it."""
    said = call([*scheduler.submit, str(script)], folder).strip()
    number = said.splitlines()[-1].partition(";")[0] if said else ""
    if not re.match(r"\d+", number):
        raise UserError(f"{scheduler.submit[0]}: its answer has no number of a job: {visible(said)}")
    return number


def _slurm_state(job: str) -> str:
    """The state while the job is in the queue; afterwards that of the accounting."""
    try:
        found = call(["squeue", "--noheader", "--jobs", job, "--format", "%T, %M of %l, %R"]).strip()
    except UserError:  # "Invalid job id specified": it has ended
        found = ""
    if found:
        return found.splitlines()[-1].lower()
    words = ["sacct", "--noheader", "--allocations", "--jobs", job, "--parsable2", "--format", "State,Elapsed,ExitCode"]
    try:
        found = call(words).strip()
    except UserError:  # many clusters have no accounting
        return GONE
    if not found:
        return GONE
    state, elapsed, code = found.splitlines()[-1].split("|")
    return f"{state.lower()} after {elapsed}, exit code {code.partition(':')[0]}"


PBS_STATES = {
    "Q": "queued", "R": "running", "H": "held", "W": "waiting", "E": "ending", "F": "finished", "M": "moved",
    "S": "suspended", "B": "running (array)", "T": "moving", "X": "finished",
}  # fmt: skip


def _pbs_state(job: str) -> str:
    found = json.loads(call(["qstat", "-x", "-f", "-F", "json", job]))["Jobs"]
    one = next(iter(found.values()))
    state = PBS_STATES.get(one["job_state"], one["job_state"])
    return f"{state}, exit code {one['Exit_status']}" if "Exit_status" in one else state


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        ("sbatch", "--parsable"), ("sbatch", "--test-only"), ("scancel",), _slurm_state,
        lambda name, job: f"{name}-{job}.log",
    ),
    "pbs": Scheduler(("qsub",), (), ("qdel",), _pbs_state, lambda name, job: f"{name}.o{job.partition('.')[0]}"),
}  # fmt: skip
"""By target."""
