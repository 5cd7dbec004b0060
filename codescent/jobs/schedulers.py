"""In: a script, a job's number. Out: the job submitted, its state in words; by the commands of the scheduler.
Does not write scripts (slurm.py and pbs.py do) or remember jobs (submitted.py does), and ends none."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.visible import one_line

ANSWER_S = 60.0
OVER = (
    "completed", "failed", "cancelled", "timeout", "deadline", "node_fail", "boot_fail", "out_of_memory", "preempted",
    "revoked", "launch_failed",
)  # fmt: skip
"""How SLURM calls the state of a job that has ended, in small letters."""
NUMBER = re.compile(r"[0-9]{1,18}(\[[0-9]*\])?(\.[A-Za-z0-9_.-]+)?")
"""The number of a job, such as 4711, 4711.server or 4711[].server. Scripts give the same form to grep -E."""
UNSURE = re.compile(r"timed out|End of File|Connection reset", re.IGNORECASE)
"""What a command says whose connection was cut: the scheduler may have done what was asked."""
KILLED = 128
"""Above it an exit code is that of a shell whose command a signal has killed."""
QUEUED_ROW = re.compile(r"([A-Z_]+), .*", re.ASCII)
ENDED_ROW = re.compile(r"([A-Z_]+[^|]*)\|([^|]*)\|(\d+):(\d+)", re.ASCII)
"""Lines of squeue and sacct, as they are asked for here."""
SHOWN_CHARS = 200


class SchedulerError(UserError):
    """A command that says that it failed, or was not started: it has submitted nothing, and ended nothing."""


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of a job."""

    text: str
    is_over: bool


GONE = JobStatus("unknown to the scheduler: it has ended long ago", True)


@dataclass(frozen=True)
class Scheduler:
    """The commands of a scheduler.

    Attributes:
        submit: takes the script's file as its last word and prints the job's number.
        look: how a user looks for the jobs that wait or run.
        cancel: takes the job's number.
        state: of a job. It raises UserError where the scheduler does not answer.
        log: name of the log, by the job's name and number.
    """

    submit: tuple[str, ...]
    look: str
    cancel: tuple[str, ...]
    state: Callable[[str], JobStatus]
    log: Callable[[str, str], str]


