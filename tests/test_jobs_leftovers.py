"""In: processes with a run's mark in their environment, and others. Out: those with the mark are found and ended.
Does not start runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codescent.config.load import load
from codescent.doctor.from_config import of_config
from codescent.doctor.wanted import Wanted
from codescent.jobs import leftovers

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(100)
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[subprocess.Popen[bytes]] = []

    def one(mark: str, *words: str) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(words or ("sleep", "100"), env={**os.environ, leftovers.MARK: mark}))
        return made[-1]

    yield one
    for process in made:
        process.kill()
        process.wait()


def test_what_has_the_mark_is_found_and_ended(tmp_path: Path, start: Start) -> None:
    mark = str(tmp_path / "a run's")
    mine, other, longer = start(mark), start(str(tmp_path)), start(f"{mark}2")
    assert [(left.pid, left.command) for left in leftovers.find(mark)] == [(mine.pid, "sleep 100")]
    assert leftovers.end(mark, leftovers.find(mark)) == 0
    assert mine.wait(10) == -signal.SIGTERM
    assert leftovers.find(mark) == []
    assert (other.poll(), longer.poll()) == (None, None)


def test_the_doctor_looks_for_the_same_mark(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    words = ["run.name=x", f"run.folder={tmp_path}/link/x", "data.tokenizer=byte"]
    wanted = of_config(Wanted(), load("default", words).config, 1, "host")
    assert wanted.mark == leftovers.mark_of(tmp_path / "runs" / "x") == str(tmp_path.resolve() / "runs" / "x")


def test_what_does_not_end_is_killed(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "STOP_S", 0.3)
    mark = str(tmp_path)
    deaf = start(mark, sys.executable, "-c", DEAF, str(tmp_path / "ready"))
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert leftovers.end(mark, leftovers.find(mark)) == 1
    assert deaf.wait(10) == -signal.SIGKILL


def test_the_command_does_not_end_itself(tmp_path: Path) -> None:
    """The script that calls it, and this process, have the mark too."""
    env = {**os.environ, leftovers.MARK: str(tmp_path)}
    command = f"{sys.executable} -m codescent.jobs.leftovers {tmp_path} --end"
    done = subprocess.run(["bash", "-c", f"{command}; exit $?"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_says_what_it_has_ended(tmp_path: Path, start: Start) -> None:
    mine = start(str(tmp_path))
    words = [sys.executable, "-m", "codescent.jobs.leftovers", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    host = os.uname().nodename
    assert (done.returncode, done.stdout) == (1, f"{host}: process {mine.pid}: sleep 100\n")
    done = subprocess.run([*words, "--end"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == f"{host}: 1 process ended"


def test_a_process_that_its_parent_has_not_awaited_has_ended(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a zombie that counts as living: it would be waited for, and be said to be killed."""
    monkeypatch.setattr(leftovers, "STOP_S", 60.0)
    process = start(str(tmp_path))
    found = leftovers.find(str(tmp_path))
    process.terminate()
    assert leftovers.end(str(tmp_path), found) == 0


def test_another_process_of_the_same_id_is_not_ended(tmp_path: Path, start: Start) -> None:
    """Catches: a signal to the process that has an id by now, without a look at its mark."""
    other = start(str(tmp_path / "other"))
    assert leftovers.end(str(tmp_path), [leftovers.Left(other.pid, "sleep 100")]) == 0
    assert other.poll() is None
