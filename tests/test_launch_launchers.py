"""In: environments as launchers set them, each of a process that was looked at. Out: which rank, or every problem.
Does not start ranks: test_launch_ranks.py does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.launch import launchers
from codescent.launch.environment import PORTS, ancestor, read

# Open MPI 5.0.11, `mpirun -n 2`, rank 1, what is not about other things
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-30457@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
# MPICH 5.0.2, `mpirun -n 2`, rank 1
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# Intel MPI 2021.19, `mpirun -n 2`, rank 1
INTEL_MPI = {
    "HYDRA_BSTRAP_LOCALHOST": "vm",
    "I_MPI_HYDRA_UUID": "c9780000-a7ad-caa3-d060-060078dd9449",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# SLURM 22.05, `sbatch -N 2 -n 4`: its script ...
BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# ... and there `srun -N 2 -n 3`, rank 2
SRUN = {
    "SLURM_DISTRIBUTION": "block",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "41295",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# `salloc -N 2 -n 3`, its shell on the machine where it was typed
SALLOC = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# `salloc` with LaunchParameters=use_interactive_step, its shell on the first node
INTERACTIVE = {
    "SLURM_JOB_ID": "6",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# `srun --pty -n 1 bash` in the job above
PTY = SRUN | {
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
# `srun --mpi=pmi2 -n 2`, rank 1, on one node
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "4.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN_PMI2 = PMI2 | {
    "SLURM_JOB_ID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
# what mpi/cray_shasta of SLURM adds, by its source
SHASTA = {
    "PALS_APID": "2.0",
    "PALS_LOCAL_RANKID": "0",
    "PALS_NODEID": "1",
    "PALS_RANKID": "2",
    "PMI_JOBID": "2",
    "PMI_LOCAL_RANK": "0",
    "PMI_LOCAL_SIZE": "1",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
}
# PALS on 2 machines with 4 devices each, rank 5, as users' scripts read it
PALS = {
    "PALS_APID": "0b8c8a1e-a9c8-4e0b-9a3d-3f5c1f1a4f65",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "1",
    "PALS_RANKID": "5",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
# MVAPICH 3, mpispawn of mpirun_rsh, by its source; MVAPICH2 has the same with MV2
MVAPICH = {
    "MPIRUN_ID": "4711",
    "MPIRUN_NPROCS": "8",
    "MVP_COMM_WORLD_LOCAL_RANK": "1",
    "MVP_COMM_WORLD_LOCAL_SIZE": "4",
    "MVP_COMM_WORLD_RANK": "5",
    "MVP_COMM_WORLD_SIZE": "8",
    "MVP_NODE_ID": "1",
    "PMI_ID": "5",
    "PMI_PORT": "node1:41295",
}
MVAPICH2 = {name.replace("MVP_", "MV2_"): value for name, value in MVAPICH.items()}
# jsrun, as users' programs read it; Spectrum MPI adds the variables of Open MPI
JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "LSB_JOBID": "12",
    "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMIX_NAMESPACE": "12-1",
    "PMIX_RANK": "5",
}
# `flux run -n 2`, rank 1, by flux-environment(7); with PMI of its own
FLUX = {
    "FLUX_JOB_ID": "ƒ3ETxsR9H",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def place(env: dict[str, str]) -> Rank:
    found = read(env)
    assert found is not None
    return found


def numbers(env: dict[str, str]) -> tuple[int, int, int, int]:
    found = place(env)
    return found.rank, found.local_rank, found.world_size, found.local_world_size


def problems(env: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read(env)
    return caught.value.problems


@pytest.mark.parametrize(
    ("env", "expected", "launcher", "address"),
    [
        (OPEN_MPI, (1, 1, 2, 2), "mpirun of Open MPI", "127.0.0.1"),
        (INTEL_MPI, (1, 1, 2, 2), "mpiexec of Hydra (MPICH, Intel MPI)", "127.0.0.1"),
        (MPICH | ADDRESS, (1, 1, 2, 2), "mpiexec of Hydra (MPICH, Intel MPI)", "node0"),
        (SRUN, (2, 0, 3, 1), "srun", "n1"),
        (SRUN | SHASTA, (2, 0, 3, 1), "srun", "n1"),
        (SRUN_PMI2, (1, 1, 2, 2), "srun", "127.0.0.1"),
        (PTY, (0, 0, 1, 1), "srun", "127.0.0.1"),
        (PALS | ADDRESS, (5, 1, 8, 4), "mpiexec of PALS", "node0"),
        (MVAPICH | {"MASTER_ADDR": "node0"}, (5, 1, 8, 4), "mpirun_rsh of MVAPICH", "node0"),
        (MVAPICH2 | {"MASTER_ADDR": "node0"}, (5, 1, 8, 4), "mpirun_rsh of MVAPICH", "node0"),
        (MVAPICH | {"MVP_COMM_WORLD_LOCAL_SIZE": "8"}, (5, 1, 8, 8), "mpirun_rsh of MVAPICH", "127.0.0.1"),
        (JSRUN | {"MASTER_ADDR": "h1"}, (5, 1, 8, 4), "jsrun of LSF", "h1"),
        (FLUX, (1, 1, 2, 2), "flux run", "127.0.0.1"),
        (SHASTA | ADDRESS, (2, 0, 3, 1), "mpiexec of PALS", "node0"),
        (
            PMI2 | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            (1, 1, 2, 2),
            "a launcher with PMI",
            "127.0.0.1",
        ),
    ],
)
def test_each_launcher_is_read(
    env: dict[str, str], expected: tuple[int, int, int, int], launcher: str, address: str
) -> None:
    found = place(env)
    assert (numbers(env), found.launcher, found.master_addr) == (expected, launcher, address)
    assert found.master_port in PORTS
    assert (found.agent_store, found.store_fd) == (False, None)


@pytest.mark.parametrize("env", [BATCH, SALLOC, INTERACTIVE])
def test_the_shell_of_a_job_is_no_rank(env: dict[str, str]) -> None:
    assert read(env) is None
    assert read(env | ADDRESS) is None


@pytest.mark.parametrize("step", ["4294967291", "4294967290", "4294967292", "-5", "-6", "batch", " ", "", "9" * 5000])
def test_a_step_of_slurms_own_is_no_srun(step: str) -> None:
    assert read(BATCH | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}) is None


def test_the_names_of_before_are_enough() -> None:
    env = {name: value for name, value in SRUN.items() if not name.startswith("SLURM_STEP_") and name != "SLURM_JOB_ID"}
    found = place(env | {"SLURM_JOBID": "2"})
    assert found == place(SRUN)


# one launcher inside another


def test_torchruns_whole_set_comes_first() -> None:
    for other in (SRUN, OPEN_MPI, MPICH, PALS, BATCH):
        assert numbers(other | TORCHRUN) == (5, 1, 8, 4)
        assert place(other | TORCHRUN).master_addr == "node0"


def test_mpirun_inside_a_job_of_slurm_comes_before_srun() -> None:
    assert place(BATCH | OPEN_MPI).launcher == "mpirun of Open MPI"
    # mpirun starts its daemons by srun, from which its ranks have these
    assert numbers(SRUN | OPEN_MPI) == (1, 1, 2, 2)
    assert numbers(SRUN | INTEL_MPI) == (1, 1, 2, 2)


def test_what_a_script_exports_for_torch_fills_what_the_launcher_does_not_say() -> None:
    pals = {name: value for name, value in PALS.items() if not name.startswith("PMI_")}
    assert numbers(pals | ADDRESS | {"WORLD_SIZE": "8"}) == (5, 1, 8, 4)
    (problem,) = problems(pals | ADDRESS)
    assert problem.startswith("environment: PMI_SIZE or WORLD_SIZE (number of all processes) is not set")


def test_what_a_script_exports_for_torch_must_agree() -> None:
    assert numbers(SRUN | {"RANK": "2", "WORLD_SIZE": "3"}) == (2, 0, 3, 1)
    found = problems(SRUN | {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert [line.split(":")[1].split(" (")[0].strip() for line in found] == [
        "SLURM_LOCALID says 0, LOCAL_RANK says 1",
        "SLURM_STEP_NUM_TASKS says 3, WORLD_SIZE says 8",
        "SLURM_STEP_TASKS_PER_NODE says 1, LOCAL_WORLD_SIZE says 4",
    ]


def test_a_job_submitted_from_inside_a_step_is_refused() -> None:
    """Its script has the SLURM_STEP_ variables of the step in which sbatch was typed (SLURM 22.05)."""
    (size, *_) = problems(PTY | {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "n2"})
    assert size.startswith("environment: SLURM_STEP_NUM_TASKS says 1, SLURM_NTASKS says 2 (number of all processes)")
    assert "unset the variables that this process's srun did not set" in size


def test_mpirun_rsh_and_flux_inside_a_job_of_slurm_come_before_srun() -> None:
    """mpirun_rsh starts its agents by srun, from which its ranks have these. So may a broker of Flux."""
    assert numbers(SRUN | MVAPICH | ADDRESS) == (5, 1, 8, 4)
    assert numbers(SRUN | FLUX) == (1, 1, 2, 2)


def test_a_local_rank_that_users_export_for_mvapich_is_no_mark() -> None:
    assert place(SRUN | {"MV2_COMM_WORLD_LOCAL_RANK": "0"}).launcher == "srun"
    assert read({"MVP_COMM_WORLD_LOCAL_RANK": "0"}) is None


def test_mpiexec_of_mvapich_is_hydra() -> None:
    both = INTEL_MPI | {"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "2", "MVP_COMM_WORLD_LOCAL_RANK": "1"}
    assert place(both).launcher == "mpiexec of Hydra (MPICH, Intel MPI)"


def test_mpirun_inside_a_job_of_flux_comes_before_flux() -> None:
    inner = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}
    one = {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}
    assert place(FLUX | one | inner).launcher == "mpirun of Open MPI"
    # what Flux sets for Spectrum MPI is not of mpirun
    assert place(FLUX | {"OMPI_COMM_WORLD_RANK": "1"}).launcher == "flux run"


def test_jsrun_is_not_mpirun_and_must_agree_with_it() -> None:
    (problem,) = problems(JSRUN | {"MASTER_ADDR": "h1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert problem.startswith("environment: JSM_NAMESPACE_SIZE says 8, OMPI_COMM_WORLD_SIZE says 4")
    one_machine = dict.fromkeys(("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "8")
    assert place(JSRUN | one_machine).master_addr == "127.0.0.1"


def test_the_first_host_of_lsf_is_not_guessed_to_have_rank_0() -> None:
    (problem,) = problems(JSRUN)
    assert problem.endswith("give every rank the name of the machine of rank 0: jsrun -E NAME=VALUE")


def test_flux_says_how_many_ranks_a_machine_has_where_there_is_no_choice() -> None:
    several = FLUX | {"FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2", "MASTER_ADDR": "n0"}
    (problem,) = problems(several)
    assert problem == (
        "environment: LOCAL_WORLD_SIZE (number of processes on this machine) is not set, and flux run does not say how "
        "8 ranks are divided among 2 machines; give every rank this number: flux run --env=NAME=VALUE"
    )
    assert numbers(several | {"LOCAL_WORLD_SIZE": "4"}) == (1, 1, 8, 4)
    spread = several | {"FLUX_JOB_NNODES": "8", "FLUX_TASK_LOCAL_ID": "0"}
    assert numbers(spread) == (1, 0, 8, 1)
    (problem,) = problems(spread | {"FLUX_TASK_LOCAL_ID": "1"})
    assert "FLUX_TASK_LOCAL_ID is 1; must be below FLUX_JOB_SIZE / FLUX_JOB_NNODES (1)" in problem
    (problem,) = problems({name: value for name, value in FLUX.items() if name != "FLUX_JOB_NNODES"})
    assert problem.startswith("environment: FLUX_JOB_NNODES or LOCAL_WORLD_SIZE (number of machines) is not set")


# the address


@pytest.mark.parametrize("env", [OPEN_MPI, SRUN, PALS, INTEL_MPI])
def test_the_users_address_wins(env: dict[str, str]) -> None:
    found = place(env | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"})
    assert (found.master_addr, found.master_port) == ("10.0.0.7", 1234)
    assert place(env | {"MASTER_ADDR": "10.0.0.7"}).master_port in PORTS


def test_the_first_host_of_the_step_has_rank_0() -> None:
    step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[01-08],login2"}
    assert place(SRUN | step).master_addr == "gpu07"


def test_the_port_is_the_jobs() -> None:
    ranks = [SRUN | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"} for rank in range(2)]
    assert len({place(env).master_port for env in (SRUN, *ranks)}) == 1
    ports = {
        place(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(s)}).master_port
        for job in range(9)
        for s in (0, 1)
    }
    assert len(ports) > 15
    assert place(OPEN_MPI).master_port != place(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-vm-30458@1"}).master_port


def test_jobs_and_their_restarts_have_their_own_keys() -> None:
    assert place(SRUN).job == "srun 2.0"
    assert (place(SRUN).attempt, place(SRUN | {"SLURM_RESTART_COUNT": "3"}).attempt) == (0, 3)


def test_the_job_of_open_mpi_4() -> None:
    env = {name: value for name, value in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    assert place(env | {"OMPI_MCA_ess_base_jobid": "2139947009"}).job == "mpirun of Open MPI 2139947009"


def test_a_launcher_without_addresses_needs_one_across_machines() -> None:
    env = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    (problem,) = problems(env)
    assert problem.startswith("environment: MASTER_ADDR (address of rank 0) is not set, and mpirun of")
    assert problem.endswith(
        "only 2 of 4 ranks are on this machine; give every rank the name of the machine of rank 0: mpirun -x NAME=VALUE"
    )
    assert numbers(env | {"MASTER_ADDR": "node0"}) == (1, 1, 4, 2)


def test_a_job_without_a_name_needs_a_port() -> None:
    (problem,) = problems(MPICH)  # this process has no Hydra proxy as a parent
    assert problem.startswith("environment: MASTER_PORT (port of rank 0) is not set, and the ranks")
    assert problem.endswith("mpiexec -genv NAME VALUE")
    assert len(problems(MPICH | {"PMI_SIZE": "4"})) == 2


# what is missing or wrong


@pytest.mark.parametrize(
    ("env", "without", "expected"),
    [
        (
            SRUN,
            ["SLURM_PROCID"],
            "SLURM_PROCID or RANK (number of this process among all processes) is not set, but SLURM_LOCALID",
        ),
        (
            SRUN,
            ["SLURM_LOCALID"],
            "SLURM_LOCALID or LOCAL_RANK (number of this process among the processes of its machine)",
        ),
        (SRUN, ["SLURM_NODEID"], "SLURM_NODEID (number of this machine among the machines of the step) is not set"),
        (SRUN, ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "SLURM_STEP_NUM_TASKS or SLURM_NTASKS or WORLD_SIZE ("),
        (
            SRUN,
            ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
            "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE or LOCAL_WORLD_SIZE (",
        ),
        (
            SRUN,
            ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"],
            "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST or MASTER_ADDR (address of rank 0) is not set",
        ),
        (SRUN, ["SLURM_JOB_ID"], "MASTER_PORT (port of rank 0) is not set, and the ranks of"),
        (OPEN_MPI, ["OMPI_COMM_WORLD_RANK"], "OMPI_COMM_WORLD_RANK or RANK ("),
        (OPEN_MPI, ["OMPI_COMM_WORLD_LOCAL_SIZE"], "OMPI_COMM_WORLD_LOCAL_SIZE or LOCAL_WORLD_SIZE ("),
        (
            INTEL_MPI,
            ["PMI_RANK"],
            "PMI_RANK or RANK (number of this process among all processes) is not set, but MPI_LOCALRANKID",
        ),
        (INTEL_MPI, ["MPI_LOCALNRANKS"], "MPI_LOCALNRANKS or LOCAL_WORLD_SIZE ("),
        (
            PALS | ADDRESS,
            ["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"],
            "PALS_LOCAL_SIZE or PMI_LOCAL_SIZE or LOCAL_WORLD_SIZE (",
        ),
    ],
)
def test_a_missing_part_is_named(env: dict[str, str], without: list[str], expected: str) -> None:
    (problem,) = problems({name: value for name, value in env.items() if name not in without})
    assert problem.startswith(f"environment: {expected}")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID is 3; must be below SLURM_STEP_NUM_TASKS (3)"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID is 1; must be below SLURM_STEP_TASKS_PER_NODE (1)"),
        ({"SLURM_PROCID": "two"}, 'SLURM_PROCID: given "two"; must be a whole number >= 0'),
        ({"SLURM_NODEID": "-1"}, 'SLURM_NODEID: given "-1"; must be a whole number >= 0'),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2;1"},
            'SLURM_STEP_TASKS_PER_NODE: given "2;1"; "2;1" is not a number of tasks',
        ),
        ({"SLURM_STEP_NODELIST": "n[1"}, 'SLURM_STEP_NODELIST: given "n[1"; "n[1" is not a host name'),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0; must be from 1 to 65535"),
        ({"SLURM_RESTART_COUNT": "x"}, 'SLURM_RESTART_COUNT: given "x"; must be a whole number >= 0'),
    ],
)
def test_what_contradicts_is_refused(change: dict[str, str], expected: str) -> None:
    (problem,) = problems(SRUN | change)
    assert problem.startswith(f"environment: {expected}")


def test_a_machine_that_is_not_in_the_list() -> None:
    found = problems(SRUN | {"SLURM_NODEID": "2"})
    assert found[0].startswith("environment: SLURM_NODEID is 2; must be below 2, the number of machines in SLURM_STEP_")


def test_everything_comes_at_once() -> None:
    found = problems({"SLURM_STEP_ID": "0", "SLURM_LOCALID": "x"})
    assert [line.split()[1] for line in found] == [
        "SLURM_PROCID",
        "SLURM_LOCALID:",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "MASTER_PORT",
    ]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc on this machine")
def test_the_process_above_this_one_is_found_by_its_program() -> None:
    program = Path(f"/proc/{os.getppid()}/comm").read_text().rstrip("\n")
    assert ancestor(program) == os.getppid()
    assert ancestor("no program") is None


def test_the_documentation_has_every_variable() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "launch.md").read_text(encoding="utf-8")
    older = {"SLURM_JOBID", "SLURM_STEPID"}  # the same by the names of before
    for launcher in (launchers.TORCHRUN, *launchers.OTHERS):
        jobs = [name for names in launcher.job for name in names]
        sizes = (*launcher.world_size, *launcher.local_world_size)
        names = (*launcher.rank, *launcher.local_rank, *sizes, *launcher.hosts, *jobs)
        for name in {*names, launcher.attempt, launcher.node, launcher.nodes, launcher.proxy} - {"", *older}:
            assert f"`{name}`" in page, name


def test_empty_variables_are_no_marks() -> None:
    """As a template of a job leaves them."""
    assert read({"WORLD_SIZE": "", "RANK": " ", "PMI_RANK": "", "OMPI_COMM_WORLD_RANK": ""}) is None
