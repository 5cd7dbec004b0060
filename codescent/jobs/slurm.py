"""In: a job. Out: a batch script of SLURM: sbatch starts it, srun starts the ranks, requeue continues it.
Does not submit it (control.py does)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from codescent.jobs.bash import command, comment, exports, head, run_variables, setting
from codescent.jobs.job import Job
from codescent.jobs.site import NONE

PLAIN = re.compile(r"[^A-Za-z0-9_@%+=:,./-]")


def script(job: Job) -> str:
    """The batch script."""
    use = [
        f"sbatch {job.saved_as or 'FILE'} begins the run, and the same continues it. Log: {job.name}-JOB.log.",
        *([f"Submit it {job.times} times: one job follows the other."] if job.times > 1 else []),
    ]
    lines = [*head(job, "SLURM", use, [_directive(text) for text in _options(job)]), ""]
    lines += [*setting(job), *exports(run_variables(job)), ""]
    lines += [*_start(job), "", *_again(job), 'exit "$code"']
    return "\n".join(lines) + "\n"


def _directive(text: str) -> str:
    """An option of sbatch, which reads a backslash before a character as the character."""
    name, equals, value = text.partition("=")
    return f"#SBATCH {name}{equals}{PLAIN.sub(lambda found: chr(92) + found[0], value)}"


def _options(job: Job) -> Iterator[str]:
    site = job.site
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.devices}"
    if site.devices not in (None, NONE):
        yield site.devices.format(n=job.devices)
    if site.cores is not None:
        yield f"--cpus-per-task={site.cores}"
    for option in ("account", "partition", "qos", "time"):
        if getattr(site, option) is not None:
            yield f"--{option}={getattr(site, option)}"
    if site.memory is not None:
        yield f"--mem={site.memory}"
    yield f"--chdir={job.folder}"
    yield "--output=%x-%j.log"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=USR1@{job.grace_s}"
    if job.times > 1:
        yield "--dependency=singleton"
    if site.mail is not None:
        yield "--mail-type=BEGIN,END,FAIL,REQUEUE"
        yield f"--mail-user={site.mail}"
    yield from site.options


def _start(job: Job) -> Iterator[str]:
    """srun, which starts the ranks. It takes cpus-per-task from sbatch in no version after 22.05."""
    site = job.site
    words = ["srun", "--kill-on-bad-exit=1"]
    if site.cores is not None:
        words.append(f"--cpus-per-task={site.cores}")
    if site.binding == "cores":
        words.append("--cpu-bind=cores")
    yield "code=0"
    yield command([*words, *site.launcher, *site.container, *job.words], "|| code=$?")


def _again(job: Job) -> Iterator[str]:
    """What follows exit code 75. The shell of sbatch is outside of any container, so scontrol is there."""
    if not job.site.requeues:
        return
    yield from comment(f"75: saved before the time limit. The job begins again, at most {job.site.requeues} times.")
    yield f'if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.site.requeues} ]; then'
    yield "    job=$SLURM_JOB_ID"
    yield '    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi'
    yield '    scontrol requeue "$job"'
    yield "    exit 0"
    yield "fi"
