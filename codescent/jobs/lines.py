"""In: a job. Out: lines of bash that several launchers share: the head, the site, variables, the exit code of a stop.
Does not start a launcher (a file for each does)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.stopping import EXIT_FILE, LATER
from codescent.base.time_limit import STOP_AT
from codescent.base.token import TOKEN
from codescent.jobs.bash import Raw, command, comment, expandable, quoted
from codescent.jobs.job import Job
from codescent.jobs.leftovers import MARK
from codescent.jobs.submitted import HOSTS
from codescent.launch.environment import PORTS

PYTHON = ("python3", "-P", "-m")
"""Runs a module of codescent. Without -P a file of the user's folder, such as secrets.py, would hide one of Python."""
ADDRESS = (*PYTHON, "codescent.jobs.address")
"""Prints the address of a host."""
SAVE = ("USR1", "USR2")
"""Signals on which the ranks save and are to be started again."""
PASSED = ("TERM", "INT", "HUP", *SAVE)
"""Signals that a script passes on to the launcher, which passes them on to the ranks."""
KILL_S = 1
"""Seconds between SIGTERM and SIGKILL for a launcher whose script was killed."""
ANY_PORT = f"$(({PORTS[0]} + RANDOM % {len(PORTS)}))"
"""A port for one start of a run."""


def head(
    job: Job, target: str, use: Sequence[str], directives: Sequence[str] = (), *, starts_ranks: bool = True
) -> list[str]:
    """The first lines of a script: what it is, how it is used, and what the scheduler reads.

    `starts_ranks`: whether the ranks start on the machine of the script.
    """
    what = f"{job.name}, {job.machines()}. Written for {target} by:"
    said = [line for text in (what, job.said, *use) for line in comment(text)]
    return ["#!/bin/bash", *directives, *said, "", "set -eo pipefail", *(begin(job) if starts_ranks else ())]


def begin(job: Job) -> Iterator[str]:
    """The time limit counts from the first line on, not from when modules are loaded."""
    if job.limit_s is not None and job.trains:
        yield "began=$(date +%s)"


def left_behind(job: Job) -> str:
    """A sentence for the head: how to end what a run has left on its hosts. Those of an elastic job are unknown."""
    kill = ["codescent", "launch", str(job.run), "--kill"]
    if job.nodes > 1 and job.least_nodes is None:
        kill += ["--hosts", ",".join(job.hosts)]
    where = ", on each node" if job.least_nodes is not None else ""
    return f"If it is killed, end what is left by: {shlex.join(kill)}{where}"


def setting(job: Job) -> Iterator[str]:
    """The site's lines before the command: folder, modules, lines of the site, environment, scratch."""
    site = job.site
    yield f"cd {quoted(str(job.folder))}"
    if site.modules:
        yield "if ! command -v module >/dev/null; then source /etc/profile || true; fi"
        yield command(["module", "load", *site.modules])
    yield from site.before
    if site.environment is not None and site.environment != "none":
        yield _activation(site.environment)
    if site.scratch is not None:
        yield f"export TMPDIR={expandable(str(site.scratch))}"
        yield 'mkdir -p "$TMPDIR"'


def _activation(environment: Path | str) -> str:
    """The line that activates a virtual environment, or one of conda."""
    path = Path(environment)
    if not (path / "conda-meta").is_dir():
        return f"source {expandable(f'{environment}/bin/activate')}"
    if (path / "bin" / "activate").is_file():  # conda's own, the base environment
        return f"source {quoted(f'{path}/bin/activate')}"
    base = path.parent.parent
    if path.parent.name == "envs" and (base / "bin" / "activate").is_file():
        return f"source {quoted(f'{base}/bin/activate')} {quoted(str(path))}"
    return f"export PATH={quoted(f'{path}/bin')}:$PATH CONDA_PREFIX={quoted(str(path))}"


def variables(job: Job, *, token: bool = True, end: str = "") -> Iterator[str]:
    """Variables of every rank, each under its comment.

    Args:
        job: the job.
        token: whether the script draws the secret of the run.
        end: a variable of the scheduler with the end of the job, in seconds since 1970.
    """
    if token:
        yield "# the secret by which the ranks recognise each other, new for each start"
        yield f"{TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
        yield f"export {TOKEN}"
    yield "# by this mark codescent launch --kill finds what the run has left"
    yield f"export {MARK}={quoted(job.mark)}"
    yield from stop_at(job, end)
    if job.site.interface is not None:
        yield "# the network interface of the ranks"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield f"export {name}={quoted(job.site.interface)}"


