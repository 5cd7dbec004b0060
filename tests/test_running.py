"""In: runs that train on several ranks, and what befalls them: stopped, frozen, killed, told to do different things.
Out: who is named, in what time (a deadline is no measurement), and that nothing is lost. Real processes and signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from forker import Forker
from runs import codescent, environment, make_project, start, started_by

from codescent.base.page import Page
from codescent.launch import supervisor
from codescent.launch.supervisor import Stopped, Supervisor
from codescent.record import RunFolder

ENDLESS = ("train.num_steps=100000000", "optimizer.decay_steps=1000", "train.eval_every=0", "run.name=endless")
ENDLESS += ("log.metrics_every=1",)  # by itself a run of so many steps writes a row every thousand
TIMEOUT_S = 100


class Run:
    """`codescent train` on local ranks that takes steps until somebody ends it."""

    def __init__(
        self, folder: Path, ranks: int, command: Sequence[str] = (), *, resume: bool = False, **env: str
    ) -> None:
        self.folder = folder
        words = ["train", "run.toml", *ENDLESS, "--ranks", str(ranks), *(["--resume=auto"] if resume else [])]
        popen: dict[str, Any] = {"cwd": folder, "env": environment(**env), "text": True, "stdout": -1, "stderr": -1}
        self.process = subprocess.Popen(command, **popen) if command else start(folder, *words)
        self.err = ""
        self.ranks: list[psutil.Process] = []

    def until(self, what: str, pattern: str) -> str:
        """Read the standard error until a line fits."""
        assert self.process.stderr is not None
        end = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.err)) is None:
            assert time.monotonic() < end, f"{what}: {self.err}"
            if select.select([self.process.stderr], [], [], 0.1)[0]:
                self.err += os.read(self.process.stderr.fileno(), 4096).decode()
        return found[0]

    def steps(self, more: int = 3) -> None:
        """Wait until some more steps are done."""
        csv, end = self.folder / "runs" / "endless" / "metrics.csv", time.monotonic() + TIMEOUT_S

        def rows() -> int:
            return len(csv.read_text().splitlines()) if csv.exists() else 0

        before = rows()
        while rows() < max(before, 1) + more:
            assert time.monotonic() < end, self.err
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        self.ranks = [one for one in started_by(self.process.pid) if "-m" in one.cmdline()]

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error; no rank is left."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        psutil.wait_procs(self.ranks, timeout=10)
        assert not [one for one in self.ranks if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return self.process.returncode, out, self.err + err

    def close(self) -> None:
        for one in [*self.ranks, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)
                one.kill()
        self.process.communicate()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


@pytest.fixture
def runs(project: Path) -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.close()


def resumed_steps(project: Path, forker: Forker) -> int:
    """The run goes on from its last checkpoint for two steps; where it then is."""
    (checkpoint,) = (project / "runs" / "endless" / "checkpoints").iterdir()
    last = int(checkpoint.name.removeprefix("step_")) + 2
    run = forker.train(project, "endless", 1, *ENDLESS, f"train.num_steps={last}", resume=True)
    return int(run.read_metrics()[-1]["step"]) - last


def test_a_rank_that_is_stopped_is_named_and_wakes_to_save(project: Path, forker: Forker, runs: list[Run]) -> None:
    runs.append(run := Run(project, 2))
    run.steps()
    victim = run.ranks[1]
    victim.send_signal(signal.SIGSTOP)
    run.until("named", rf"codescent: rank 1 of 2 \(pid {victim.pid}\) is stopped .*: the others wait for it")
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert code == 143
    assert re.search(r"stopped at step \d+ by SIGTERM; saved in", out)
    assert "SIGTERM: waiting for the ranks to save and stop" in err
    assert "rank 1 of 2 continues" in err
    assert resumed_steps(project, forker) == 0


def test_a_run_whose_other_rank_is_killed_has_that_in_its_record(project: Path, runs: list[Run]) -> None:
    runs.append(run := Run(project, 2))
    run.steps()
    run.ranks[1].kill()
    code, _, err = run.end()
    assert code == 137
    assert re.search(r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL", err)
    (event,) = [one for one in RunFolder.open(project / "runs" / "endless").read_events() if one["kind"] == "error"]
    assert "RuntimeError" in event["problems"][0]


def test_one_process_answers_at_once(project: Path, forker: Forker, runs: list[Run]) -> None:
    runs.append(run := Run(project, 1))
    run.steps()
    run.process.terminate()
    code, out, err = run.end()
    assert (code, err) == (143, "codescent: SIGTERM: saves and stops after this step\n")
    assert re.search(r"stopped at step \d+ by SIGTERM; saved in", out)
    assert resumed_steps(project, forker) == 0


def test_a_rank_that_does_not_end_although_it_is_killed_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process takes no signal, and its launcher looks every second."""
    monkeypatch.setattr(supervisor, "halted_by", lambda pid: "is frozen")
    pages: Any = SimpleNamespace(read=lambda rank: Page())
    looks = Supervisor(pages, 2, Stopped(ends_s=0.0))
    found = []
    for _ in range(3):
        looks.look({1: 99})
        found.append(looks.overdue())
    assert found == [[1], [], []]