def call(words: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints. Bytes that are not UTF-8 are replaced.

    Raises SchedulerError: it is not there, or says that it failed. Raises UserError: it was killed, or the scheduler
    did not answer it: nobody knows whether it has done its work.
    """
    try:
        done = subprocess.run(
            words, cwd=folder, check=False, capture_output=True, encoding="utf-8", errors="replace", timeout=ANSWER_S
        )
    except OSError as error:
        raise SchedulerError(f"{words[0]}: {error.strerror}; is this a machine that submits jobs?") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{words[0]}: no answer in {ANSWER_S:.0f} seconds: the scheduler is down or busy") from error
    if done.returncode:
        said = _shown(done.stderr) or _shown(done.stdout) or "it said nothing"
        if done.returncode < 0:
            raise UserError(f"{' '.join(words)}: was killed by {_signal(-done.returncode)}: {said}")
        is_unsure = done.returncode > KILLED or UNSURE.search(said)
        raise (UserError if is_unsure else SchedulerError)(f"{' '.join(words)}: exit code {done.returncode}: {said}")
    return done.stdout


def _shown(said: str) -> str:
    """What a command has said, in one line."""
    return one_line("; ".join(line.strip() for line in said.splitlines() if line.strip()))


def _signal(number: int) -> str:
    """Its name; signals of real-time programs have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def submit(scheduler: Scheduler, script: Path, folder: Path) -> str:
    """Submit a script. Returns the job's number: the last line that is one, since wrappers of a site say more.

    Raises SchedulerError: there is no job. Raises UserError: there may be one, but its number is not known.
    """
    said = call([*scheduler.submit, str(script)], folder)
    numbers = [line.strip().partition(";")[0] for line in said.splitlines()]  # SLURM may add ;CLUSTER
    found = next((number for number in reversed(numbers) if NUMBER.fullmatch(number)), None)
    if found is not None:
        return found
    answer = _shown(said)[:SHOWN_CHARS] or "it said nothing"
    raise UserError(f"{scheduler.submit[0]}: its answer has no number of a job: {answer}")


def _slurm_state(job: str) -> JobStatus:
    """The state by the queue, which keeps a job for some minutes after its end; then by the accounting."""
    queued = _queued(job)
    if queued is not None and not queued.is_over:
        return queued
    words = ["sacct", "--noheader", "--allocations", "--jobs", job, "--parsable2", "--format", "State,Elapsed,ExitCode"]
    unknown = "no longer in the queue; how it ended is unknown"
    try:
        found = call(words).strip()
    except UserError as error:  # many clusters have no accounting
        return queued or JobStatus(f"{unknown}: {error.problems[0]}", True)
    if not found:
        return queued or GONE
    rows = _rows(ENDED_ROW, found)
    if not rows:
        return queued or JobStatus(f"{unknown}: sacct says {_shown(found)[:SHOWN_CHARS]}", True)
    is_over = all(row[1].lower().startswith(OVER) for row in rows)
    return JobStatus(_listed(f"{row[1].lower()} after {row[2]}, {_ended(row)}" for row in rows), is_over)


def _ended(row: re.Match[str]) -> str:
    """How a job of sacct has ended: by a signal, or with an exit code."""
    return f"{_signal(int(row[4]))}" if int(row[4]) else f"exit code {row[3]}"


def _rows(form: re.Pattern[str], said: str) -> list[re.Match[str]]:
    """The lines of an answer that have this form. Others are words of the site, or of a broken command."""
    return [row for line in said.splitlines() if (row := form.fullmatch(line.strip()))]


def _queued(job: str) -> JobStatus | None:
    """The state by the queue; None: it is not there. Raises UserError: the answer is none."""
    try:
        found = call(["squeue", "--noheader", "--states=all", "--jobs", job, "--format", "%T, %M of %l, %R"]).strip()
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    if not found:
        return None
    rows = _rows(QUEUED_ROW, found)
    if not rows:
        raise UserError(f"squeue: its answer has no state of job {job}: {_shown(found)[:SHOWN_CHARS]}")
    is_over = all(row[1].lower().startswith(OVER) for row in rows)
    return JobStatus(_listed(f"{row[1].lower()}{row[0][len(row[1]) :]}" for row in rows), is_over)


def _listed(states: Iterable[str]) -> str:
    """The states of all elements of an array, equal ones once."""
    return "; ".join(dict.fromkeys(states))


PBS_STATES = {
    "Q": "queued", "R": "running", "H": "held", "W": "waiting", "E": "ending", "F": "finished", "M": "moved",
    "S": "suspended", "B": "running (array)", "T": "moving", "X": "finished",
}  # fmt: skip


def _pbs_state(job: str) -> JobStatus:
    try:
        found = _qstat(job)
    except UserError as error:
        if "Unknown Job" in str(error):
            return GONE
        raise
    fields = dict(re.findall(r"^ +(job_state|Exit_status) = (\S+)$", found, re.MULTILINE))
    letter = fields.get("job_state", "")
    if not letter:
        raise UserError(f"qstat: its answer has no state of job {job}: {_shown(found)[:SHOWN_CHARS]}")
    ended = f", exit code {fields['Exit_status']}" if "Exit_status" in fields else ""
    return JobStatus(f"{PBS_STATES.get(letter, letter)}{ended}", letter in "FX")


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
        ("sbatch", "--parsable"), "squeue --me", ("scancel",), _slurm_state,
        lambda name, job: f"{name}-{job}.log",
    ),
    "pbs": Scheduler(
        ("qsub",), "qstat -u $USER", ("qdel",), _pbs_state,
        lambda name, job: f"{name}.o{job.partition('.')[0]}",
    ),
}  # fmt: skip
"""By target."""
