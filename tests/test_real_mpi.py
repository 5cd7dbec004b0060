"""In: scripts of `codescent launch --to mpirun`. Out: the real Open MPI and MPICH start their ranks, here and on hosts.
Hosts are network namespaces, ssh is a shell of the tests. Skips without root, or without the MPI in question."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import marked
import places
import pytest
from remote_shell import make_ssh
from runs import environment, losses, make_project, train
from scripts import script_of

from codescent.record import RunFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

PROGRAMS = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
"""As Debian calls the two, where both are installed."""
EXACT = 1e-10
RACE = re.compile(r".*plm:rsh: Warning: setpgid\(\d+,\d+\) failed in parent with errno=.*")
"""A warning of Open MPI on a busy machine: its remote shell has begun before it was put into a group of its own."""


@pytest.fixture(scope="module")
def made() -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(3) as found:
        yield found


@pytest.fixture(params=sorted(PROGRAMS))
def mpi(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of the two MPIs, whose mpirun is the first in PATH."""
    name: str = request.param
    program = shutil.which(PROGRAMS[name])
    if program is None:
        pytest.skip(f"there is no {PROGRAMS[name]}: apt-get install {'openmpi-bin' if name == 'openmpi' else name}")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (programs / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(variable, "1")
    make_project(tmp_path)
    places.make_program(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield name
    marked.kill(tmp_path)


@pytest.fixture
def remote(made: hosts.Hosts, mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hosts.Hosts:
    """Hosts that the MPI reaches by a remote shell."""
    ssh = str(make_ssh(tmp_path / "programs", made))
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", ssh)
    monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", ssh)
    return made


def started(text: str, folder: Path, made: hosts.Hosts | None = None) -> subprocess.Popen[str]:
    """A script that runs: here, or on the first host."""
    (folder / "script").write_text(text)
    words = ["bash", "script"]
    return subprocess.Popen(
        words if made is None else made.command(0, words), cwd=folder, env=environment(), text=True, stdout=-1,
        stderr=-1, start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float = 100) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(out + err) from None
    lines = [line for line in (out + err).splitlines() if not RACE.fullmatch(line)]
    return process.returncode, "\n".join(lines)


def test_each_rank_on_this_machine_has_its_place(mpi: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are more ranks than this machine may have cores."""
    ranks = (os.cpu_count() or 1) + 1
    words = ["places.py", "--to", "mpirun", "--devices", str(ranks), f"site.mpi={mpi}", "--", "a b", "$c"]
    code, said = ended(started(script_of(words, capsys), tmp_path))
    assert (code, said) == (0, "")
    found = places.taken(tmp_path, ranks)
    assert [one["local_rank"] for one in found] == list(range(ranks))
    assert {one["master_addr"] for one in found} == {"127.0.0.1"}
    assert {tuple(one["words"]) for one in found} == {("a b", "$c")}
    assert {one["CODESCENT_MARK"] for one in found} == {str(tmp_path / "runs" / "places")}


def test_each_rank_on_uneven_hosts_has_its_place(
    mpi: str, remote: hosts.Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--hosts", "10.77.0.1:2,10.77.0.2:1,10.77.0.3:3")
    words = ["places.py", "--to", "mpirun", *where, f"site.mpi={mpi}", "site.interface=eth0", "--", "a b", "$c"]
    code, said = ended(started(script_of(words, capsys), tmp_path, remote))
    assert (code, said) == (0, "")
    found = places.taken(tmp_path, 6)
    assert [(one["host"], one["local_rank"], one["local_world_size"]) for one in found] == [
        ("host0", 0, 2), ("host0", 1, 2), ("host1", 0, 1), ("host2", 0, 3), ("host2", 1, 3), ("host2", 2, 3),
    ]  # fmt: skip
    assert {(one["master_addr"], one["GLOO_SOCKET_IFNAME"]) for one in found} == {("10.77.0.1", "eth0")}
    assert {tuple(one["words"]) for one in found} == {("a b", "$c")}


@pytest.mark.slow
def test_losses_on_hosts_are_those_of_one_process(
    mpi: str, remote: hosts.Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (
        "run.toml",
        "run.name=real",
        "train.precision=fp64",
        "train.global_batch_size=6",
        "train.num_steps=6",
        "train.eval_every=0",
    )
    words = [*run, "--to", "mpirun", "--hosts", "10.77.0.1:2,10.77.0.2:1", f"site.mpi={mpi}"]
    code, said = ended(started(script_of(words, capsys), tmp_path, remote))
    assert code == 0, said
    alone = train(tmp_path, "alone", *run[2:])
    found = losses(RunFolder.open(tmp_path / "runs" / "real"))
    assert found == pytest.approx(losses(alone), rel=EXACT, abs=0)


LONG = (
    "run.toml", "run.name=long", "train.num_steps=1000000", "optimizer.decay_steps=100", "train.eval_every=0",
    "log.metrics_every=1", "train.global_batch_size=32", "--to", "mpirun", "--hosts", "10.77.0.1:1,10.77.0.2:1",
)  # fmt: skip
"""A run that does not end by itself, on two hosts."""


def trains(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the run `long` has done some steps."""
    csv, end = folder / "runs" / "long" / "metrics.csv", time.monotonic() + 100
    while not (csv.exists() and csv.read_text().count("\n") > 5):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_f18_a_signal_to_mpirun_saves(
    mpi: str, remote: hosts.Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """It reaches the ranks of all hosts before they are killed, and the same script goes on after it."""
    text = script_of([*LONG, f"site.mpi={mpi}"], capsys)
    process = started(text, tmp_path, remote)
    trains(tmp_path, process)
    process.send_signal(number)
    code, said = ended(process)
    print(code, said)
    assert "saved in runs/long/checkpoints" in said
    assert code == (75 if number == signal.SIGUSR1 else 128 + number), said


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_ends_the_others(
    mpi: str, remote: hosts.Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of([*LONG, f"site.mpi={mpi}"], capsys)
    process = started(text, tmp_path, remote)
    trains(tmp_path, process)
    victim = max(marked.ranks(tmp_path))
    os.kill(victim, signal.SIGKILL)
    code, said = ended(process)
    print(code, said)
    assert code not in (0, 2, 75, 143)
    assert marked.ranks(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("of", ["first host", "second host"])
def test_f7_a_launcher_that_is_killed_leaves_no_rank(
    mpi: str, remote: hosts.Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str], of: str
) -> None:
    """mpirun itself, or what it has started on the other host: orted, hydra_pmi_proxy."""
    text = script_of([*LONG, f"site.mpi={mpi}"], capsys)
    process = started(text, tmp_path, remote)
    trains(tmp_path, process)
    ranks = marked.ranks(tmp_path)
    assert len(ranks) == 2
    if of == "first host":
        (launcher,) = [pid for pid in marked.processes(tmp_path) if marked.program(pid).startswith("mpirun")]
        os.kill(launcher, signal.SIGKILL)
    else:
        agent = {"openmpi": "orted", "mpich": "hydra_pmi_proxy"}[mpi]
        (there,) = [pid for pid in on(remote, 1) if Path(f"/proc/{pid}/comm").read_text().strip() == agent]
        os.kill(there, signal.SIGKILL)
    marked.wait_for_none(lambda: marked.ranks(tmp_path))
    code, said = ended(process)
    print(code, said)


def on(made: hosts.Hosts, host: int) -> list[int]:
    """The processes on a host."""
    words = ["ip", "netns", "pids", made.name(host)]
    return [int(word) for word in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()]