@pytest.mark.parametrize(
    ("word", "says", "ends"),
    [
        ("parallel.timeout_s=4", r"for 4 s \(parallel\.timeout_s\), then the run ends; with parallel\.stopped_s=", 1),
        ("parallel.stopped_s=2", r"for 2 s \(parallel\.stopped_s\), then it is ended", 137),
    ],
)
def test_a_rank_for_which_the_others_waited_in_vain_is_the_cause(
    project: Path, runs: list[Run], word: str, says: str, ends: int
) -> None:
    words = [sys.executable, "-m", "codescent", "train", "run.toml", "--ranks", "2", word, *ENDLESS]
    runs.append(run := Run(project, 2, words))
    run.steps()
    victim = run.ranks[1]
    victim.send_signal(signal.SIGSTOP)
    code, _, err = run.end()
    assert code == ends
    assert re.search(rf"rank 1 of 2 \(pid {victim.pid}\) is stopped .*: the others wait for it {says}", err)
    assert re.search(rf"codescent: the cause: rank 1 \(pid {victim.pid}\) is stopped", err)
    is_ended = (
        f"rank 1 of 2 (pid {victim.pid}) is stopped (SIGCONT continues it), and is ended now (parallel.stopped_s)"
    )
    assert (is_ended in err) == (ends == 137)
    assert ends == 137 or err.index("the cause: rank 1") < err.index("rank 0 of 2")


@pytest.mark.parametrize("address", ["", pytest.param("localhost", marks=pytest.mark.slow), socket.gethostname()])
def test_ranks_of_one_machine_listen_on_loopback_alone(project: Path, runs: list[Run], address: str) -> None:
    """Under our launcher and, with a MASTER_ADDR, under another."""
    env = {"PMIX_NAMESPACE": f"prterun-{os.getpid()}@{address}", "MASTER_ADDR": address}
    mpirun = [sys.executable, "-c", MPIRUN, "codescent", "train", "run.toml", *ENDLESS]
    runs.append(run := Run(project, 2, mpirun, **env) if address else Run(project, 2))
    run.steps()
    listening = [one for rank in run.ranks for one in rank.net_connections("inet") if one.status == "LISTEN"]
    assert len(listening) >= 3, "gloo's and the store's"
    assert {one.laddr.ip for one in listening} == {"127.0.0.1"}


@pytest.mark.slow
def test_a_rank_that_nobody_can_wake_does_not_keep_the_others_from_ending(project: Path, runs: list[Run]) -> None:
    freezer = Path("/sys/fs/cgroup/freezer") / f"codescent-{os.getpid()}"
    try:
        freezer.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer cgroup can be made here: {error}")
    try:
        runs.append(run := Run(project, 2))
        run.steps()
        (freezer / "cgroup.procs").write_text(str(run.ranks[0].pid))
        (freezer / "freezer.state").write_text("FROZEN")
        run.until("named", r"rank 0 of 2 \(pid \d+\) is frozen \(by its cgroup\): the others wait for it")
        run.process.send_signal(signal.SIGTERM)
        run.until("answered", r"rank 0 is frozen \(by its cgroup\), and does not react: all ranks are killed")
        (freezer / "freezer.state").write_text("THAWED")  # only now can it be killed
        assert run.end()[0] == 143
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        for run in runs:
            run.close()
        freezer.rmdir()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_request_to_one_rank_is_everybodys_and_names_it(
    project: Path, forker: Forker, runs: list[Run], ranks: int
) -> None:
    runs.append(run := Run(project, ranks))
    run.steps()
    victim = run.ranks[1]
    victim.terminate()
    code, out, err = run.end()
    assert (code, err) == (143, "")
    assert re.search(rf"stopped at step \d+ by SIGTERM to rank 1 \(process {victim.pid} on .*\); saved in", out)
    (event,) = [one for one in RunFolder.open(project / "runs" / "endless").read_events() if one["kind"] == "stop"]
    assert (event["rank"], event["signal"], event["process"]) == (1, "SIGTERM", victim.pid)
    assert resumed_steps(project, forker) == 0


# who started the ranks

