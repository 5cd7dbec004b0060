"""In: processes, shares of a core. Out: `Shares`: control groups that give each process no more time than its share.
Does not slow a process in another way. Needs root and the kernel's cpu controller, version 1 or 2."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_US = 20_000
"""Time over which the kernel counts: short beside a step, so that a limited process runs evenly."""
MOUNTED = Path("/sys/fs/cgroup")


def controller(mounted: Path = MOUNTED) -> tuple[Path, bool] | None:
    """The folder of the cpu controller, and whether it is of version 2; None: there is none."""
    if (mounted / "cpu" / "cpu.cfs_quota_us").exists() or (mounted / "cpu" / "cgroup.procs").exists():
        return mounted / "cpu", False
    names = mounted / "cgroup.controllers"
    if names.exists() and "cpu" in names.read_text().split():
        return mounted, True
    return None


def missing() -> str:
    """Why this machine cannot limit processes, in words; "" if it can."""
    if os.geteuid() != 0:
        return "shares of a core need root"
    if controller() is None:
        return "the kernel has no cpu controller for control groups"
    try:
        with Shares() as shares:
            shares.group(0, 0.5)
    except OSError as error:
        return f"this kernel or container refuses shares of a core: {error}"
    return ""


class Shares:
    """Limits for processes. Use it in a `with`: its end gives them their whole time again.

    Raises OSError: the kernel refuses.
    """

    def __init__(self) -> None:
        found = controller()
        assert found is not None  # see `missing`
        self._parent, self._second = found
        self._groups: dict[int, Path] = {}

    def __enter__(self) -> Self:
        if self._second:
            (self._parent / "cgroup.subtree_control").write_text("+cpu")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for group in self._groups.values():
            for pid in (group / "cgroup.procs").read_text().split():
                (self._parent / "cgroup.procs").write_text(pid)
            group.rmdir()

    def group(self, number: int, share: float) -> Path:
        """A control group that may use `share` of a core."""
        group = self._groups.get(number)
        if group is None:
            group = self._parent / f"slow{os.getpid()}-{number}"
            group.mkdir()
            self._groups[number] = group
        quota = round(share * PERIOD_US)
        if self._second:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        return group

    def limit(self, pid: int, number: int, share: float) -> None:
        """Move a process with all its threads into group `number`, which has `share` of a core."""
        (self.group(number, share) / "cgroup.procs").write_text(str(pid))
