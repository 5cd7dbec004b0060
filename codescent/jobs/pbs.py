"""In: a job. Out: a batch script of PBS: qsub starts it, mpiexec of PALS starts the ranks, qsub continues it.
Does not submit it (schedulers.py does)."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.stopping import LATER
from codescent.jobs.bash import Raw, command, comment, quoted
from codescent.jobs.job import Job
from codescent.jobs.lines import (
    ADDRESS,
    appending,
    each_node,
    exit_file,
    head,
    in_batch,
    not_again,
    record,
    setting,
    variables,
)
from codescent.jobs.schedulers import NUMBER
from codescent.jobs.site import asked_devices
from codescent.jobs.submitted import SUCCESSORS

START = "CODESCENT_START"
"""Number of the job in a chain of jobs."""


def script(job: Job) -> str:
    """The batch script."""
    use = [f"qsub {job.saved_as or 'FILE'} {job.does} Log: {job.name}.oJOB."]
    lines = [*head(job, "PBS", use, [f"#PBS {option}" for option in _options(job)]), ""]
    hosts = record(job, 'sort -u "$PBS_NODEFILE"')
    lines += [*setting(job), *each_node(_on_each_node(job), job), *variables(job), *_master(job), *hosts, ""]
    lines += [*exit_file(), "", *_start(job), "", *_again(job), 'exit "$code"']
    return "\n".join(lines) + "\n"


def _options(job: Job) -> Iterator[str]:
    site = job.site
    yield f"-N {job.name}"
    chunk = [f"select={job.nodes}", f"ncpus={job.devices * (site.cores or 1)}"]  # by itself PBS gives a node one core
    if devices := asked_devices(site, job.devices):
        chunk.append(devices)
    if site.memory is not None:
        chunk.append(f"mem={site.memory}")
    yield f"-l {':'.join(chunk)}"
    yield "-l place=scatter"
    yield f"-l walltime={_walltime(job.limit_s)}"
    if site.account is not None:
        yield f"-A {quoted(site.account)}"
    if site.partition is not None:
        yield f"-q {quoted(site.partition)}"
    yield "-j oe"
    yield "-k doe"
    yield f"-r {'y' if job.trains else 'n'}"
    if site.mail is not None:
        yield "-m abe"
        yield f"-M {quoted(site.mail)}"
    yield from site.options


def _walltime(limit_s: int | None) -> str:
    """PBS knows no days."""
    assert limit_s is not None
    return f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"


def _master(job: Job) -> Iterator[str]:
    """What PALS does not tell its ranks: how many they are, and where rank 0 is: on the first node of the job."""
    hosts = [Raw('"$(head -n 1 "$PBS_NODEFILE")"'), Raw('"$(tail -n 1 "$PBS_NODEFILE")"')]
    yield "# PALS does not tell how many ranks there are, and where rank 0 is: on the first node"
    yield f"export WORLD_SIZE={job.ranks}"
    yield f"MASTER_ADDR=$({command([*ADDRESS, *hosts])})"
    yield "export MASTER_ADDR"


def _on_each_node(job: Job) -> list[str]:
    return ["mpiexec", "--envall", "-n", str(job.nodes), "--ppn", "1", "--hostfile", Raw('"$PBS_NODEFILE"')]


def _start(job: Job) -> Iterator[str]:
    """mpiexec, which starts the ranks. It passes all variables on, so that no secret is on a command line that everyone
    can read. It binds each rank to one core unless it is told otherwise."""
    site, binding = job.site, ["--cpu-bind", "none"]
    if site.binding == "cores":
        binding = ["--cpu-bind", "depth", "--depth", str(site.cores or 1)]
    words = ["mpiexec", "--envall", "-n", str(job.ranks), "--ppn", str(job.devices)]
    words += ["--hostfile", Raw('"$PBS_NODEFILE"'), *binding]
    yield from in_batch([*words, "--line-buffer", *site.launcher, *site.container, *job.words])


def _again(job: Job) -> Iterator[str]:
    most = job.site.requeues
    if not most:
        return
    if job.saved_as is None:
        yield from comment(
            f"{LATER}: saved before the time limit. This script was printed, so it does not know its file:"
        )
        yield "# submit it again. One that is written with --out or --submit submits itself."
        return
    yield from comment(f"{LATER}: saved before the time limit. Another job goes on, at most {most} times.")
    yield f"start=${{{START}:-0}}"
    yield "only=()  # of an array this element alone: the range is given by its begin, a later end and the step"
    yield 'if [ -n "${PBS_ARRAY_INDEX:-}" ]; then only=(-J "$PBS_ARRAY_INDEX-$((PBS_ARRAY_INDEX + 1)):2"); fi'
    yield f'if [ "$code" -eq {LATER} ] && [ "$start" -lt {most} ]; then'
    only, number = Raw('"${only[@]}"'), Raw(f'"{START}=$((start + 1))"')
    submit = command(["qsub", only, "-v", number, str(job.saved_as.absolute())])
    yield f"    if said=$({submit}); then"
    yield '        echo "$said goes on"'
    if job.record is not None:
        yield "        # the number is the last line that is one: a site may say more. For --status"
        yield f'        next=$({command(["grep", "-xE", NUMBER.pattern])} <<<"$said" | tail -n 1 || true)'
        known = appending('echo "$next $(date -u +%FT%T+00:00)"', job.record / SUCCESSORS)
        yield f'        if [ -n "$next" ]; then {known}; fi'
    yield "        exit 0"
    yield "    fi"
    yield f'elif [ "$code" -eq {LATER} ]; then'
    yield f"    {not_again(job, 'qsub')}"
    yield "fi"
