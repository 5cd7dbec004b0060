"""In: processes that write one run folder. Out: one of them writes at a time, and the others know it.
Does not train: test_train_resume.py does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from codescent.base import early, proc
from codescent.base.errors import RunFailed, UserError
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints
from codescent.record import RunFolder
from codescent.record import lease as module
from codescent.record.lease import Holder, Lease

pytestmark = pytest.mark.timeout(60)
WRITER = """
import os, sys, time
from pathlib import Path
from codescent.record.lease import Lease
def lost(why):
    print("lost", why, flush=True)
    os._exit(7)
lease = Lease(Path(sys.argv[1]), lost, float(sys.argv[2]))
print(lease.generation, flush=True)
if sys.argv[3:]:
    sys.stdin.readline()
    lease.release()
time.sleep(60)
"""


@contextmanager
def writer(folder: Path, lease_s: float, *words: str, apart: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lease; `apart`: in a space of process numbers of its own, as on another host."""
    command = [sys.executable, "-c", WRITER, str(folder), str(lease_s), *words]
    command = ["unshare", "--pid", "--fork", "--kill-child", *command] if apart else command
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def never(why: str) -> None:
    raise AssertionError(why)


def test_a_writer_that_has_ended_is_followed_at_once(tmp_path: Path) -> None:
    """Fault: after kill -9 a run waits for a lease of half a minute, on the machine that knows who has ended."""
    with writer(tmp_path, 30.0) as first:
        assert line(first) == "1"
        first.send_signal(signal.SIGKILL)
        first.wait()
    begin_s = time.monotonic()
    second = Lease(tmp_path, never)
    assert second.generation == 2
    assert time.monotonic() - begin_s < 10  # less than the lease
    second.release()
    third = Lease(tmp_path, never)
    assert third.generation == 3
    third.release()
    assert [one.name for one in tmp_path.iterdir()] == [".lease-3"]


def test_a_writer_that_renews_its_lease_keeps_the_run(tmp_path: Path) -> None:
    """Fault: a second process writes where locks do not reach; or a lease that is given up is not free."""
    with writer(tmp_path, 0.6, "release", apart=has_unshare()) as first:
        assert line(first) == "1"
        with pytest.raises(UserError, match=r"is being written by process \d+ on .*: wait for its end, or stop it"):
            Lease(tmp_path, never, 0.6)
        print("release", file=first.stdin, flush=True)
        second = Lease(tmp_path, never, 0.6)
        assert second.generation == 2
        second.release()


def test_a_job_that_is_started_again_waits_for_a_writer_that_is_cut_off(tmp_path: Path) -> None:
    """Fault: a scheduler starts a job elsewhere, whose rank 0 is cut off, but reaches the disk until its wait for the
    other ranks ends: the run is refused, and the job is lost. Or patience has no end."""
    if not has_unshare():
        pytest.skip("needs root: a process on this machine is known to have ended")
    with writer(tmp_path, 0.6, apart=True) as first:
        assert line(first) == "1"
        begin_s = time.monotonic()
        with pytest.raises(UserError, match="wait for its end, or stop it"):
            Lease(tmp_path, never, 0.6, patience_s=2.0)
        assert time.monotonic() - begin_s > 2.0
        end = threading.Timer(3.0, first.kill)
        end.start()
        second = Lease(tmp_path, never, 0.6, patience_s=600.0)
        assert not end.is_alive(), "it has waited for the end of the first"
        assert second.generation == 2
        second.release()


def test_a_stopped_writer_loses_the_run_and_ends(tmp_path: Path) -> None:
    """Fault: a process that was cut off for a time writes rows among those of the process that has taken the run."""
    if not has_unshare():
        pytest.skip("needs root: a process on this machine is known to be stopped")
    with writer(tmp_path, 0.6, apart=True) as first:
        assert line(first) == "1"
        (child,) = (int(pid) for pid in children(first.pid))
        os.kill(child, signal.SIGSTOP)
        second = Lease(tmp_path, never, 0.6)
        assert second.generation == 2
        os.kill(child, signal.SIGCONT)
        assert (
            line(first) == f"lost {tmp_path}: process {os.getpid()} on {module.platform.node()} writes this run now: "
            "this process ends, and writes nothing more"
        )
        second.check()
        second.release()


def test_a_stopped_writer_goes_on_if_nobody_has_taken_the_run(tmp_path: Path) -> None:
    """Fault: a laptop that was closed for an hour ends its run."""
    with writer(tmp_path, 0.5) as first:
        assert line(first) == "1"
        first.send_signal(signal.SIGSTOP)
        time.sleep(3.0)  # longer than the lease and its grace
        first.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + 20
        while not (tmp_path / ".lease-2").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert (tmp_path / ".lease-2").exists()
        assert first.poll() is None


def test_a_check_finds_that_another_has_taken_the_run(tmp_path: Path) -> None:
    """Fault: a row is appended by a writer whose lease another process has."""
    first = Lease(tmp_path, never)
    first.check()
    (tmp_path / ".lease-1").rename(tmp_path / ".lease-2")
    other = replace(Holder.this(30.0), process=1, host="elsewhere")
    (tmp_path / ".lease-2").write_text(json.dumps(asdict(other)))
    with pytest.raises(RunFailed, match="process 1 on elsewhere writes this run now: this process ends"):
        first.check()
    first.release()
    assert json.loads((tmp_path / ".lease-2").read_text())["host"] == "elsewhere"


