"""In: a job. Out: a batch script of SLURM: sbatch starts it, srun starts the ranks, requeue continues it.
Does not submit it (schedulers.py does)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from codescent.base.stopping import LATER
from codescent.base.time_limit import JOB_END
from codescent.jobs.bash import comment, quoted
from codescent.jobs.job import Job
from codescent.jobs.lines import each_node, exit_file, head, in_batch, not_again, record, setting, variables
from codescent.jobs.site import asked_devices

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
"""Characters that sbatch reads as they are. Others are in double quotes, and of these a backslash stands before two."""


def script(job: Job) -> str:
    """The batch script."""
    use = [
        f"sbatch {job.saved_as or 'FILE'} {job.does} Log: {job.name}-JOB.log.",
        *([f"Submit it {job.times} times: one job follows the other."] if job.times > 1 else []),
    ]
    lines = [*head(job, "SLURM", use, [directive(text) for text in _options(job)]), ""]
    hosts = record(job, 'scontrol show hostnames "$SLURM_JOB_NODELIST"')
    lines += [*setting(job), *each_node(_on_each_node(job), job), *variables(job, end=JOB_END), *hosts, ""]
    lines += [*exit_file(), "", *_start(job), "", *_again(job), 'exit "$code"']
    return "\n".join(lines) + "\n"


def directive(text: str) -> str:
    """Words as a shell would read them, as sbatch reads them in a script."""
    return f"#SBATCH {' '.join(map(_quoted, shlex.split(text)))}"


def _quoted(word: str) -> str:
    if PLAIN.fullmatch(word):
        return word
    name, equals, value = word.partition("=")
    if not (equals and PLAIN.fullmatch(name)):
        name, equals, value = "", "", word
    escaped = re.sub(r'[\\"]', r"\\\g<0>", value)
    return f'{name}{equals}"{escaped}"'


def _options(job: Job) -> Iterator[str]:
    site = job.site
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.devices}"
    if devices := asked_devices(site, job.devices):
        yield devices
    if site.cores is not None:
        yield f"--cpus-per-task={site.cores}"
    for option in ("account", "partition", "qos", "time"):
        if (value := getattr(site, option)) is not None:
            yield f"--{option}={quoted(value)}"
    if site.memory is not None:
        yield f"--mem={site.memory}"
    yield f"--chdir={quoted(str(job.folder))}"
    yield "--output=%x-%j.log"
    yield "--open-mode=append"
    if job.trains:
        yield "--requeue"
        yield f"--signal=USR1@{job.grace_s}"
    if job.times > 1:
        yield "--dependency=singleton"
    if site.mail is not None:
        yield "--mail-type=BEGIN,END,FAIL,REQUEUE"
        yield f"--mail-user={quoted(site.mail)}"
    yield from site.options


def _on_each_node(job: Job) -> list[str]:
    return ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1"]


def _start(job: Job) -> Iterator[str]:
    """srun, which starts the ranks. Since SLURM 22.05 it does not take cpus-per-task from sbatch. Where sbatch was told
    to export nothing, srun would not either."""
    site = job.site
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=1"]
    if site.cores is not None:
        words.append(f"--cpus-per-task={site.cores}")
    if site.binding == "cores":
        words.append("--cpu-bind=cores")
    yield from in_batch([*words, *site.launcher, *site.container, *job.words])


def _again(job: Job) -> Iterator[str]:
    """What follows a save. The shell of sbatch is outside of any container, so scontrol is there."""
    if not job.site.requeues:
        return
    yield "job=$SLURM_JOB_ID  # of an array the element alone"
    yield 'if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi'
    yield "# a job that is preempted, and saves in its grace time, is not requeued by SLURM itself"
    yield 'if [ "$code" -eq 143 ] && [[ $(scontrol show job "$job") = *PreemptTime=[0-9]* ]]; then'
    yield f"    code={LATER}"
    yield "fi"
    yield from comment(f"{LATER}: saved, start me again. The job begins again, at most {job.site.requeues} times.")
    yield f'if [ "$code" -eq {LATER} ]; then'
    yield f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {job.site.requeues} ]; then'
    yield f"        {not_again(job, 'sbatch')}"
    yield '    elif scontrol requeue "$job"; then'
    yield "        exit 0"
    yield "    fi"
    yield "fi"
