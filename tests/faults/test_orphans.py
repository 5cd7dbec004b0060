"""In: launchers, scripts and ranks that kill -9 ends. Out: no process, and no file of TMPDIR, that they have started.
Does not look at runs that end in another way: test_launch_local.py, test_prove.py and test_measure.py do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import marked
import psutil
import pytest
from remote_shell import make_ssh
from runs import environment, make_project, started_by
from scripts import script_of
from test_launch_local import Launch, is_alive

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import hosts

from codescent.base.temporary_folder import TemporaryFolder, is_remover

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends processes with their parents"),
]

ROOT = Path(__file__).resolve().parents[2]
LONG = (
    "run.toml", "run.name=long", "train.num_steps=1000000", "optimizer.decay_steps=100", "train.eval_every=0",
    "log.metrics_every=1",
)  # fmt: skip
"""A run that does not end by itself."""


def until(true: Callable[[], object], what: object = "", most_s: float = 30.0) -> None:
    end_s = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < end_s, what() if callable(what) else what
        time.sleep(0.02)


def with_word(word: Path) -> list[int]:
    """The processes that have a path in their command line or in their environment."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if one.pid != os.getpid() and str(word) in "\0".join([*one.cmdline(), *one.environ().values()]):
                found.append(one.pid)
    return found


# quick: processes of our own


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[int, str], Launch]]:
    """A launcher whose ranks run a program. What is left of it is killed."""
    runs: list[Launch] = []

    def start(ranks: int, program: str) -> Launch:
        runs.append(Launch(tmp_path, ranks, program))
        return runs[-1]

    yield start
    for run in runs:
        for one in run.seen:
            with suppress(psutil.NoSuchProcess):
                one.kill()  # before it is waited for: it may hold the launcher's output open
        run.close()


Start = Callable[[int, str], Launch]


def test_f7_a_killed_launcher_leaves_no_rank_no_worker_and_no_log(launch: Start) -> None:
    """Fault: the kernel ends the ranks alone: what they have started lives on, the folder with their output stays."""
    worker = "child = subprocess.Popen(['sleep', '600'], start_new_session=True); ready(child=child.pid)"
    run = launch(2, f"{worker}; wait_for('never')")
    run.pids()
    assert len(run.seen) == 5, "two ranks with a worker each, and who removes the folder"
    assert [path.name[:16] for path in run.logs.iterdir()] == ["codescent-ranks-"]
    run.process.kill()
    until(lambda: not any(map(is_alive, run.seen)) and not list(run.logs.iterdir()))


def test_who_removes_a_folder_outlives_the_group_of_its_launcher(launch: Start) -> None:
    """Fault: a signal to all processes of a job, or to their group, ends the process that would have cleaned up."""
    run = launch(1, "ready(); wait_for('never')")
    run.pids()
    (remover,) = [one for one in run.seen if is_remover(one.cmdline())]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        remover.send_signal(number)  # a scheduler may send them to all processes of a job
    os.killpg(run.process.pid, signal.SIGKILL)
    until(lambda: not any(map(is_alive, run.seen)) and not list(run.logs.iterdir()))


