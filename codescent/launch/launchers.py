"""In: environment variables. Out: a table of launchers with their variables; the launcher of this process.
Does not interpret the variables (environment.py does)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_NORMAL_STEP_ID = 0xFFFFFFF0  # slurm.h; higher ids belong to SLURM's own steps (batch, extern, interactive)


def is_set(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set and not empty."""
    return bool(env.get(name, "").strip())


def in_srun_step(env: Mapping[str, str]) -> bool:
    """Whether this process belongs to a step that `srun` started.

    The shell of sbatch or salloc is not in such a step. It is a single process, although sbatch sets SLURM_PROCID=0
    and both set SLURM_NTASKS of the whole job. Its step has no id, or an id of SLURM (4294967290; newer versions: -6).
    """
    text = next((env[name].strip() for name in ("SLURM_STEP_ID", "SLURM_STEPID") if is_set(env, name)), "")
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_NORMAL_STEP_ID))
    return is_number and int(text) <= MAX_NORMAL_STEP_ID


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher. If several variables of one field are set, they must be equal."""

    name: str  # in messages
    marks: tuple[str, ...]  # any of them shows that the launcher started this process
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node: str = ""  # index of this machine; if given, `local_world_size` is a list with an entry per machine
    nodes: str = ""  # number of machines: for launchers that do not say how many ranks this machine has
    hosts: tuple[str, ...] = ()  # lists of machines; rank 0 is on the first machine
    job: tuple[tuple[str, ...], ...] = ()  # alternatives; each is equal on all ranks and unique to this start
    proxy: str = ""  # parent program of the ranks of a machine; its process id identifies a job of one machine
    attempt: str = ""  # counts restarts of the job, alike on all machines (torchrun's agents count apart)
    fills: bool = True  # True: no address is needed on one machine, and no port if the job has an identifier
    hand_over: str = "export NAME=VALUE"  # how a user sets a variable for every rank
    where: Callable[[Mapping[str, str]], bool] = lambda env: True  # whether the marks are valid in this environment

    def mark(self, env: Mapping[str, str]) -> str | None:
        """A set variable of `marks`; None if this launcher did not start this process."""
        return next((name for name in self.marks if is_set(env, name)), None) if self.where(env) else None


TORCHRUN = Launcher(
    name="the variables of torchrun",
    marks=("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # an address alone is often left in a shell
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    world_size=("WORLD_SIZE",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    fills=False,
)
"""torch itself uses these names, and users export them. So other launchers accept them as a last alternative."""

TORCHRUN_SET = (*TORCHRUN.marks, "MASTER_ADDR", "MASTER_PORT")
"""All variables that torchrun sets so that its ranks find each other."""

OTHERS = (
    Launcher(
        name="jsrun of LSF",
        marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"),
        rank=("JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK"),  # Spectrum MPI is an Open MPI: it sets both
        local_rank=("JSM_NAMESPACE_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        world_size=("JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE"),
        local_world_size=("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        # no `hosts`: on some machines the first host of LSB_MCPU_HOSTS is a launch node without ranks
        job=(("PMIX_NAMESPACE",),),  # jsrun is a server of PMIx; LSB_JOBID is the same for all steps of a job
        hand_over="jsrun -E NAME=VALUE",
    ),
    Launcher(
        name="mpirun of Open MPI",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=(("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
        hand_over="mpirun -x NAME=VALUE",
        # for Spectrum MPI the ranks of Flux have OMPI_COMM_WORLD_RANK, and no other of these variables
        where=lambda env: is_set(env, "OMPI_COMM_WORLD_SIZE") or not is_set(env, "FLUX_TASK_RANK"),
    ),
    Launcher(
        name="mpiexec of PALS",
        marks=("PALS_RANKID",),
        rank=("PALS_RANKID", "PMI_RANK"),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        world_size=("PMI_SIZE",),  # PALS has no own variable for it
        local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        job=(("PALS_APID",),),
        hand_over="mpiexec --env NAME=VALUE",
        where=lambda env: not in_srun_step(env),  # SLURM's mpi/cray_shasta also sets PALS_RANKID
    ),
    Launcher(
        name="mpiexec of Hydra (MPICH, Intel MPI)",
        marks=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        rank=("PMI_RANK",),
        local_rank=("MPI_LOCALRANKID",),
        world_size=("PMI_SIZE",),
        local_world_size=("MPI_LOCALNRANKS",),
        job=(("I_MPI_HYDRA_UUID",),),
        proxy="hydra_pmi_proxy",
        hand_over="mpiexec -genv NAME VALUE",
    ),
    Launcher(
        name="mpirun_rsh of MVAPICH",  # its mpiexec is Hydra, above
        marks=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),  # users export the local rank for other launchers
        rank=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),  # MV2: MVAPICH2; MVP: since MVAPICH 3
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        world_size=("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        job=(("MPIRUN_ID",),),  # process id of mpirun_rsh
        hand_over="mpirun_rsh NAME=VALUE",
    ),
    Launcher(
        name="flux run",
        marks=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
        rank=("FLUX_TASK_RANK",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        world_size=("FLUX_JOB_SIZE",),
        local_world_size=(),
        nodes="FLUX_JOB_NNODES",
        job=(("FLUX_JOB_ID",),),
        hand_over="flux run --env=NAME=VALUE",
    ),
    Launcher(
        name="srun",
        marks=("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
        rank=("SLURM_PROCID",),
        local_rank=("SLURM_LOCALID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node="SLURM_NODEID",
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        job=(("SLURM_JOB_ID", "SLURM_STEP_ID"), ("SLURM_JOBID", "SLURM_STEPID")),
        attempt="SLURM_RESTART_COUNT",
        where=in_srun_step,
    ),
    Launcher(
        name="a launcher with PMI",
        marks=("PMI_RANK", "PMI_LOCAL_RANK"),
        rank=("PMI_RANK",),
        local_rank=("PMI_LOCAL_RANK",),
        world_size=("PMI_SIZE",),
        local_world_size=("PMI_LOCAL_SIZE",),
        job=(("PMI_JOBID",),),
        where=lambda env: not in_srun_step(env),  # SLURM's mpi/pmi2 also sets rank and size
    ),
)
"""In order of precedence: if one launcher starts another, the inner one comes first."""


def started_by(env: Mapping[str, str]) -> Launcher | None:
    """The launcher of this process: torchrun if its set is complete, else the first launcher with a set mark.

    An incomplete torchrun set, such as a WORLD_SIZE in a job script, has the lowest precedence.
    """
    if all(is_set(env, name) for name in TORCHRUN_SET):
        return TORCHRUN
    return next((launcher for launcher in (*OTHERS, TORCHRUN) if launcher.mark(env) is not None), None)
