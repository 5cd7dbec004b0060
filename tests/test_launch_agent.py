"""In: agents, as a script starts them on each host; small programs as ranks. Out: each rank knows its place; signals
and the end of the standard input reach it. The hosts are one machine here: test_jobs_runs.py has several."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import environment, make_project

from codescent.base import cores
from codescent.launch import agent as launch_agent

PROGRAM = """
import json, os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CODESCENT_TOKEN")
env = {name: os.environ.get(name) for name in names}
env["store"] = "CODESCENT_STORE_FD" in os.environ
env["loopback"] = os.environ.get("GLOO_SOCKET_IFNAME") == "lo"
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda one, frame: got.append(signal.Signals(one).name))
draft = sys.argv[1] + "/draft" + env["RANK"]
open(draft, "w").write(json.dumps(env))
os.rename(draft, sys.argv[1] + "/rank" + env["RANK"])
while not got and len(sys.argv) > 2:
    time.sleep(0.01)
open(sys.argv[1] + "/got" + env["RANK"], "w").write(json.dumps(got))
sys.exit(75 if got == ["SIGUSR1"] else 143 if got else 0)
"""


def agent(folder: Path, *words: str, waits: bool = False, listens: bool = True) -> subprocess.Popen[str]:
    listening = "(signal.SIGTERM, signal.SIGUSR1)"
    (folder / "program.py").write_text(PROGRAM if listens else PROGRAM.replace(listening, "()"))
    command = [sys.executable, "-m", "codescent.launch.agent", *words, "--"]
    command += [sys.executable, "program.py", str(folder), *(["waits"] if waits else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env={**os.environ}, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def give(started: subprocess.Popen[str], text: str) -> None:
    """Write to the standard input, which stays open."""
    assert started.stdin is not None
    started.stdin.write(text)
    started.stdin.flush()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def read(folder: Path, name: str) -> dict[str, str]:
    end = time.monotonic() + 60
    while not (folder / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)
    found: dict[str, str] = json.loads((folder / name).read_text())
    return found


def test_two_agents_number_the_ranks_of_their_hosts(tmp_path: Path) -> None:
    master = f"127.0.0.1:{free_port()}"
    one = agent(tmp_path, "--ranks", "2", "--world", "3", "--master", master, "--follow")
    two = agent(tmp_path, "--ranks", "1", "--first", "2", "--world", "3", "--master", master, "--follow")
    for each in (one, two):
        give(each, "a secret\n")
    for each in (one, two):
        assert each.wait(60) == 0
        assert each.communicate()[1] == ""
    places = [read(tmp_path, f"rank{rank}") for rank in range(3)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in places] == [
        ("0", "0", "3", "2"), ("1", "1", "3", "2"), ("2", "0", "3", "1"),
    ]  # fmt: skip
    assert {f"{one['MASTER_ADDR']}:{one['MASTER_PORT']}" for one in places} == {master}
    assert {one["CODESCENT_TOKEN"] for one in places} == {"a secret"}
    assert [one["store"] for one in places] == [True, False, False]
    assert not any(one["loopback"] for one in places)  # each finds the interface of its route


@pytest.mark.parametrize(("line", "code"), [("USR1\n", 75), ("TERM\n", 143), ("", 143)])
def test_lines_and_the_end_of_the_input_are_signals(tmp_path: Path, line: str, code: int) -> None:
    """The end of the input: the script has died, or its connection."""
    started = agent(tmp_path, "--ranks", "2", "--follow", waits=True)
    give(started, "a secret\n")
    for rank in range(2):
        read(tmp_path, f"rank{rank}")
    if line:
        give(started, line)
    elif started.stdin is not None:
        started.stdin.close()
    assert started.wait(60) == code
    expected = [f"SIG{line.strip() or 'TERM'}"]
    assert [read(tmp_path, f"got{rank}") for rank in range(2)] == [expected, expected]


def test_agents_of_several_machines_draw_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would draw another one. Without one the ranks read the user's file, the same on all machines."""
    monkeypatch.delenv("CODESCENT_TOKEN", raising=False)
    master = f"127.0.0.1:{free_port()}"
    two = [agent(tmp_path, "--ranks", "1", "--first", str(at), "--world", "2", "--master", master) for at in range(2)]
    assert [each.wait(60) for each in two] == [0, 0]
    assert [read(tmp_path, f"rank{rank}")["CODESCENT_TOKEN"] for rank in range(2)] == [None, None]
    monkeypatch.setenv("CODESCENT_TOKEN", "a secret")
    assert agent(tmp_path, "--ranks", "1", "--world", "2", "--master", master).wait(60) == 0
    assert read(tmp_path, "rank0")["CODESCENT_TOKEN"] == "a secret"
    monkeypatch.delenv("CODESCENT_TOKEN")
    assert agent(tmp_path, "--ranks", "1", "--world", "1").wait(60) == 0
    assert len(read(tmp_path, "rank0")["CODESCENT_TOKEN"]) == 64


def test_without_input_signals_go_to_the_ranks(tmp_path: Path) -> None:
    started = agent(tmp_path, "--ranks", "1", waits=True)
    place = read(tmp_path, "rank0")
    assert place["loopback"]
    started.send_signal(signal.SIGUSR1)
    assert started.wait(60) == 75


def test_a_line_that_comes_with_the_token_is_not_lost(tmp_path: Path) -> None:
    """The agent listens before it reads. Either it starts no rank, or the ranks get the signal, which ends this one."""
    started = agent(tmp_path, "--ranks", "1", "--follow", waits=True)
    give(started, "a secret\nTERM\n")
    assert started.wait(60) == 143


