"""In: a job on hosts with slots. Out: a script with the mpirun of Open MPI, MPICH or Intel MPI.
Does not start it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.rank import LOOPBACK
from codescent.jobs.bash import Raw, command, exports, head, run_variables, setting
from codescent.jobs.job import PORT, Job

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
"""By site.mpi."""


def script(job: Job) -> str:
    """The script."""
    use = [f"bash {job.saved_as or 'FILE'} begins the run, and the same continues it."]
    variables = [*run_variables(job), *_master(job)]
    lines = [*head(job, f"mpirun of {NAMES[str(job.site.mpi)]}", use), "", *setting(job), *exports(variables), ""]
    names = [name for _, name, _ in variables] + (["TMPDIR"] if job.site.scratch is not None else [])
    words = _WORDS[str(job.site.mpi)](job, names)
    lines.append(command(["exec", *words, *job.site.launcher, *job.site.container, *job.words]))
    return "\n".join(lines) + "\n"


def _master(job: Job) -> Iterator[tuple[str, str, str]]:
    """Where rank 0 is: MPI gives no address."""
    said = "where rank 0 is, which mpirun does not tell"
    if job.nodes == 1:
        address: str = LOOPBACK
    else:
        address = Raw(f"$({command(['python3', '-m', 'codescent.jobs.address', job.hosts[0], job.hosts[1]])})")
    yield said, "MASTER_ADDR", address
    yield said, "MASTER_PORT", str(PORT)


def _open_mpi(job: Job, names: Sequence[str]) -> list[str]:
    """Slots are given to ranks in the order of the hosts. Open MPI binds ranks to cores unless it is told not to."""
    words = ["mpirun", "-np", str(job.ranks)]
    if job.hosts:
        words += ["--host", ",".join(f"{host}:{slots}" for host, slots in zip(job.hosts, job.slots, strict=True))]
    cores = job.site.cores or 1
    words += ["--map-by", f"slot:PE={cores}" if job.site.binding == "cores" else "slot"]
    words += ["--bind-to", "core" if job.site.binding == "cores" else "none"]
    return [*words, *(word for name in names for word in ("-x", name))]


def _hydra(job: Job, names: Sequence[str]) -> list[str]:
    """Hydra, of MPICH and Intel MPI. It passes the environment on, if it is told so."""
    words = ["mpirun", "-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", ",".join(f"{host}:{slots}" for host, slots in zip(job.hosts, job.slots, strict=True))]
    if job.site.binding == "cores":
        words += ["-bind-to", f"core:{job.site.cores or 1}"]
    return [*words, "-genvlist", ",".join(names)]


def _intel(job: Job, names: Sequence[str]) -> list[str]:
    """Intel MPI takes one number of ranks for all hosts, or a machine file."""
    words = ["mpirun", "-n", str(job.ranks)]
    if job.hosts:
        machines = "\\n".join(f"{host}:{slots}" for host, slots in zip(job.hosts, job.slots, strict=True))
        words += ["-machine", Raw(f"<(printf '{machines}\\n')")]
    words += ["-genv", "I_MPI_PIN", "1" if job.site.binding == "cores" else "0"]
    return [*words, "-genvlist", ",".join(names)]


_WORDS = {"openmpi": _open_mpi, "mpich": _hydra, "intelmpi": _intel}