def test_a_run_that_another_has_taken_gets_no_row_and_no_checkpoint(tmp_path: Path) -> None:
    """Fault: a row, an event or a checkpoint of an older writer gets into the run of the newer one."""
    run = RunFolder.create(tmp_path / "run", "", {})
    run.hold()
    run.lease(never)
    run.metrics({"step": 1})
    assert run.writer == 1
    checkpoints = Checkpoints(run.checkpoints, 2, keep_best=False, of_run=True)
    checkpoints.may_commit = run.may_write
    checkpoints.save(1, {"weight": torch.ones(2)}, {})
    (run.path / ".lease-1").rename(run.path / ".lease-2")
    for write in (lambda: run.metrics({"step": 2}), lambda: run.event("note")):
        with pytest.raises(RunFailed, match="writes this run now"):
            write()
    with pytest.raises(CheckpointError, match="writes this run now"):
        checkpoints.save(2, {"weight": torch.ones(2)}, {})
    assert [row["step"] for row in run.read_metrics()] == [1]
    assert [one.name for one in run.checkpoints.iterdir()] == ["step_00000001"]
    run.release()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"process": 1}', b"[" * 500])
def test_a_lease_that_cannot_be_read_is_waited_for(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a damaged file is taken for a writer that has ended, or ends the command with a traceback."""
    monkeypatch.setattr(module, "UNKNOWN", replace(module.UNKNOWN, lease_s=0.2))
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    (tmp_path / ".lease-5").write_bytes(content)
    begin_s = time.monotonic()
    held = Lease(tmp_path, never, 5.0)
    assert held.generation == 6
    assert time.monotonic() - begin_s > 0.29
    held.release()


def test_a_full_disk_refuses_a_writer_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the lock file has no room: a traceback, and the lock stays in a notebook until its process ends."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = RunFolder.create(tmp_path / "run", "", {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(UserError, match="no space left on the disk: free some space"):
            run.hold()
    RunFolder.open(run.path).hold()


def test_the_time_limit_ends_the_wait_for_a_lease_which_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a job whose time is over still waits; or it is said twice, or where several ranks do not show it."""
    said: list[str] = []
    monkeypatch.setattr(module, "progress", said.extend)
    monkeypatch.setattr(module, "UNKNOWN", replace(module.UNKNOWN, lease_s=0.2))
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    (tmp_path / ".lease-1").symlink_to(tmp_path / "nowhere")
    Lease(tmp_path, never).release()
    assert said == [f"{tmp_path}: another process has written this run and may still do: wait 0.7 s"]
    (tmp_path / ".lease-2").write_text("")
    monkeypatch.setattr(early, "_end_s", 1.0)
    with early.may_end(), pytest.raises(early.StopAsked):
        Lease(tmp_path, never)
    assert [one.name for one in tmp_path.iterdir()] == [".lease-2"]


@pytest.mark.skipif(sys.platform != "linux", reason="a renamed folder is found by /proc")
def test_a_renamed_run_keeps_its_lease_between_two_writes(tmp_path: Path) -> None:
    """Fault: the folder is renamed during a long step: the lease is not renewed, and the run ends as if taken."""
    run = RunFolder.create(tmp_path / "run", "", {})
    run.hold()
    run.lease(never, 0.6)
    (tmp_path / "run").rename(tmp_path / "renamed")
    lease = tmp_path / "renamed" / ".lease-1"
    before, end_s = lease.read_text(), time.monotonic() + 20
    while json.loads(lease.read_text())["renewals"] < json.loads(before)["renewals"] + 3 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert json.loads(lease.read_text())["renewals"] >= json.loads(before)["renewals"] + 3
    run.event("note")
    assert [one["kind"] for one in run.read_events()] == ["moved", "note"]
    run.release()
    assert json.loads(lease.read_text())["released"] is True


@pytest.mark.parametrize(
    ("remove", "said"),
    [(".", "the run folder was removed, or moved"), (".lease-1", ".lease-1 was deleted, by which one process")],
)
def test_what_was_deleted_is_named(tmp_path: Path, remove: str, said: str) -> None:
    """Fault: somebody deletes the folder or the lease, and the run blames a process that does not exist."""
    (tmp_path / "run").mkdir()
    words: list[str] = []
    held = Lease(tmp_path / "run", words.append, 0.3)
    shutil.rmtree(tmp_path / "run") if remove == "." else (tmp_path / "run" / remove).unlink()
    end_s = time.monotonic() + 20
    while not words and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [one.startswith(f"{tmp_path / 'run'}: {said}") for one in words] == [True], words
    held.release()


@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are those of Linux")
def test_numbers_of_another_namespace_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: with the /proc of another PID namespace a run cannot start, or a writer that lives counts as ended."""
    here = Holder.this(30.0)
    assert not here.is_gone()
    assert replace(here, started=here.started - 1).is_gone(), "its number is that of another process now"
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert not here.is_gone()
    assert not replace(here, started=here.started - 1).is_gone()
    assert Holder.this(30.0).machine == ""


def has_unshare() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode == 0


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