def stop_at(job: Job, end: str = "") -> Iterator[str]:
    """When the run saves and stops. The run folder says how long a save takes; where it cannot, what is known now."""
    if job.limit_s is None or not job.trains:
        return
    when = f"began + {job.limit_s} - "
    if end:
        yield f"end=${{{end}:-}}"
        yield f'if ! [[ $end =~ ^[0-9]+$ ]] || [ "$end" -le "$began" ]; then end=$((began + {job.limit_s})); fi'
        when = "end - "
    if job.has_checkpoints:
        words = [*job.site.container, *PYTHON, "codescent.jobs.grace", str(job.run), str(job.limit_s // 2)]
        yield "# the run saves and stops before its time limit: by twice the time of its longest save, and 30 s"
        yield f"grace=$({command(words)}) || grace={job.grace_s}"
        yield f"export {STOP_AT}=$(({when}grace))"
    else:
        yield f"# the run saves and stops {job.grace_s} s before its time limit"
        yield f"export {STOP_AT}=$(({when}{job.grace_s}))"


def exit_file(folder: str = "$PWD") -> Iterator[str]:
    """The file for the exit code of a run that was asked to stop. It is where every node and a container sees it."""
    yield "# a run that was asked to stop writes its exit code here, and its ranks end with 0: a launcher would take"
    yield "# any other code for a failure, and kill the other ranks or start them again"
    yield f'{EXIT_FILE}=$(mktemp "{folder}/.exit-XXXXXX")'
    yield f"export {EXIT_FILE}"
    yield f"trap 'rm -f \"${EXIT_FILE}\"' EXIT"


SAID = (f'said=$(cat "${EXIT_FILE}" || true)', "code=${said:-$code}")
"""Sets `code` to the exit code in the file, if there is one. A cat sees what another node has written at last."""


def in_batch(words: Sequence[str]) -> Iterator[str]:
    """Run a launcher in a batch script, to which the scheduler sends signals as to the ranks. Sets `code`."""
    yield "trap : TERM  # the scheduler sends it to the ranks, too: this script waits until they have saved"
    yield "code=0"
    yield command(words, "|| code=$?")
    yield from SAID


def not_again(job: Job, submit: str) -> str:
    """What a job says that has saved, and has no further start left. `submit`: the command that submits a script."""
    most = job.site.requeues
    file = "this script" if job.saved_as is None else str(job.saved_as.absolute())
    said = f"saved, and not started again: this was the last of {counted(most + 1, 'start')} (site.requeues={most})"
    return command(["echo", f"codescent: {said}. The run goes on by: {submit} {file}"])


def passing_on(words: Sequence[str], *, kills: bool = False, meanwhile: Sequence[str] = ()) -> Iterator[str]:
    """Run a launcher, and pass on to it the signals that this script gets. Sets `code`.

    Args:
        words: of the launcher.
        kills: whether it kills the ranks on the signals that ask them to stop, and passes on only SIGUSR1 and SIGUSR2.
        meanwhile: lines that are run once it is started.
    """
    yield "# a signal that comes before the launcher is there is sent to it afterwards"
    yield "launcher='' came=''"
    yield 'pass() { if [ -n "$launcher" ]; then kill -"$1" "$launcher" || true; else came=$1; fi; }'
    if kills:
        yield "# it kills the ranks on these three: SIGUSR1 asks them to save instead. A second Ctrl-C kills them"
        yield "stopped="
        yield "trap 'stopped=${stopped:-143}; pass USR1' TERM"
        yield "trap 'stopped=${stopped:-129}; pass USR1' HUP"
        yield "how=USR1"
        yield """trap 'stopped=${stopped:-130}; pass "$how"; how=INT' INT"""
    yield from (f"trap 'pass {name}' {name}" for name in (SAVE if kills else PASSED))
    yield from _if_killed()
    yield "# in a session of its own it gets Ctrl-C once, from this script"
    yield command(["setsid", *words], f"{NOT_ALIVE} &")
    yield "launcher=$!"
    yield 'echo "$launcher" >&"$alive"'
    yield 'if [ -n "$came" ]; then pass "$came"; fi'
    yield from meanwhile
    yield 'while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done  # a signal ends a wait, too'
    yield "code=0"
    yield 'wait "$launcher" || code=$?'
    yield from SAID
    if kills:
        yield f'if [ "$code" -eq {LATER} ]; then code=${{stopped:-$code}}; fi'


NOT_ALIVE = "{alive}>&-"
"""Closes the pipe of `_if_killed` in a process that lives on when the script is killed."""


def _if_killed() -> Iterator[str]:
    """End the launcher if the script is killed by SIGKILL, which it cannot pass on. Who reads from it sees its end."""
    yield "# if this script is killed by SIGKILL, this pipe ends, and its reader ends the launcher. It has a session of"
    yield "# its own: the whole group of this script may be killed"
    yield "# shellcheck disable=SC2016 # the reader puts the values in"
    yield "exec {alive}> >(exec setsid bash -c '"
    yield f'    trap "" {" ".join(PASSED)}'
    yield "    read -r launcher || exit"
    yield '    read -r _ || kill -TERM "$launcher" || exit  # it has ended already'
    yield f"    sleep {KILL_S}"
    yield '    kill -KILL -- "-$launcher"'
    yield f'    rm -f "${EXIT_FILE}"'
    yield "' >/dev/null 2>&1)"


def record(job: Job, hosts: str) -> Iterator[str]:
    """Of a submitted job: on which hosts codescent launch --kill has to look. `hosts`: a command that prints them."""
    if job.record is not None:
        yield f"{appending(hosts, job.record / HOSTS)}  # for codescent launch --kill"


def appending(program: str, file: Path) -> str:
    """A line that appends what a program prints to a file; never to a link or a pipe, which others may have made."""
    name = quoted(str(file))
    return f"[ -L {name} ] || [ -p {name} ] || {program} >>{name}"


def each_node(words: Sequence[str], job: Job) -> Iterator[str]:
    """Make the folder for temporary files on all nodes. `words`: of a launcher that starts one process on each."""
    if job.site.scratch is not None and job.nodes > 1:
        yield command([*words, "mkdir", "-p", Raw('"$TMPDIR"')])
