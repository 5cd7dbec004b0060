"""In: a run, and what to do with its jobs. Out: jobs submitted, their states, the log of one; jobs or leftovers ended.
Does not write scripts (launch.py and jobs/ do)."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from codescent.base.command import command
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say, warn
from codescent.base.reading import open_regular
from codescent.base.visible import one_line
from codescent.config.load import load
from codescent.jobs import leftovers
from codescent.jobs.hosts import SSH
from codescent.jobs.job import Job, folder_of_script, names_of
from codescent.jobs.lines import PYTHON
from codescent.jobs.schedulers import SCHEDULERS, JobStatus, SchedulerError, call, submit
from codescent.jobs.submitted import Submitted, absent, discard, hosts_of, jobs_of, keep, new_folder
from codescent.jobs.targets import TARGETS
from codescent.preflight import run_folder
from codescent.record.lines import user_errors

OPTIONS = ("status", "follow", "cancel", "kill")
LOOK_S = 2.0
ASK_EVERY = 5
"""Looks at the log between two questions to the scheduler."""
NO_SSH = 255
"""Exit code of ssh where it does not reach the host."""


def main(arguments: Namespace) -> int:
    """Do what is asked with the jobs of a run. Returns the exit code."""
    asked = [name for name in OPTIONS if getattr(arguments, name)]
    if len(asked) > 1:
        raise UserError(f"codescent launch: give one of {', '.join(f'--{name}' for name in asked)}")
    given = [name for name in ("to", "nodes", "devices", "site", "times", "out", "max_restarts")
             if getattr(arguments, name) is not None]  # fmt: skip
    if arguments.submit:
        given.append("submit")
    if asked != ["kill"] and arguments.hosts is not None:
        given.append("hosts")
    words = [f"--{name.replace('_', '-')}" for name in given] + arguments.overrides
    words += [f"-- {shlex.join(arguments.script_words)}"] if arguments.script_words else []
    if words:
        raise UserError(f"codescent launch RUN --{asked[0]}: {', '.join(words)} has no effect here; leave it out")
    run = Path(arguments.config)
    if asked == ["kill"]:
        return _kill(run, arguments.hosts)
    _refuse_what_is_no_run(arguments.config, asked[0])
    jobs = jobs_of(run)
    return {"status": _status, "follow": _follow, "cancel": _cancel}[asked[0]](jobs)


def _refuse_what_is_no_run(given: str, option: str) -> None:
    """Raise UserError if there is no such folder. A config or a script is not a run: say how its folder is called."""
    if Path(given).is_dir():
        return
    try:
        run = _run_of(given)
    except UserError:  # not a config, or a damaged one
        run = None
    if run is None:
        what = "is a file, not a run folder" if Path(given).exists() else "there is no such run folder"
        raise UserError(f"{given}: {what}; give the folder that --submit has named, such as runs/NAME")
    what = "a script" if given.endswith(".py") else "a config"
    instead = command("launch", run, f"--{option}") if run.is_dir() else "it is not there, so no job was submitted here"
    raise UserError(f"{given}: is {what}, not a run folder; its run folder is {run}: {instead}")


def _run_of(given: str) -> Path | None:
    """The run folder of a config, or of a script that is there. Raises UserError: it is no config."""
    if given.endswith(".py"):
        return folder_of_script(given) if Path(given).is_file() else None
    return run_folder(load(given, []).config)


def submit_job(job: Job, target: str) -> int:
    """Submit the script of a job, `job.times` times, and keep it in the run folder.

    Where the scheduler refuses the first, nothing is kept. Where a job may exist its script stays, whatever happens: it
    may submit itself again.
    """
    created = absent(job.folder / job.run)
    folder = new_folder(job.folder / job.run)
    script = folder / f"{job.name}{TARGETS[target].suffix}"
    may_exist = False
    try:
        text = TARGETS[target].script(replace(job, saved_as=script, record=folder))
        with user_errors(script):
            replace_file(script, text, within=job.folder / job.run)
        for done in range(job.times):
            before, may_exist = may_exist, True
            try:
                number = submit(SCHEDULERS[target], script, job.folder)
            except SchedulerError as error:
                may_exist = before
                raise UserError(*error.problems, *_begun(job, done)) from error
            except UserError as error:
                raise UserError(_unknown(error.problems[0], target, script), *_begun(job, done)) from error
            except KeyboardInterrupt:
                warn(_unknown(f"{SCHEDULERS[target].submit[0]}: Ctrl-C came before its answer", target, script))
                raise
            made = keep(folder, target, number, job.name, script.name, job.folder)
            say([one_line(f"job {number} of {target} is submitted; its log will be {_log(made)}")])
    except BaseException:
        if not may_exist:
            discard(folder, created)
        raise
    print(f"its state: {command('launch', job.run, '--status')}")
    return 0


def _unknown(problem: str, target: str, script: Path) -> str:
    """The problem of a submission of which nobody knows whether there is a job."""
    scheduler = SCHEDULERS[target]
    return (
        f"{problem}; the job may exist all the same, so its script stays: {script}. Look with "
        f"{scheduler.look}, and end it with {scheduler.cancel[0]} NUMBER before you submit again"
    )


def _begun(job: Job, done: int) -> Iterator[str]:
    """A sentence where the first jobs of a chain are submitted, and a later one is not."""
    if done:
        shown = command("launch", job.run, "--status")
        yield f"{done} of {job.times} jobs {'is' if done == 1 else 'are'} submitted all the same: {shown}"


def _log(job: Submitted) -> Path:
    return Path(job.folder) / SCHEDULERS[job.target].log(job.name, job.job)


def _state(job: Submitted) -> JobStatus:
    return SCHEDULERS[job.target].state(job.job)


def _status(jobs: list[Submitted]) -> int:
    """Print the state of each job. Returns 1 if the scheduler did not answer for one."""
    code = 0
    for job in jobs:
        try:
            text = _state(job).text
        except UserError as error:
            text, code = f"its state is unknown: {error.problems[0]}", 1
        say([one_line(f"{job.target} {job.job}, submitted {job.moment}: {text}; {_log(job)}")])
    return code


def _cancel(jobs: list[Submitted]) -> int:
    """End the jobs that have not ended. Raises UserError: the scheduler refused some; all others are asked to end."""
    ended, problems = 0, list[str]()
    for job in jobs:
        try:
            if not _state(job).is_over:
                call([*SCHEDULERS[job.target].cancel, job.job])
                print(f"{job.target} {job.job}: is asked to end")
                ended += 1
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    if not ended:
        print("no job of this run waits or runs")
    return 0


def _follow(jobs: list[Submitted]) -> int:
    """Print the log of the oldest job that is not over, else of the newest, as it grows. Ctrl-C ends the command, not
    the job."""
    job = next((one for one in jobs if not _state(one).is_over), jobs[-1])
    log, at, looks = _log(job), 0, 0
    while True:
        state = _state(job) if looks % ASK_EVERY == 0 else None
        is_over = state is not None and state.is_over
        text = _from(log, at)
        text = text if is_over else text[: text.rfind(b"\n") + 1]  # the rest of a line comes later
        at += len(text)
        say([text.decode(errors="replace").rstrip("\n")] if text else [])
        sys.stdout.flush()
        if state is not None and is_over:
            say([one_line(f"{job.target} {job.job}: {state.text}")])
            return 0
        looks += 1
        time.sleep(LOOK_S)


def _from(log: Path, at: int) -> bytes:
    """What a log has from this byte on; nothing if it is not there yet. Raises UserError: it cannot be read."""
    try:
        with open_regular(log) as file:
            file.seek(at)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"{log}: {error.strerror}: the log of the job should be a file there") from error


def _kill(run: Path, given: str | None) -> int:
    """End what the run has left: on the hosts that are given, or on those of its jobs; if none are known, here.

    Returns 1 if something lives on, or if a host could not be reached.
    """
    mark = leftovers.mark_of(run)
    hosts = hosts_of(run) if given is None else names_of(given)
    if hosts:
        return max(_kill_on(host, mark) for host in hosts)
    if not (found := leftovers.find(mark)) and not run.is_dir():
        raise UserError(f"{run}: there is no such run folder, and no process of this machine has its mark")
    code = leftovers.main([mark, "--end"])
    if not found:
        print("nothing of this run is left on this machine")
    say([one_line(f"if it had other hosts: {command('launch', run, '--kill', '--hosts', 'node1,node2')}")])
    return code


def _kill_on(host: str, mark: str) -> int:
    """End what a run has left on a host. Returns 1 if that is not sure."""
    words = [*PYTHON, "codescent.jobs.leftovers", mark, "--end"]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && PATH={shlex.quote(f'{sys.prefix}/bin')}:$PATH {shlex.join(words)}"
    try:
        done = subprocess.run([*SSH, host, remote], check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        raise UserError(f"ssh: {error.strerror}: it is needed to reach {host}") from error
    said = done.stdout.decode(errors="replace")
    say(said.splitlines() or [f"{host}: nothing of this run is left"] * (done.returncode == 0))
    if done.returncode == NO_SSH:
        warn(f"{host}: ssh does not reach it: it is not known what is left there")
    return min(done.returncode, 1)
