"""In: two mounts of one folder, as two hosts see a disk without locks. Out: one process writes a run (F6, F19).
Does not cut networks: processes and the disk are stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("bindfs") is None or not Path("/dev/fuse").exists(),
        reason="needs root, bindfs and /dev/fuse",
    ),
]
ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 3
TINY = ("model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "data.seq_len=16", "checkpoint.every=20",
        "train.global_batch_size=4", "train.eval_every=0", f"survive.lease_s={LEASE_S}")  # fmt: skip


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two mounts of one folder. Each has locks of its own."""
    (tmp_path / "disk").mkdir()
    mounts = tmp_path / "a", tmp_path / "b"
    for mount in mounts:
        mount.mkdir()
        subprocess.run(["bindfs", tmp_path / "disk", mount], check=True)
    yield mounts
    for mount in mounts:
        for daemon in daemons(mount):
            os.kill(daemon, signal.SIGCONT)
        subprocess.run(["umount", "--lazy", mount], check=True)


def daemons(mount: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"bindfs .* {mount}$"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def trained(mount: Path, *words: str, resume: bool = False, apart: bool = True) -> subprocess.Popen[str]:
    """A run with its folder on a mount; `apart`: on a host of its own, with process numbers of its own."""
    run, config = str(mount / "run"), str(ROOT / "configs" / "default.toml")
    given = ["--resume", run] if resume else [config, f"run.folder={run}", f"data.folder={mount.parent / 'data'}"]
    host = ["unshare", "--pid", "--fork", "--kill-child"] if apart else []
    command = [*host, sys.executable, "-m", "codescent", "train", *given, *TINY, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=mount.parent)


def until(true: Callable[[], bool], most_s: float = 90.0) -> None:
    end_s = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def processes(of: subprocess.Popen[str]) -> list[int]:
    """The process and all below it."""
    found = [of.pid]
    for pid in found:
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def rows(mount: Path) -> int:
    file = mount / "run" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def resumed(mount: Path) -> list[dict[str, Any]]:
    return [one for one in RunFolder.open(mount / "run").read_events() if one["kind"] == "resume"]


def test_a_host_that_comes_back_writes_nothing_among_the_rows_of_its_successor(hosts: tuple[Path, Path]) -> None:
    """F19. Fault: an orphan on a host that was cut off appends rows, or replaces a checkpoint, of the resumed run."""
    first, second = hosts
    orphan = trained(first, "train.num_steps=100000")
    until(lambda: rows(first) > 50)
    for pid in processes(orphan)[1:]:
        os.kill(pid, signal.SIGSTOP)
    heir = trained(second, "train.num_steps=100000", resume=True)
    until(lambda: bool(resumed(second)))
    for pid in processes(orphan)[1:]:
        os.kill(pid, signal.SIGCONT)
    begin_s = time.monotonic()
    said, _ = orphan.communicate(timeout=60)
    assert time.monotonic() - begin_s < LEASE_S + 25  # 2 s on an idle machine
    assert orphan.returncode == 1, said
    assert "writes this run now: this process ends, and writes nothing more" in said
    assert "Traceback" not in said
    before = rows(second)
    until(lambda: rows(second) > before + 20)
    for pid in processes(heir)[1:]:
        os.kill(pid, signal.SIGTERM)
    heir.communicate(timeout=60)
    run = RunFolder.open(second / "run")
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert resumed(second)[0]["writer"] == 2


def test_ranks_whose_disk_does_not_answer_end_within_their_lease(hosts: tuple[Path, Path]) -> None:
    """F6. Fault: the side that does not see the run folder trains on, or hangs for ever."""
    first, _ = hosts
    run = trained(first, "train.num_steps=100000", "parallel.ranks=2", apart=False)
    until(lambda: rows(first) > 20)
    (daemon,) = daemons(first)
    os.kill(daemon, signal.SIGSTOP)
    begin_s = time.monotonic()
    code = run.wait(60)
    took_s = time.monotonic() - begin_s
    os.kill(daemon, signal.SIGCONT)  # else the kernel may keep a process that has the output open
    said, _ = run.communicate(timeout=60)
    assert code == 1
    assert f"does not answer for {LEASE_S} s: this process ends" in said
    assert took_s < LEASE_S + 25, took_s  # 6 s on an idle machine
