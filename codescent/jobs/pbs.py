"""In: a job. Out: a batch script of PBS: qsub starts it, mpiexec of PALS starts the ranks, qsub continues it.
Does not submit it (control.py does)."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.jobs.bash import Raw, command, comment, exports, head, quoted, run_variables, setting
from codescent.jobs.job import Job
from codescent.jobs.site import NONE

START = "CODESCENT_START"
"""Number of the job in a chain of jobs."""


def script(job: Job) -> str:
    """The batch script."""
    saved = str(job.saved_as or f"{job.name}.pbs")
    use = [f"qsub {saved} begins the run, and the same continues it. Log: {job.name}.oJOB."]
    lines = [*head(job, "PBS", use, [f"#PBS {option}" for option in _options(job)]), ""]
    lines += [*setting(job), *exports([*run_variables(job), *_master()]), ""]
    lines += [*_start(job), "", *_again(job, saved), 'exit "$code"']
    return "\n".join(lines) + "\n"


def _options(job: Job) -> Iterator[str]:
    site = job.site
    yield f"-N {job.name}"
    chunk = [f"select={job.nodes}", f"mpiprocs={job.devices}"]
    if site.cores is not None:
        chunk.append(f"ncpus={site.cores * job.devices}")
    if site.devices not in (None, NONE):
        chunk.append(site.devices.format(n=job.devices))
    if site.memory is not None:
        chunk.append(f"mem={site.memory}")
    yield f"-l {':'.join(chunk)}"
    yield f"-l walltime={_walltime(job.limit_s)}"
    if site.account is not None:
        yield f"-A {quoted(site.account)}"
    if site.partition is not None:
        yield f"-q {quoted(site.partition)}"
    yield "-j oe"
    yield "-r y"
    if site.mail is not None:
        yield "-m abe"
        yield f"-M {quoted(site.mail)}"
    yield from site.options


def _walltime(limit_s: int | None) -> str:
    """PBS knows no days."""
    assert limit_s is not None
    return f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"


def _master() -> Iterator[tuple[str, str, str]]:
    """Where rank 0 is: the first node of the job, by the address that the last one reaches."""
    address = '$(python3 -m codescent.jobs.address "$(head -n 1 "$PBS_NODEFILE")" "$(tail -n 1 "$PBS_NODEFILE")")'
    yield "the address of rank 0, which PALS does not tell", "MASTER_ADDR", Raw(address)


def _start(job: Job) -> Iterator[str]:
    site = job.site
    names = ["CODESCENT_TOKEN", "CODESCENT_MARK", "CODESCENT_STOP_AT", "MASTER_ADDR"]
    names += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] if site.interface is not None else []
    names += ["TMPDIR"] if site.scratch is not None else []
    words = ["mpiexec", "-n", str(job.ranks), "--ppn", str(job.devices), "--hostfile", Raw('"$PBS_NODEFILE"')]
    if site.binding == "cores":
        words += ["--cpu-bind", "depth", "--depth", str(site.cores or 1)]
    words.append("--line-buffer")
    words += [Raw(f'--env {name}="${name}"') for name in names]
    yield "code=0"
    yield command([*words, *site.launcher, *site.container, *job.words], "|| code=$?")


def _again(job: Job, saved: str) -> Iterator[str]:
    if not job.site.requeues:
        return
    yield from comment(f"75: saved before the time limit. Another job goes on, at most {job.site.requeues} times.")
    yield f"start=${{{START}:-0}}"
    yield f'if [ "$code" -eq 75 ] && [ "$start" -lt {job.site.requeues} ]; then'
    yield f"    {command(['qsub', '-v', Raw(f'{START}=$((start + 1))'), saved])}"
    yield "    exit 0"
    yield "fi"