def test_a_rank_that_does_not_listen_fails_by_the_signal(tmp_path: Path) -> None:
    """Nothing is saved: 75 would start the job again, for nothing."""
    started = agent(tmp_path, "--ranks", "1", waits=True, listens=False)
    read(tmp_path, "rank0")
    started.send_signal(signal.SIGUSR1)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGUSR1
    assert "rank 0 of 1 (pid " in err
    assert "was killed by SIGUSR1 (10)" in err


@pytest.mark.parametrize(("line", "code"), [("USR1\n", 75), ("TERM\n", 143)])
def test_the_script_reads_the_exit_code_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    """So no launcher above the agents takes a stop for a failure."""
    monkeypatch.setenv("CODESCENT_EXIT_FILE", str(tmp_path / "code"))
    started = agent(tmp_path, "--ranks", "2", "--follow", waits=True)
    give(started, "a secret\n")
    for rank in range(2):
        read(tmp_path, f"rank{rank}")
    give(started, line)
    assert started.wait(60) == 0
    assert (tmp_path / "code").read_text() == f"{code}\n"


def test_a_failure_is_none_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODESCENT_EXIT_FILE", str(tmp_path / "code"))
    started = agent(tmp_path, "--ranks", "1", waits=True, listens=False)
    read(tmp_path, "rank0")
    started.send_signal(signal.SIGUSR1)
    assert started.wait(60) == 128 + signal.SIGUSR1
    assert not (tmp_path / "code").exists()


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (["apptainer", "exec", "/images/codescent", "codescent", "train", "default"], "train"),
        (["python3", "-P", "-m", "codescent", "doctor"], "doctor"),
        (["/venv/bin/codescent", "train"], "train"),
        (["python", "train", "codescent", "other"], ""),
    ],
)
def test_what_a_command_does_is_the_word_behind_codescent(words: list[str], verb: str) -> None:
    assert launch_agent._verb(words) == verb


def test_what_the_doctor_finds_is_in_the_file_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codescent").write_text("#!/bin/sh\necho 1 >$CODESCENT_EXIT_FILE\n")
    (tmp_path / "codescent").chmod(0o755)
    words = ["--ranks", "1", "--", str(tmp_path / "codescent"), "doctor"]
    assert launch_agent.main(words) == 1
    monkeypatch.setenv("CODESCENT_EXIT_FILE", str(tmp_path / "code"))
    assert launch_agent.main(words) == 0
    assert (tmp_path / "code").read_text() == "1\n"


def test_more_ranks_than_the_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rank is started."""
    monkeypatch.setattr(cores, "most_processes", lambda: 2)
    monkeypatch.setattr(launch_agent, "run_ranks", lambda *words, **named: 0)
    assert launch_agent.main(["--ranks", "2", "--", "true"]) == 0
    assert launch_agent.main(["--ranks", "3", "--", "true"]) == 2
    assert "--ranks 3: each rank is a process on this machine, whose memory has room for 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1", "--world", "2", "--master", "192.0.2.1:29400"], "rank 0 cannot listen at 192.0.2.1:29400"),
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "2", "--first", "1", "--world", "2"], "--first 1"),
        (["--ranks", "2", "--world", "1"], "--world 1: is less than --ranks 2"),
        (["--ranks", "1", "--master", "here"], "--master here"),
        (["--ranks", "1", "--world", "2"], "--world 2: with --ranks 1 others are elsewhere: give --master"),
        (["--ranks", "1", "--world", "2", "--master", "127.0.0.1:0"], "--master 127.0.0.1:0"),
        (["--ranks", "1", "--follow"], "--follow: the standard input must begin with the token"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    started = agent(tmp_path, *words)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 2
    assert said in err
    assert "Traceback" not in err


def test_an_agent_without_ranks_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """Fault: the script brings a lost host back just as the run ends, and its agent looks for host 0 for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as host_0:
        words = ["--ranks", "1", "--first", "1", "--world", "2", "--master", f"127.0.0.1:{host_0.getsockname()[1]}"]
        started = agent(tmp_path, *words, "--on-loss", "shrink", "--follow", waits=True)
        give(started, "a secret\n")
        host_0.accept()[0].close()
        give(started, "TERM\n")
        assert started.wait(60) == 143
    assert not (tmp_path / "rank1").exists()


@pytest.mark.slow
def test_a_script_that_was_written_for_another_policy(tmp_path: Path) -> None:
    """Fault: the config was changed since; the agents do what the script says, and nobody knows it."""
    make_project(tmp_path)
    words = ["--ranks", "2", "--on-loss", "restart", "--", sys.executable, "-m", "codescent", "train", "run.toml"]
    done = subprocess.run(
        [sys.executable, "-m", "codescent.launch.agent", *words, "run.name=a", "survive.on_loss=shrink"],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert 'survive.on_loss = "shrink": the script that has started this run was written for "restart"' in done.stderr
    assert not (tmp_path / "runs" / "a").exists()


def test_an_agent_of_ranks_that_another_host_has_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: it starts ranks that others wait for twice, or waits for its place for ever."""
    monkeypatch.setenv("CODESCENT_TOKEN", "a secret")
    common = ["--world", "3", "--master", f"127.0.0.1:{free_port()}", "--on-loss", "restart"]
    first = agent(tmp_path, "--ranks", "2", *common, waits=True)
    try:
        read(tmp_path, "rank1")
        second = agent(tmp_path, "--ranks", "2", "--first", "1", *common, waits=True)
        _, err = second.communicate(timeout=60)
    finally:
        first.terminate()
        first.communicate(timeout=60)
    assert second.returncode == 2
    assert "--first 1 --ranks 2: the agent of " in err
    assert not (tmp_path / "rank2").exists()
