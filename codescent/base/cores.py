"""In: the affinity mask and the cgroup of this process. Out: how many cores it may use, and threads per rank.
Does not set anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use, at least 1: those of its affinity mask, or fewer by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _quota_cores(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Threads of each of `ranks` processes that share `cores`: more would only wait for one another."""
    return max(1, cores // ranks)


def _quota_cores(cgroup: Path) -> float | None:
    """CPU time per time, as the container's cgroup (version 2, else 1) limits it; None: no limit."""
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
