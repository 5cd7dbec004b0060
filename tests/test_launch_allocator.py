"""In: environments. Out: the tunables that glibc's malloc is started with, and the cores that ranks share.
Does not measure speed: benchmarks/ does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from runs import train

from codescent.base.cores import available_cores, threads_per_rank
from codescent.launch import allocator
from codescent.launch.allocator import (
    EXPANDABLE,
    SEGMENTS,
    TUNABLES,
    needs_restart,
    tuned_environment,
    with_expandable_segments,
)
from codescent.launch.group import Group
from codescent.launch.huge_pages import with_huge_pages

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc has no tunables")


def tunables(env: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=") for part in env["GLIBC_TUNABLES"].split(":"))


@on_glibc
def test_an_environment_is_tuned_once_and_the_rest_of_it_kept() -> None:
    env = {"HOME": "/home/x"}
    tuned = tuned_environment(env)
    assert env == {"HOME": "/home/x"}
    assert tunables(tuned) == dict(TUNABLES)
    assert tuned["HOME"] == "/home/x"
    assert needs_restart(env)
    assert not needs_restart(tuned)
    assert tuned_environment(tuned) == tuned


@on_glibc
def test_tunables_of_the_user_stay_as_they_are() -> None:
    own = "glibc.malloc.mmap_max=7:glibc.cpu.x86_shstk=off"
    tuned = tuned_environment({"GLIBC_TUNABLES": own})
    assert tuned["GLIBC_TUNABLES"].startswith(f"{own}:")
    assert tunables(tuned) == dict(TUNABLES) | {"glibc.malloc.mmap_max": "7", "glibc.cpu.x86_shstk": "off"}


@on_glibc
def test_a_user_who_has_set_them_all_needs_no_restart() -> None:
    env = {"GLIBC_TUNABLES": ":".join(f"{name}=1" for name in TUNABLES)}
    assert not needs_restart(env)
    assert tuned_environment(env)["GLIBC_TUNABLES"] == env["GLIBC_TUNABLES"]


@on_glibc
def test_a_process_restarts_at_most_once_even_if_its_tunables_are_taken_away() -> None:
    tuned = tuned_environment({})
    del tuned["GLIBC_TUNABLES"]
    assert not needs_restart(tuned)


@on_glibc
def test_a_process_that_restarts_itself_as_the_command_line_does_comes_up_tuned() -> None:
    program = (
        "import os, sys\n"
        "from codescent.launch.allocator import needs_restart, tuned_environment\n"
        "print('started', flush=True)\n"
        "if needs_restart(os.environ):\n"
        "    os.execve(sys.executable, sys.orig_argv, tuned_environment(os.environ))\n"
        "print(os.environ['GLIBC_TUNABLES'])\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", allocator.MARKER)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["started", "started", tuned_environment(env)["GLIBC_TUNABLES"]]
    assert done.stderr == ""


@on_glibc
def test_the_heap_keeps_a_freed_block_when_tuned() -> None:
    """The effect itself: the second use of a freed block of 64 MiB takes no page faults."""
    program = (
        "import ctypes, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "libc.malloc.argtypes = [ctypes.c_size_t]\n"
        "libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]\n"
        "def use():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    block = libc.malloc(2**26)\n"
        "    libc.memset(block, 1, 2**26)\n"
        "    libc.free(block)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "use()\n"
        "print(use())\n"
    )

    def faults(env: dict[str, str]) -> int:
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        return int(done.stdout)

    env = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    assert faults(tuned_environment(env)) < 10
    assert faults(env) > 10


@pytest.mark.parametrize("preloaded", ["/usr/lib/libtcmalloc.so.4", "libjemalloc.so.2:libfoo.so", "/x/libmimalloc.so"])
def test_another_allocator_is_left_alone(preloaded: str) -> None:
    env = {"LD_PRELOAD": preloaded}
    assert tuned_environment(env) == env
    assert not needs_restart(env)


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr_names", {})
    assert tuned_environment({"A": "b"}) == {"A": "b"}
    assert not needs_restart({"A": "b"})
    monkeypatch.undo()

    def refuse(name: str) -> str:
        raise OSError(22, name)

    monkeypatch.setattr(os, "confstr", refuse)
    assert not needs_restart({})


# The allocator of CUDA


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_segments_of_cuda_grow_unless_the_user_has_configured_them(name: str) -> None:
    env = {"HOME": "/home/x"}
    grown = with_expandable_segments(env)
    assert grown == {**env, SEGMENTS: EXPANDABLE}
    assert with_expandable_segments(grown) == grown
    assert Group(2).environment(1, 1000, grown)[SEGMENTS] == EXPANDABLE
    own = {name: "max_split_size_mb:128"}
    assert with_expandable_segments(own) == own
    assert with_expandable_segments({name: ""})[SEGMENTS] == EXPANDABLE


def test_a_run_has_them_and_records_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SEGMENTS, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    run = train(project, "segments", "train.num_steps=1", "train.allocator=auto")
    assert run.read_environment()["levers"][SEGMENTS] == EXPANDABLE


# Cores


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "100000000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    unlimited = available_cores(tmp_path / "nothing")
    assert available_cores(tmp_path) == (unlimited if limit is None else min(unlimited, limit))


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is asked for on Linux only")
def test_the_affinity_mask_limits_the_cores() -> None:
    program = (
        "import os; from codescent.base.cores import available_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(available_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_ranks_share_the_cores_and_have_one_thread_at_least() -> None:
    assert [threads_per_rank(8, ranks) for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_huge_pages_are_asked_for_unless_the_user_decides() -> None:
    """Fault: a variable that the user has set is overwritten."""
    assert with_huge_pages({"A": "b"}) == {"A": "b", "THP_MEM_ALLOC_ENABLE": "1"}
    assert with_huge_pages({"THP_MEM_ALLOC_ENABLE": "0"}) == {"THP_MEM_ALLOC_ENABLE": "0"}
