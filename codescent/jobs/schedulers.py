"""In: a script, a job's number. Out: the job submitted, its state in words; by the commands of the scheduler.
Does not write scripts (slurm.py and pbs.py do) or remember jobs (submitted.py does), and ends none."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.visible import visible

ANSWER_S = 60.0
OVER = (
    "completed", "failed", "cancelled", "timeout", "deadline", "node_fail", "boot_fail", "out_of_memory", "preempted",
    "revoked", "launch_failed",
)  # fmt: skip
"""How SLURM calls the state of a job that has ended, in small letters."""


@dataclass(frozen=True)
class State:
    """What a scheduler says of a job."""

    text: str
    is_over: bool


GONE = State("unknown to the scheduler: it has ended long ago", True)


@dataclass(frozen=True)
class Scheduler:
    """The commands of a scheduler.

    Attributes:
        submit: takes the script's file as its last word and prints the job's number.
        cancel: takes the job's number.
        state: of a job. It raises UserError where the scheduler does not answer.
        log: name of the log, by the job's name and number.
    """

    submit: tuple[str, ...]
    cancel: tuple[str, ...]
    state: Callable[[str], State]
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


def _slurm_state(job: str) -> State:
    """The state by the queue, which keeps a job for some minutes after its end; then by the accounting."""
    queued = _queued(job)
    if queued is not None and not queued.is_over:
        return queued
    words = ["sacct", "--noheader", "--allocations", "--jobs", job, "--parsable2", "--format", "State,Elapsed,ExitCode"]
    try:
        found = call(words).strip()
    except UserError as error:  # many clusters have no accounting
        return queued or State(f"no longer in the queue; how it ended is unknown: {error.problems[0]}", True)
    if not found:
        return queued or GONE
    rows = [line.split("|") for line in found.splitlines()]
    ended = (f"{state.lower()} after {elapsed}, exit code {code.partition(':')[0]}" for state, elapsed, code in rows)
    return State(_listed(ended), True)


def _queued(job: str) -> State | None:
    """The state by the queue; None: it is not there."""
    try:
        found = call(["squeue", "--noheader", "--states=all", "--jobs", job, "--format", "%T, %M of %l, %R"]).strip()
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    if not found:
        return None
    rows = [line.partition(",") for line in found.splitlines()]
    is_over = all(state.lower().startswith(OVER) for state, _, _ in rows)
    return State(_listed(f"{state.lower()},{rest}" for state, _, rest in rows), is_over)


def _listed(states: Iterable[str]) -> str:
    """The states of all elements of an array, equal ones once."""
    return "; ".join(dict.fromkeys(states))


PBS_STATES = {
    "Q": "queued", "R": "running", "H": "held", "W": "waiting", "E": "ending", "F": "finished", "M": "moved",
    "S": "suspended", "B": "running (array)", "T": "moving", "X": "finished",
}  # fmt: skip


def _pbs_state(job: str) -> State:
    try:
        found = _qstat(job)
    except UserError as error:
        if "Unknown Job" in str(error):
            return GONE
        raise
    fields = dict(re.findall(r"^ +(job_state|Exit_status) = (\S+)$", found, re.MULTILINE))
    letter = fields.get("job_state", "")
    if not letter:
        raise UserError(f"qstat: its answer has no state of job {job}: {visible(found[:200])}")
    ended = f", exit code {fields['Exit_status']}" if "Exit_status" in fields else ""
    return State(f"{PBS_STATES.get(letter, letter)}{ended}", letter in "FX")


def _qstat(job: str) -> str:
    """What PBS says of a job. Where it keeps no history, it refuses -x, and does not know a job that has ended."""
    try:
        return call(["qstat", "-x", "-f", job])
    except UserError as error:
        if "job history" not in str(error):
            raise
    return call(["qstat", "-f", job])


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        ("sbatch", "--parsable"), ("scancel",), _slurm_state,
        lambda name, job: f"{name}-{job}.log",
    ),
    "pbs": Scheduler(("qsub",), ("qdel",), _pbs_state, lambda name, job: f"{name}.o{job.partition('.')[0]}"),
}  # fmt: skip
"""By target."""
