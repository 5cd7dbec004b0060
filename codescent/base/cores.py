"""In: the machine, the CPU affinity mask and the cgroup of this process. Out: CPU cores it may use, threads per rank,
memory. Does not set the number of threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from codescent.base.errors import UserError

CGROUP = Path("/sys/fs/cgroup")

OUR_THREADS = "CODESCENT_THREADS"
"""Set by our launcher if it has set OMP_NUM_THREADS, so that a rank knows that the user has not."""


PROCESS_BYTES = 64 << 20
"""Smallest memory of a rank before its model is allocated, and of a thread that tokenises: two chunks and their ids."""


def available_cores(cgroup: Path = CGROUP) -> int:
    """Number of cores that this process may use, at least 1: its affinity mask, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _quota_cores(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Threads for each of `ranks` processes that share `cores` cores, at least 1."""
    return max(1, cores // ranks)


def memory_bytes(cgroup: Path = CGROUP) -> int:
    """Physical memory, or the memory limit of this process's control group if it is smaller."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup / "memory.max"
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return min(physical_bytes, int(text)) if text.isdecimal() else physical_bytes


def most_processes() -> int:
    """For how many processes the memory of this machine has room; each needs PROCESS_BYTES or more."""
    return max(1, memory_bytes() // PROCESS_BYTES)


def refuse_more_ranks(given: str, ranks: int) -> None:
    """Raise UserError: this machine has no room for so many ranks. `given`: who says how many, such as "--ranks 9"."""
    if ranks > (most := most_processes()):
        raise UserError(
            f"{given}: each rank is a process on this machine, whose memory has room for {most} ranks; give at most "
            f"{most}"
        )


def _quota_cores(cgroup: Path) -> float | None:
    """The CPU limit of the cgroup (version 2, else 1), in cores; None: no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        except OSError:
            return None
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", or -1
        return None
    return int(quota) / int(period)
