"""In: files as the kernel's cgroups (version 1 and 2) and /proc have them. Out: what a SIGKILL is taken for.
Does not run out of memory: test_memory_kill.py does, where a cgroup can be made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from codescent.base import proc
from codescent.launch import memory_kills as kills
from codescent.launch import process_state


class Machine:
    """The files of one machine; `kill` counts as the kernel does."""

    def __init__(self, folder: Path, cgroup: str) -> None:
        self.groups, self.proc = folder / "cgroup", folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text(cgroup)

    def write(self, path: str, text: str) -> None:
        file = self.groups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "counts", "limit", "where"),
    [
        ("0::/job/1\n", "job/1/memory.events", "job/1/memory.max", "in this job's cgroup (limit 400 MiB)"),
        ("0::/../..\n", "memory.events", "", "in this job's cgroup"),  # a container sees its own group as the root
        ("9:cpu:/x\n4:memory:/j\n", "memory/j/memory.oom_control", "memory/j/memory.limit_in_bytes", "(limit 400 MiB)"),
        ("4:memory:/docker/7\n", "memory/memory.oom_control", "", "in this job's cgroup"),
    ],
)
def test_a_kill_is_found_where_the_kernel_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, counts: str, limit: str, where: str
) -> None:
    machine = Machine(tmp_path, cgroup)
    monkeypatch.setattr(kills, "CGROUPS", machine.groups)
    monkeypatch.setattr(kills, "PROC", machine.proc)
    machine.write(counts, "low 0\noom 3\noom_kill 5\n")
    if limit:
        machine.write(limit, f"{400 << 20}\n")
    before = kills.memory_kills()
    assert kills.evidence(before) == "; the kernel has counted no out-of-memory kill: a user or a program sent it"
    machine.write(counts, "low 0\noom 5\noom_kill 7\n")
    said = kills.evidence(before)
    assert said.startswith(": out of memory: meanwhile the kernel has killed 2 processes in this job's cgroup")
    assert said.endswith(where)


def test_the_machines_own_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "0::/\n")
    monkeypatch.setattr(kills, "CGROUPS", machine.groups)
    monkeypatch.setattr(kills, "PROC", machine.proc)
    (machine.proc / "vmstat").write_text("pgfault 7\noom_kill 0\n")
    before = kills.memory_kills()
    (machine.proc / "vmstat").write_text("pgfault 9\noom_kill 1\n")
    assert kills.evidence(before) == ": out of memory: meanwhile the kernel has killed 1 process on this machine"


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "PROC", tmp_path)
    assert kills.memory_kills() == {}
    assert kills.evidence({}) == "; perhaps the machine ran out of memory"


def test_a_frozen_cgroup_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "")
    (machine.proc / "77").mkdir()
    (machine.proc / "77" / "stat").write_text("77 (a (strange) name) S 1 2 3")
    (machine.proc / "77" / "cgroup").write_text("0::/job\n")
    machine.write("job/cgroup.events", "populated 1\nfrozen 0\n")
    monkeypatch.setattr(process_state, "CGROUPS", machine.groups)
    monkeypatch.setattr(proc, "PROC", machine.proc)
    shutil.rmtree(machine.proc / "self")
    (machine.proc / "self").symlink_to(str(os.getpid()))
    assert process_state.halted_by(77) == ""
    machine.write("job/cgroup.events", "populated 1\nfrozen 1\n")
    assert process_state.halted_by(77) == "is frozen (by its cgroup)"
    (machine.proc / "77" / "stat").write_text("77 (a (strange) name) T 1 2 3")
    assert process_state.halted_by(77) == "is stopped (SIGCONT continues it)"
    assert process_state.halted_by(78) == ""
    assert process_state.state_of(78).word == "gone"
    (machine.proc / "self").unlink()
    (machine.proc / "self").symlink_to(str(os.getpid() + 1))
    assert process_state.state_of(77).word == process_state.state_of(78).word == "", "numbers of another namespace"
