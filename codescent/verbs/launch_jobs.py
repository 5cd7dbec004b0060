"""In: a run, and what to do with its jobs. Out: jobs submitted, their states, the log of one; jobs or leftovers ended.
Does not write scripts (launch.py and jobs/ do)."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from codescent.base.command import command
from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.jobs import leftovers
from codescent.jobs.job import Job, read_hosts
from codescent.jobs.schedulers import SCHEDULERS, call, submit
from codescent.jobs.submitted import Submitted, jobs_of, keep, new_folder
from codescent.jobs.targets import TARGETS

VERBS = ("status", "follow", "cancel", "kill")
LOOK_S = 2.0
ASK_EVERY = 5
"""Looks at the log between two questions to the scheduler."""
OVER = ("completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory", "preempted", "finished", "unknown")
"""How the state of a job begins that has ended."""


def main(arguments: Namespace) -> int:
    """Do what is asked with the jobs of a run. Returns the exit code."""
    asked = [name for name in VERBS if getattr(arguments, name)]
    if len(asked) > 1:
        raise UserError(f"codescent launch: give one of {', '.join(f'--{name}' for name in asked)}")
    given = [name for name in ("to", "nodes", "devices", "site", "times", "out", "max_restarts")
             if getattr(arguments, name) is not None]  # fmt: skip
    if arguments.submit:
        given.append("submit")
    if asked != ["kill"] and arguments.hosts is not None:
        given.append("hosts")
    if given or arguments.overrides:
        words = [f"--{name.replace('_', '-')}" for name in given] + arguments.overrides
        raise UserError(f"codescent launch RUN --{asked[0]}: {', '.join(words)} says nothing here; leave it out")
    run = Path(arguments.config)
    if asked == ["kill"]:
        return _kill(run, arguments.hosts)
    jobs = jobs_of(run)
    return {"status": _status, "follow": _follow, "cancel": _cancel}[asked[0]](jobs)


def submit_job(job: Job, target: str, run: Path) -> int:
    """Submit the script of a job, `job.times` times, and keep it in the run folder."""
    folder = new_folder(run)
    script = folder / f"{job.name}{TARGETS[target].suffix}"
    script.write_text(TARGETS[target].script(replace(job, saved_as=script.absolute())), encoding="utf-8")
    for _ in range(job.times):
        number = submit(SCHEDULERS[target], script.absolute(), job.folder)
        made = keep(folder, target, number, job.name, script.name, job.folder)
        print(f"job {number} of {target} is submitted; its log will be {_log(made)}")
    print(f"its state: {command('launch', run, '--status')}")
    return 0


def _log(job: Submitted) -> Path:
    return Path(job.folder) / SCHEDULERS[job.target].log(job.name, job.job)


def _status(jobs: list[Submitted]) -> int:
    for job in jobs:
        print(f"{job.target} {job.job}, submitted {job.moment}: {SCHEDULERS[job.target].state(job.job)}; {_log(job)}")
    return 0


def _cancel(jobs: list[Submitted]) -> int:
    """End the jobs that have not ended."""
    ended = 0
    for job in jobs:
        if not SCHEDULERS[job.target].state(job.job).startswith(OVER):
            call([*SCHEDULERS[job.target].cancel, job.job])
            print(f"{job.target} {job.job}: is asked to end")
            ended += 1
    if not ended:
        print("no job of this run waits or runs")
    return 0


def _follow(jobs: list[Submitted]) -> int:
    """Print the newest job's log as it grows. Ctrl-C ends the command, not the job."""
    job = jobs[-1]
    scheduler, log, at, looks = SCHEDULERS[job.target], _log(job), 0, 0
    while True:
        is_over = looks % ASK_EVERY == 0 and scheduler.state(job.job).startswith(OVER)
        if log.exists():
            with log.open("rb") as file:
                file.seek(at)
                text = file.read()
            at += len(text)
            say([text.decode(errors="replace").rstrip("\n")] if text else [])
            sys.stdout.flush()
        if is_over:
            print(f"{job.target} {job.job}: {scheduler.state(job.job)}")
            return 0
        looks += 1
        time.sleep(LOOK_S)


def _kill(run: Path, hosts: str | None) -> int:
    """End what the run has left here, or on the hosts that are named. Returns 1 if something lives on."""
    mark = str(run.absolute())
    if hosts is None:
        return leftovers.main([mark, "--end"])
    code = 0
    for host in read_hosts(hosts)[0]:
        words = ["python3", "-m", "codescent.jobs.leftovers", mark, "--end"]
        remote = (
            f"cd {shlex.quote(str(Path.cwd()))} && PATH={shlex.quote(f'{sys.prefix}/bin')}:$PATH {shlex.join(words)}"
        )
        done = subprocess.run(["ssh", "-o", "BatchMode=yes", host, remote], check=False)
        if done.returncode == 255:
            warn(f"{host}: ssh cannot reach it")
        code = code or done.returncode
    return code
