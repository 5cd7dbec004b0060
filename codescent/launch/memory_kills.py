"""In: counters of the kernel, for the cgroup of this process and for the machine. Out: the number of OOM kills.
Does not know which processes were killed: the kernel only counts them (OOM: out of memory)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


@dataclass(frozen=True)
class Kills:
    """A number of OOM kills, and the place where the kernel counts them, in words."""

    count: int
    where: str


def memory_kills() -> dict[Path, Kills]:
    """The readable counters by file: first of the cgroup (v2 or v1), then of the machine."""
    found: dict[Path, Kills] = {}
    for path, limit in _of_cgroup():
        if (count := _count(path)) is not None:
            found[path] = Kills(count, f"in this job's cgroup{_limit(limit)}")
    machine = PROC / "vmstat"
    if (count := _count(machine)) is not None:
        found[machine] = Kills(count, "on this machine")
    return found


def is_suspected(said: str) -> bool:
    """Whether a text of `evidence` says that memory ran out, or that nothing speaks against it."""
    return "out of memory" in said


def evidence(before: dict[Path, Kills]) -> str:
    """Text for a SIGKILL: whether the kernel has killed processes for lack of memory since `before`."""
    if not before:
        return "; perhaps the machine ran out of memory"
    now = memory_kills()
    for path, was in before.items():
        if path in now and (more := now[path].count - was.count) > 0:
            killed = "process" if more == 1 else "processes"
            return f": out of memory: meanwhile the kernel has killed {more} {killed} {now[path].where}"
    return "; the kernel has counted no out-of-memory kill: a user or a program sent it"


def _of_cgroup() -> Iterator[tuple[Path, Path]]:
    """Files of this process's cgroup: its counter of OOM kills and its limit. Also of the root: a container's own."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, counts, limit = CGROUPS, "memory.events", "memory.max"
        elif "memory" in controllers.split(","):
            root, counts, limit = CGROUPS / "memory", "memory.oom_control", "memory.limit_in_bytes"
        else:
            continue
        for folder in (root / path.lstrip("/"), root):
            yield folder / counts, folder / limit


def _count(path: Path) -> int | None:
    try:
        fields = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def _limit(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    limit = int(text) if text.isdigit() else 1 << 62
    return f" (limit {limit / 2**20:,.0f} MiB)" if limit < 1 << 60 else ""
