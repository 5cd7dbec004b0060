"""In: scripts of `codescent launch --to ssh`, agents that do as they are told. Out: each agent gets its words, the
token and the signals; the first failure is the exit code. Does not start ranks, and its ssh stays here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import make_project
from scripts import script_of

SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
export HOST=$1; shift
exec "$@"
"""
PYTHON = """#!{python}
import os, select, signal, subprocess, sys, time
if sys.argv[3] == "codescent.jobs.address":
    print("10.0.0.1")
    sys.exit()
host = os.environ["HOST"]
def write(name, text):
    with open(name + host, "a") as file:
        file.write(text)
write("words-", " ".join(sys.argv[4:]))
write("token-", sys.stdin.readline())
write("ready-", "")
does = open("does-" + host).read().split()
if does[0] == "ends":
    sys.exit(int(does[1]))
if does[0] == "soon":  # it ends by itself, a moment after another one
    asked = select.select([sys.stdin], [], [], 0.5)[0]
    write("got-", sys.stdin.readline() if asked else "nothing")
    sys.exit(143 if asked else int(does[1]))
if does[0] == "meets":  # all end in the same moment
    while len([one for one in os.listdir() if one.startswith("ready-")]) < 4:
        time.sleep(0.001)
    sys.exit(int(does[1]))
for line in sys.stdin:  # until a signal is passed on, then as a rank that saves
    write("got-", line)
    time.sleep(0.3)
    sys.exit(int(does[1]))
write("got-", "the end")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "programs"
    found.mkdir()
    for name, text in {"ssh": SSH, "python3": PYTHON.format(python=sys.executable)}.items():
        (found / name).write_text(text)
        (found / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{found}:{os.environ['PATH']}")
    return found


def start(capsys: pytest.CaptureFixture[str], *words: str, **does: str) -> subprocess.Popen[str]:
    """Start the script; its agents do what `does` says by host."""
    for host, text in does.items():
        Path(f"does-{host}").write_text(text)
    hosts = ",".join(f"{host}:{slots}" for slots, host in enumerate(does, start=1))
    Path("script").write_text(script_of(["train.py", *words, "--to", "ssh", "--hosts", hosts], capsys))
    return subprocess.Popen(["bash", "script"], text=True, stdout=-1, stderr=-1, process_group=0)


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("programs")
def test_agents_get_their_places_and_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    """A line of the site that reads its input takes nothing of the agent's."""
    script = start(capsys, 'site.before=["cat"]', "site.time=01:00:00", a="ends 0", b="ends 0", c="ends 0")
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", 0)
    words = [Path(f"words-{host}").read_text().split() for host in "abc"]
    port = words[0][8].removeprefix("10.0.0.1:")
    assert [one[:9] for one in words] == [
        ["--follow", "--first", str(first), "--ranks", str(ranks), "--world", "6", "--master", f"10.0.0.1:{port}"]
        for first, ranks in ((0, 1), (1, 2), (3, 3))
    ]
    assert {tuple(one[9:]) for one in words} == {("--", "python", "train.py")}
    (token,) = {Path(f"token-{host}").read_text().strip() for host in "abc"}
    assert len(token) == 64


@pytest.mark.parametrize("where", [("local", "--devices", "2"), ("ssh", "--hosts", "a:1,b:1")], ids=["local", "ssh"])
def test_agents_know_when_a_stopped_rank_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: tuple[str, ...]
) -> None:
    """Fault: without survive.on_loss no agent is told parallel.stopped_s, so it has no effect."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert " --stopped 4 " in script_of(["run.toml", "parallel.stopped_s=4", "--to", *where], capsys)


@pytest.mark.usefixtures("programs")
def test_a_host_on_which_a_line_fails_starts_no_agent(capsys: pytest.CaptureFixture[str]) -> None:
    script = start(capsys, 'site.before=["test \\"$HOST\\" != b", "true"]', a="waits 143", b="ends 0")
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", 1)
    assert not Path("words-b").exists()
    assert Path("got-a").read_text() == "TERM\n"


@pytest.mark.usefixtures("programs")
def test_the_first_failure_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    script = start(capsys, a="waits 143", b="ends 7", c="waits 9")
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", 7)
    assert Path("got-a").read_text() == Path("got-c").read_text() == "TERM\n"


@pytest.mark.usefixtures("programs")
def test_agents_may_end_by_themselves_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 of the doctor ends with 1 if something is wrong, while the others end well."""
    script = start(capsys, a="ends 1", b="soon 0", c="soon 0")
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", 1)
    assert Path("got-b").read_text() == Path("got-c").read_text() == "nothing"


