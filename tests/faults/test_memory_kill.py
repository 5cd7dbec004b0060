"""In: ranks in a real memory cgroup, of version 1 or 2, which is too small. Out: who says that memory ran out, and how.
Skips, saying so, where no such cgroup can be made: without root, or in a container."""

from __future__ import annotations

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import make_project
from test_running import ENDLESS, Run

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="memory cgroups are those of Linux"),
]
CGROUPS = Path("/sys/fs/cgroup")
LIMIT_MIB = 300
KILLED = (
    rf"out of memory: meanwhile the kernel has killed \d+ process(es)? in this job's cgroup \(limit {LIMIT_MIB:,} MiB\)"
)
LOOP = """
import sys, time, torch, codescent
ranks = codescent.init("cpu", timeout_s=60)
held = []
for number in range(100000):
    ranks.mean(number)
    time.sleep(0.01)
    if ranks.rank == 1 and number > 700:
        held.append(torch.ones(4 << 20))
"""
"""An own loop. After its supervisor has come rank 1 takes 16 MiB in each step."""


@contextmanager
def memory_group(limit_mib: int) -> Iterator[Path]:
    """A cgroup for processes that write their number into its file cgroup.procs."""
    is_second = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_second else CGROUPS / "memory") / f"codescent-{os.getpid()}"
    limits = ("memory.max", "memory.swap.max") if is_second else ("memory.limit_in_bytes", "")
    try:
        if is_second:
            (CGROUPS / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / limits[0]).write_text(str(limit_mib << 20))
        if limits[1] and (group / limits[1]).exists():
            (group / limits[1]).write_text("0")
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def in_group(group: Path, command: list[str]) -> list[str]:
    return ["sh", "-c", f"echo $$ > {group}/cgroup.procs; exec {shlex.join(command)}"]


@pytest.mark.slow
def test_f20_out_of_memory_is_told_by_the_kernels_count(tmp_path: Path) -> None:
    """Fault: a rank that the kernel has killed for lack of memory is said to be killed by somebody."""
    make_project(tmp_path)
    with memory_group(LIMIT_MIB) as group:
        command = [sys.executable, "-m", "codescent", "train", "run.toml", "--ranks", "2", *ENDLESS]
        run = Run(tmp_path, 2, in_group(group, command))
        try:
            code, _, err = run.end()
        finally:
            run.close()
    assert code == 137, err
    assert re.search(rf"rank \d of 2 \(pid \d+\) was killed by SIGKILL \(9\): {KILLED}", err)


@pytest.mark.slow
def test_f20_out_of_memory_under_torchrun(tmp_path: Path) -> None:
    """Fault: where another launcher has started the ranks, nobody says that it was the kernel, and why."""
    (tmp_path / "loop.py").write_text(LOOP)
    torchrun = [f"{sysconfig.get_path('scripts')}/torchrun", "--standalone", "--nproc-per-node", "2", "loop.py"]
    with memory_group(900) as group:
        run = Run(tmp_path, 2, in_group(group, torchrun))
        try:
            code, _, err = run.end()
        finally:
            run.close()
    assert code != 0
    found = KILLED.replace(f"{LIMIT_MIB:,}", "900")
    assert re.search(rf"codescent: rank 1 of 2 \(pid \d+ on \S+\) has ended .*: {found}", err), err