MPIRUN = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], env={**os.environ, **{
        f"OMPI_COMM_WORLD_{name}": str(number)
        for name, number in dict(RANK=rank, LOCAL_RANK=rank, SIZE=2, LOCAL_SIZE=2).items()
    }})
    for rank in range(2)
]
time.sleep(1000)
"""


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_end_with_who_started_them(project: Path, runs: list[Run], launcher: str) -> None:
    words = ["codescent", "train", "run.toml", *ENDLESS]
    commands = {
        "mpirun": [sys.executable, "-c", MPIRUN, *words],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *words],
    }
    runs.append(run := Run(project, 2, commands[launcher], PMIX_NAMESPACE=f"prterun-{os.getpid()}@1"))
    run.steps()
    assert len(run.ranks) == 2
    run.process.kill()
    gone, left = psutil.wait_procs(run.ranks, timeout=30)
    assert (len(gone), left) == (2, [])
    assert "ends, because its parent process" in run.end()[2]


# ranks that were told different things


def ranks_of(project: Path, words: list[list[str]], job: str) -> list[subprocess.CompletedProcess[str]]:
    """`codescent train` as ranks of one srun, each with words of its own, all to their end."""
    size = str(len(words))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "codescent", "train", "run.toml", "run.name=apart", *own],
            cwd=project,
            env=environment(
                SLURM_JOB_ID=f"{os.getpid()}{job}",
                SLURM_STEP_ID="0",
                SLURM_STEP_NODELIST="n1",
                SLURM_NODEID="0",
                SLURM_STEP_NUM_TASKS=size,
                SLURM_STEP_TASKS_PER_NODE=size,
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
            ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, own in enumerate(words)
    ]
    done = []
    for process in processes:
        out, err = process.communicate(timeout=TIMEOUT_S)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def disagreement(key: str, mine: str, other: str) -> str:
    """What each of three ranks says of which the last has another value."""
    alike, odd = r"ranks 0 \(.*\), 1 \(.*\)", r"rank 2 \(.*\)"
    return rf"{key} is {mine} on {alike}; {other} on {odd}: start every rank with the same"


EXCHANGES = [
    ("parallel.average_every", "5", "10"),
    ("parallel.gossip_every", "1", "2"),
    ("parallel.wire", '"int8"', '"sign"'),
]
"""Keys of the exchange between ranks, with two values as JSON: ranks that differ in one would wait for each other."""
BESIDE = {"parallel.gossip_every": ["parallel.gossip=ring"]}


def words_of(key: str, value: str) -> list[str]:
    return [f"{key}={json.loads(value)}", *BESIDE.get(key, [])]


@pytest.mark.parametrize(("key", "mine", "other"), [("run.seed", "1", "2"), *EXCHANGES])
def test_ranks_with_different_values_train_nothing(
    project: Path, forker: Forker, key: str, mine: str, other: str
) -> None:
    words = ["run.name=apart", *words_of(key, mine)]
    done = forker.run(project, 3, words, fault=f"other_value {words_of(key, other)[0]}")
    assert done.codes == [2, 2, 2]
    assert len(re.findall(disagreement(key, mine, other), done.said)) == 3
    assert not (project / "runs" / "apart").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "mine", "other"),
    [
        ("run.seed", "1", "2"),
        ("optimizer.learning_rate", "0.01", "0.02"),
        ("train.global_batch_size", "8", "16"),
        ("model.hidden_dim", "16", "32"),
        *EXCHANGES,
    ],
)
def test_programs_with_different_configs_train_nothing(project: Path, key: str, mine: str, other: str) -> None:
    done = ranks_of(project, [*[words_of(key, mine)] * 2, words_of(key, other)], key)
    assert [rank.returncode for rank in done] == [2, 2, 2]
    (said,) = [rank.stderr for rank in done if rank.stderr]  # rank 0 says what all have found
    assert re.search(disagreement(key, mine, other), said)
    assert "Traceback" not in said
    assert not (project / "runs" / "apart").exists()


def test_ranks_with_different_code_train_nothing(project: Path, forker: Forker) -> None:
    done = forker.run(project, 2, ["run.name=apart"], fault="other_code")
    assert done.codes == [2, 2]
    assert len(re.findall(r'codescent is "[0-9a-f]{16}" on rank 0 .*; "other" on rank 1 ', done.said)) == 2
    assert not (project / "runs" / "apart").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_under_two_agents_of_torchrun_comes_back(project: Path, runs: list[Run]) -> None:
    """Each agent counts its restarts by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "codescent", "train", "run.toml", *ENDLESS, "--resume"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    agent += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two", "--local-addr=127.0.0.1", "--max-restarts=3"]
    first = codescent(project, "train", "run.toml", *ENDLESS, "train.num_steps=2")
    assert first.returncode == 0, first.stderr
    for _ in range(2):
        runs.append(Run(project, 2, [*agent, *words], GLOO_SOCKET_IFNAME="lo"))
    runs[0].steps()
    runs[1].steps()
    (victim,) = runs[1].ranks
    victim.kill()
    log, end = project / "runs" / "endless" / "events.jsonl", time.monotonic() + TIMEOUT_S
    while log.read_text().count('"resume"') < 2:
        assert time.monotonic() < end, [run.process.poll() for run in runs]
        time.sleep(0.2)
    runs[0].steps()
    assert all(run.process.poll() is None for run in runs)