@pytest.mark.usefixtures("programs")
def test_no_status_is_lost_where_agents_end_together(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(10):
        for one in Path().glob("ready-*"):
            one.unlink()
        script = start(capsys, a="meets 0", b="meets 0", c="meets 7", d="meets 0")
        assert (*script.communicate(timeout=60), script.returncode) == ("", "", 7)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signals_reach_each_agent_once(number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """To all processes of the script, as a terminal sends them: ssh stays until its agent has ended."""
    script = start(capsys, a=f"waits {code}", b=f"waits {code}")
    wait_for(lambda: len(list(Path().glob("ready-*"))) == 2)
    os.killpg(script.pid, number)
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", code)
    assert Path("got-a").read_text() == Path("got-b").read_text() == f"{number.name.removeprefix('SIG')}\n"


@pytest.mark.usefixtures("programs")
def test_agents_see_the_end_of_a_script_that_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    script = start(capsys, a="waits 0", b="waits 0")
    wait_for(lambda: len(list(Path().glob("ready-*"))) == 2)
    script.kill()
    wait_for(lambda: all(Path(f"got-{host}").exists() for host in "ab"))
    assert Path("got-a").read_text() == Path("got-b").read_text() == "the end"
    script.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_the_agent_of_a_lost_host_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a host that is lost ends the script, or never comes back; or the exit code is not that of host 0."""
    make_project(tmp_path)
    words = [
        "run.toml",
        "train.global_batch_size=12",
        "survive.on_loss=restart",
        "survive.spares=3",
        "checkpoint.every=5",
    ]
    Path("script").write_text(script_of([*words, "--to", "ssh", "--hosts", "a:2,b:1"], capsys))
    Path("does-a").write_text("waits 75")
    Path("does-b").write_text("ends 7")
    script = subprocess.Popen(["bash", "script"], text=True, stdout=-1, stderr=-1, process_group=0)
    wait_for(lambda: Path("ready-b").exists() and Path("ready-a").exists())
    Path("does-b").write_text("waits 75")
    wait_for(lambda: Path("words-b").read_text().count("--follow") == 2)
    assert script.poll() is None
    (token,) = {*Path("token-a").read_text().split(), *Path("token-b").read_text().split()}
    assert len(token) == 64
    losses = ["--on-loss", "restart", "--max-restarts", "3", "--restart-window", "3600", "--spares"]
    found = [Path(f"words-{host}").read_text().split()[9:17] for host in "ab"]
    assert found == [[*losses, "2"], [*losses, "1"]]
    wait_for(lambda: Path("token-b").read_text().count("\n") == 2)
    script.send_signal(signal.SIGUSR1)
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", 75)
    assert Path("got-a").read_text() == Path("got-b").read_text() == "USR1\n"


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_where_host_0_has_ended_the_others_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: the script waits for hosts that wait for host 0, or starts them again."""
    make_project(tmp_path)
    words = ["run.toml", "train.global_batch_size=12", "survive.on_loss=restart", "checkpoint.every=5"]
    Path("script").write_text(script_of([*words, "--to", "ssh", "--hosts", "a:1,b:1"], capsys))
    Path("does-a").write_text("ends 3")
    Path("does-b").write_text("waits 1")
    script = subprocess.Popen(["bash", "script"], text=True, stdout=-1, stderr=-1, process_group=0)
    assert (*script.communicate(timeout=60), script.returncode) == ("", "", 3)
    assert Path("got-b").read_text() == "TERM\n"
