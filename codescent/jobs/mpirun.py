"""In: a job on hosts with slots. Out: a script with the mpirun of Open MPI, MPICH or Intel MPI.
Does not start it."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.jobs.bash import Raw, command
from codescent.jobs.job import Job
from codescent.jobs.lines import (
    ADDRESS,
    ANY_PORT,
    each_node,
    exit_file,
    head,
    left_behind,
    passing_on,
    setting,
    variables,
)

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
"""By site.mpi."""
PASSED_ON = (
    "PATH | LD_LIBRARY_PATH | PYTHONPATH | VIRTUAL_ENV | CONDA_* | TMPDIR",
    "CODESCENT_* | MASTER_* | GLOO_* | NCCL_* | CUDA_* | OMP_* | HF_*",
    "RCCL_* | HIP_* | ROCR_* | HSA_* | CCL_* | ZE_* | ONEAPI_*",
)
"""Names of variables that ranks of Open MPI get from the script."""


def script(job: Job) -> str:
    """The script."""
    mpi = str(job.site.mpi)
    use = [f"bash {job.saved_as or 'FILE'} {job.does}", left_behind(job)]
    lines = [*head(job, f"mpirun of {NAMES[mpi]}", use), "", *setting(job), *variables(job), *_master(job), ""]
    lines += [*exit_file(), *(_open_mpi_variables(job) if mpi == "openmpi" else []), ""]
    lines += [*each_node([*_words(job, on_each_node=True), *job.site.launcher], job)]
    words = [*_words(job), *job.site.launcher, *job.site.container, *job.words]
    lines += [*passing_on(words, kills=mpi == "openmpi"), 'exit "$code"']
    return "\n".join(lines) + "\n"


def _master(job: Job) -> Iterator[str]:
    """Where rank 0 is, if it may be on another machine: MPI gives no address, and MPICH no name for a port either."""
    if job.nodes == 1:
        return
    yield "# where rank 0 is, which mpirun does not tell"
    yield f"MASTER_ADDR=$({command([*ADDRESS, job.hosts[0], job.hosts[1]])})"
    yield "export MASTER_ADDR"
    if job.site.mpi == "mpich":
        yield f"export MASTER_PORT={ANY_PORT}"


def _open_mpi_variables(job: Job) -> Iterator[str]:
    """Open MPI passes on only what it is told."""
    yield '# Open MPI passes on only the variables that it is told; another one: site.launcher = ["-x", "NAME"]'
    yield "passed=()"
    yield "for name in $(compgen -e); do"
    yield "    case $name in"
    yield from (f'        {names}) passed+=(-x "$name") ;;' for names in PASSED_ON)
    yield "    esac"
    yield "done"


def _words(job: Job, *, on_each_node: bool = False) -> list[str]:
    """The words of mpirun, up to the command of a rank."""
    slots = (1,) * job.nodes if on_each_node else job.slots
    hosts = [f"{host}:{count}" for host, count in zip(job.hosts, slots, strict=True)] if job.hosts else []
    return {"openmpi": _open_mpi, "mpich": _mpich, "intelmpi": _intel}[str(job.site.mpi)](job, hosts, sum(slots))


def _open_mpi(job: Job, hosts: list[str], ranks: int) -> list[str]:
    """Slots are given to ranks in the order of the hosts. Open MPI binds ranks to cores unless it is told not to."""
    here = [f"localhost:{ranks}"]  # by itself mpirun starts no more ranks here than there are cores
    words = ["mpirun", "-np", str(ranks), "--host", ",".join(hosts or here)]
    binds = job.site.binding == "cores"
    words += ["--map-by", f"slot:PE={job.site.cores or 1}" if binds else "slot"]
    return [*words, "--bind-to", "core" if binds else "none", Raw('"${passed[@]}"')]


def _mpich(job: Job, hosts: list[str], ranks: int) -> list[str]:
    """Hydra passes all variables on."""
    words = ["mpirun", "-n", str(ranks), *(["-hosts", ",".join(hosts)] if hosts else [])]
    return [*words, *(["-bind-to", f"core:{job.site.cores or 1}"] if job.site.binding == "cores" else [])]


def _intel(job: Job, hosts: list[str], ranks: int) -> list[str]:
    """Intel MPI takes one number of ranks for all hosts, or a machine file. Its Hydra passes all variables on."""
    words = ["mpirun", "-n", str(ranks)]
    if hosts:
        lines = command(["printf", r"%s\n", *hosts])
        words += ["-machine", Raw(f"<({lines})")]
    if job.site.binding != "cores":
        return [*words, "-genv", "I_MPI_PIN", "0"]
    domain = [] if job.site.cores is None else ["-genv", "I_MPI_PIN_DOMAIN", str(job.site.cores)]
    return [*words, "-genv", "I_MPI_PIN", "1", *domain]
