"""In: scripts of `codescent launch`, hosts that are network namespaces. Out: each rank has the place that was meant; a
run has the losses of one process; signals save. Instead of ssh a shell enters the namespace; skips without root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import marked
import places
import pytest
from host_ranks import listeners_of
from remote_shell import make_ssh
from runs import environment, losses, make_project, train
from scripts import script_of

from codescent.record import RunFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

TWO = ("--hosts", "10.77.0.1:1,10.77.0.2:1")
RUN = (
    "run.toml",
    "train.global_batch_size=6",
    "train.num_steps=6",
    "train.eval_every=0",
    "train.precision=fp64",
    "run.name=hosts",
)
LONG = (
    "run.toml", "train.num_steps=1000000", "optimizer.decay_steps=100", "train.eval_every=0", "log.metrics_every=1",
    "run.name=hosts",
)  # fmt: skip
"""A run that does not end by itself."""


@pytest.fixture(scope="module")
def made() -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(3) as found:
        yield found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: hosts.Hosts) -> Iterator[Path]:
    make_project(tmp_path)
    places.make_program(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    make_ssh(programs, made)
    bin_folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}:{bin_folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    marked.kill(tmp_path)


def started(text: str, folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    script = folder / "script"
    if not script.exists() or script.read_text() != text:  # bash reads it as it goes: another host runs it already
        script.write_text(text)
    return subprocess.Popen(
        [*before, "bash", "script", *words], cwd=folder, env=environment(), text=True, stdout=-1, stderr=-1
    )


def trains(folder: Path, *processes: subprocess.Popen[str]) -> None:
    """Wait until the run `hosts` has done some steps."""
    csv, end = folder / "runs" / "hosts" / "metrics.csv", time.monotonic() + 100
    while not (csv.exists() and csv.read_text().count("\n") > 3):
        assert time.monotonic() < end
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def test_ssh_gives_each_rank_its_place(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["places.py", "--to", "ssh", "--hosts", "10.77.0.1:2,10.77.0.3:1", "--", "a b", "$c"]
    process = started(script_of(words, capsys), project)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "", "")
    found = places.taken(project, 3)
    assert [(one["host"], one["local_rank"], one["local_world_size"]) for one in found] == [
        ("host0", 0, 2), ("host0", 1, 2), ("host2", 0, 1),
    ]  # fmt: skip
    assert {one["master_addr"] for one in found} == {"10.77.0.1"}
    assert {one["CODESCENT_MARK"] for one in found} == {str(project / "runs" / "places")}
    assert [one["words"] for one in found] == [["a b", "$c"]] * 3


def test_local_gives_each_rank_its_place(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started(script_of(["places.py", "--to", "local", "--devices", "3", "--", "a b"], capsys), project)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "", "")
    assert [(one["local_rank"], one["master_addr"], one["words"]) for one in places.taken(project, 3)] == [
        (rank, "127.0.0.1", ["a b"]) for rank in range(3)
    ]


def test_ssh_trains_as_one_process_does_and_goes_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = train(project, "alone", *RUN[1:-1])
    text = script_of([*RUN, "checkpoint.every=3", "--to", "ssh", "--hosts", "10.77.0.1:2,10.77.0.3:1"], capsys)
    process = started(text, project)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    run = RunFolder.open(project / "runs" / "hosts")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-10, abs=0)
    process = started(text.replace("train.num_steps=6", "train.num_steps=8"), project)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "at step 6" in out
    assert len(losses(run)) == 8


def test_local_trains_as_one_process_does(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started(script_of([*RUN, "--to", "local", "--devices", "2"], capsys), project)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    alone = train(project, "alone", *RUN[1:-1])
    found = losses(RunFolder.open(project / "runs" / "hosts"))
    assert found == pytest.approx(losses(alone), rel=1e-10, abs=0)


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts
) -> None:
    """Three hosts, of which one has two ranks."""
    where = ("--to", "torchrun", "--hosts", "10.77.0.1:1,10.77.0.2:2,10.77.0.3:1")
    text = script_of([*RUN, "train.global_batch_size=8", *where], capsys)
    all_three = [started(text, project, str(host), before=tuple(made.command(host, []))) for host in range(3)]
    said = [process.communicate(timeout=200) for process in all_three]
    assert [process.returncode for process in all_three] == [0, 0, 0], said
    alone = train(project, "alone", *RUN[2:-1])
    found = losses(RunFolder.open(project / "runs" / "hosts"))
    assert found == pytest.approx(losses(alone), rel=1e-10, abs=0)


def test_torchrun_gives_each_rank_its_place(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts
) -> None:
    where = ("--hosts", "10.77.0.1:1,10.77.0.2:2,10.77.0.3:1")
    text = script_of(["places.py", "--to", "torchrun", *where, "--", "a b", "$c"], capsys)
    all_three = [started(text, project, str(host), before=tuple(made.command(host, []))) for host in range(3)]
    said = [process.communicate(timeout=100) for process in all_three]
    assert [process.returncode for process in all_three] == [0, 0, 0], said
    found = places.taken(project, 4)
    assert [(one["host"], one["local_rank"], one["local_world_size"]) for one in found] == [
        ("host0", 0, 1), ("host1", 0, 2), ("host1", 1, 2), ("host2", 0, 1),
    ]  # fmt: skip
    assert {one["master_addr"] for one in found} == {"10.77.0.1"}
    assert [one["words"] for one in found] == [["a b", "$c"]] * 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_f18_signals_reach_the_ranks_of_all_hosts(
    project: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    process = started(script_of([*LONG, "--to", "ssh", *TWO], capsys), project)
    trains(project, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert f"by {number.name}" in out
    assert "saved in" in out


@pytest.mark.slow
def test_a_host_that_fails_ends_the_others(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "fails.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(90)"
    )
    words = ["fails.py", "--to", "ssh", *TWO]
    process = started(script_of(words, capsys), project)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err


@pytest.mark.parametrize("elastic", [False, True])
def test_torchrun_finds_hosts_whose_own_name_is_unknown(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts, elastic: bool
) -> None:
    """With torchrun's own ways of finding addresses these hosts hang, or fail with a bare socket.gaierror."""
    where = [*TWO]
    if elastic:
        where = ["--hosts", "10.77.0.1", "--nodes", "1:2", "--devices", "1", "--max-restarts", "1"]
    text = script_of(["places.py", "--to", "torchrun", *where], capsys)
    if elastic:  # all are there at once: none has to wait for the last call
        text = text.replace("--nnodes=1:2", "--nnodes=2:2")
    both = [started(text, project, str(host), before=tuple(made.command(host, []))) for host in range(2)]
    for process in both:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    found = places.taken(project, 2)
    assert {one["host"] for one in found} == {"host0", "host1"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_f18_a_signal_to_torchrun_saves_and_leaves_no_rank(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts, number: signal.Signals
) -> None:
    """By itself torchrun dies of SIGUSR1 and leaves its ranks to train on."""
    text = script_of([*LONG, "--to", "torchrun", *TWO], capsys)
    both = [started(text, project, str(host), before=tuple(made.command(host, []))) for host in range(2)]
    trains(project, *both)
    both[1].send_signal(number)  # as a scheduler may reach one node first
    said = [process.communicate(timeout=100) for process in both]
    assert f"by {number.name}" in said[0][0], said
    assert "saved in" in said[0][0]
    assert marked.ranks(project) == []
    wanted = 75 if number == signal.SIGUSR1 else 128 + number
    assert [process.returncode for process in both] == [wanted, wanted], said


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.slow
def test_f4_f7_an_agent_that_is_killed_ends_the_run(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts, host: int
) -> None:
    """With its ranks, and with those of the other host: the script says which host it was. Host 0 has the store."""
    process = started(script_of([*LONG, "--to", "ssh", *TWO], capsys), project)
    trains(project, process)
    (agent,) = [pid for pid in marked.agents(project) if pid in on(made, host)]
    os.kill(agent, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    marked.wait_for_none(lambda: marked.ranks(project))
    assert process.returncode not in (0, 2, 75, 130, 143), out + err
    assert f"10.77.0.{host + 1}" in err


@pytest.mark.slow
def test_f8_the_script_brings_a_lost_host_back(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts
) -> None:
    """Fault: with survive.on_loss a host whose agent is killed ends the script, or its agent is never started again."""
    words = [*LONG, "train.global_batch_size=6", "survive.on_loss=shrink", "checkpoint.every=200"]
    process = started(script_of([*words, "--to", "ssh", *TWO], capsys), project)
    trains(project, process)
    folder = RunFolder.open(project / "runs" / "hosts")

    def until(*kinds: str) -> None:
        end_s = time.monotonic() + 100
        while [event["kind"] for event in folder.read_events() if event["kind"] in ("resume", "regroup")] != [*kinds]:
            assert time.monotonic() < end_s, folder.read_events()
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)

    (agent,) = [pid for pid in marked.agents(project) if pid in on(made, 1)]
    os.kill(agent, signal.SIGKILL)
    until("resume")
    until("resume", "regroup", "resume")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 75, out + err
    assert "host1 is lost: its agent has ended" in err
    assert "host1 is there again" in err
    marked.wait_for_none(lambda: marked.ranks(project))


@pytest.mark.slow
def test_f4_a_rank_0_that_is_killed_ends_the_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started(script_of([*LONG, "--to", "ssh", *TWO], capsys), project)
    trains(project, process)
    (first,) = [pid for pid in marked.ranks(project) if b"RANK=0" in marked.environment(pid)]
    os.kill(first, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    marked.wait_for_none(lambda: marked.ranks(project))
    assert process.returncode == 137, out + err
    assert f"rank 0 of 2 (pid {first}) was killed by SIGKILL (9)" in err


@pytest.mark.slow
def test_s1_ranks_on_hosts_listen_where_the_others_come(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts
) -> None:
    process = started(script_of([*LONG, "--to", "ssh", *TWO], capsys), project)
    trains(project, process)
    found = [
        set(listeners_of(next(pid for pid in marked.ranks(project) if pid in on(made, host)))) for host in range(2)
    ]
    assert found[0]
    for host, listeners in enumerate(found):
        assert {address for address, _ in listeners} <= {hosts.address(host), "127.0.0.1"}


def test_s1_ranks_on_this_machine_listen_on_loopback(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts
) -> None:
    """On a host of its own: nobody else listens there."""
    text = script_of([*LONG, "--to", "local", "--devices", "2"], capsys)
    process = started(text, project, before=tuple(made.command(2, [])))
    trains(project, process)
    assert {address for address, _ in listeners_of(marked.ranks(project)[0])} == {"127.0.0.1"}


@pytest.mark.parametrize("target", ["local", pytest.param("ssh", marks=pytest.mark.slow), "torchrun"])
def test_s5_nobody_is_told_the_token(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts, target: str
) -> None:
    """No command line, no file of the run, no line that it prints has the token."""
    where = TWO if target == "ssh" else ("--devices", "2")
    process = started(script_of([*LONG, "--to", target, *where], capsys), project)
    trains(project, process)
    token = marked.token(project)
    shown = marked.command_lines_with(token)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert shown == []
    assert token not in out + err
    assert marked.files_with(project, token) == []


def on(made: hosts.Hosts, host: int) -> list[int]:
    """The processes on a host."""
    words = ["ip", "netns", "pids", made.name(host)]
    return [int(word) for word in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()]