CHILD = """
import subprocess, sys, time
from codescent.base.parent import end_with_parent
end_with_parent("rank 1 of 2")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_f7_a_rank_whose_launcher_has_died_ends_what_it_has_started() -> None:
    """Fault: under torchrun and mpirun nobody ends the processes of a rank that has noticed the end of its launcher."""
    launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}]).wait()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=pipe, stderr=pipe, env=environment()) as started:
        assert started.stdout is not None
        worker = psutil.Process(int(started.stdout.readline()))
        started.kill()
        until(lambda: not is_alive(worker))


RENDERS = """
import os, sys
from codescent.tasks.conversations import chat_renderer
from codescent.tasks.conversations.chat_files import ChatFiles
chat_renderer.ask(ChatFiles("a", "short", {}, None), {})
print(chat_renderer._one[0].process.pid, flush=True)
endless = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
chat_renderer.ask(ChatFiles("b", endless, {}, None), {})
"""


def test_a_template_does_not_outlive_its_run() -> None:
    """Fault: the process that renders sees the end of its parent only after its template, which may take 40 s."""
    with subprocess.Popen([sys.executable, "-c", RENDERS], stdout=subprocess.PIPE, env=environment()) as started:
        assert started.stdout is not None
        renders = psutil.Process(int(started.stdout.readline()))
        before_s = renders.cpu_times().user
        until(lambda: renders.cpu_times().user > before_s + 0.2)
        started.kill()
        started.wait()
        psutil.wait_procs([renders], timeout=10)
        assert not is_alive(renders)


def test_a_folder_is_kept_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the output of ranks that have crashed is named to the user, and removed when the launcher ends."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept, removed = TemporaryFolder("a-"), TemporaryFolder("b-")
    kept.close(keep=True)
    removed.close()
    assert list(tmp_path.iterdir()) == [kept.path]
    assert not [one for one in psutil.Process().children() if is_remover(one.cmdline())]


# slow: launchers of others, and commands that start runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project; TMPDIR is its folder `tmp`."""
    make_project(tmp_path)
    for name in ("tmp", "programs"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    marked.kill(tmp_path)


@contextmanager
def running(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command, which is killed at the end of the block."""
    with subprocess.Popen(command, cwd=folder, env=environment(), text=True, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def trains(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the run `long` has done some steps."""
    csv = folder / "runs" / "long" / "metrics.csv"
    until(lambda: process.poll() is not None or (csv.exists() and csv.read_text().count("\n") > 5), most_s=100)
    assert process.poll() is None, process.communicate()


def left(folder: Path) -> list[str]:
    """Files of ours in TMPDIR, and those that a script of ours makes."""
    files = [*(folder / "tmp").rglob("codescent-*"), *folder.glob(".exit-*"), *(folder / "tmp").glob("tmp.*")]
    return [str(path) for path in files]


LAUNCHERS = {
    "local": ("--to", "local", "--devices", "2"),
    "torchrun": ("--to", "torchrun", "--devices", "2"),
    "mpirun.openmpi": ("--to", "mpirun", "--devices", "2", "site.mpi=openmpi"),
    "mpirun.mpich": ("--to", "mpirun", "--devices", "2", "site.mpi=mpich"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_f7_a_killed_script_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str], launcher: str) -> None:
    """Fault: a script that is killed by SIGKILL passes nothing on: torchrun and mpirun train on, its files stay."""
    if launcher.startswith("mpirun"):
        program = shutil.which(launcher)
        if program is None:
            pytest.skip(f"there is no {launcher}: apt-get install openmpi-bin mpich")
        (folder / "programs" / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / "programs" / "mpirun").chmod(0o755)
    (folder / "script").write_text(script_of([*LONG, *LAUNCHERS[launcher]], capsys))
    with running(folder, "bash", "script") as script:
        trains(folder, script)
        assert len(marked.ranks(folder)) >= 2
        script.kill()
        began_s = time.monotonic()
        until(lambda: not list(marked.processes(folder)) and not left(folder), lambda: left(folder))
        print(f"nothing is left {time.monotonic() - began_s:.1f} s after the end of the script")


@pytest.mark.slow
def test_f7_a_killed_script_of_ssh_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: the agents of other hosts do not notice the end of the script; its pipes stay on the disk."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(2) as made:
        make_ssh(folder / "programs", made)
        where = ("--to", "ssh", "--hosts", "10.77.0.1:1,10.77.0.2:1")
        (folder / "script").write_text(script_of([*LONG, *where], capsys))
        with running(folder, "bash", "script") as script:
            trains(folder, script)
            script.kill()
            until(lambda: not list(marked.processes(folder)) and not left(folder), lambda: left(folder))
    assert list((folder / "runs" / "long" / "checkpoints").iterdir()), "the agents have stopped their ranks, which save"


@pytest.mark.slow
def test_f7_a_killed_supervisor_of_another_launcher_leaves_nothing(folder: Path) -> None:
    """Fault: the ranks of torchrun end with the process that only watches them, or its folder for verdicts stays."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "codescent", "train", *LONG]
    command = [sys.executable, *words]
    with running(folder, *command) as torchrun:
        trains(folder, torchrun)

        def supervisors() -> list[psutil.Process]:
            return [one for one in started_by(torchrun.pid) if "codescent.launch.supervise" in one.cmdline()]

        until(supervisors)
        (supervisor,) = supervisors()
        supervisor.kill()
        csv = folder / "runs" / "long" / "metrics.csv"
        rows = csv.read_text().count("\n")
        until(lambda: csv.read_text().count("\n") > rows + 5)
        ranks = started_by(torchrun.pid)
        torchrun.kill()
        until(lambda: not any(map(is_alive, ranks)) and not left(folder), lambda: left(folder))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("prove", "run.toml", "--steps", "20000", "--layouts", "dp_shard=2")], ids=["prove"])
def test_a_killed_command_that_starts_runs_leaves_nothing(folder: Path, words: tuple[str, ...]) -> None:
    """Fault: the folder of the runs stays in TMPDIR, or the run goes on in it."""
    with running(folder, sys.executable, "-m", "codescent", *words) as process:
        until(lambda: list((folder / "tmp").glob("codescent-prove-*/run1/metrics.csv")), most_s=100)
        process.kill()
        until(lambda: not with_word(folder / "tmp" / "codescent-prove-") and not left(folder), lambda: left(folder))
