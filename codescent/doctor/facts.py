"""In: this process and its machine. Out: what a rank knows of itself, as JSON data: place, versions, cores, limits.
Does not reach other machines, judges nothing (judge_host.py does), and does not import torch."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from codescent import __version__
from codescent.base.code_digest import code_digest
from codescent.base.cores import OUR_THREADS, available_cores, memory_bytes
from codescent.base.device_kinds import CUDA
from codescent.base.loopback import missing_loopback
from codescent.base.rank import Rank
from codescent.doctor.device_tools import devices
from codescent.doctor.devices import chosen, visible, visible_by
from codescent.doctor.interfaces import interfaces
from codescent.meeting.interfaces import GLOO, NCCL

SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
BOOT = Path("/proc/sys/kernel/random/boot_id")
CPUSET, CPUSET_1 = "cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"
"""Cores of a control group, of version 2 and 1."""
GIVEN_CORES = ("SLURM_CPUS_ON_NODE", "NCPUS")
"""Variables of SLURM and PBS: the cores of the job on this host."""

ABSENT = "not installed"
"""The version of a package that is not there."""

Facts = Mapping[str, Any]


def facts_of(this_rank: Rank, env: Mapping[str, str], address: str) -> dict[str, Any]:
    """What this rank knows of itself.

    Args:
        this_rank: this process among the ranks.
        env: its environment.
        address: of this machine, from which it reaches the others; "": it is alone.
    """
    found = devices()
    seen = visible(found["all"], env, found["program"])
    device = chosen(seen, this_rank.local_rank)
    return {
        "rank": this_rank.rank,
        "local_rank": this_rank.local_rank,
        "local_world_size": this_rank.local_world_size,
        "host": socket.gethostname(),
        "machine": machine(),
        "address": address,
        "pid": os.getpid(),
        "folder": str(Path.cwd()),
        "versions": versions(),
        "mask": sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [],
        "cores": available_cores(),
        "machine_cores": cores_of_the_job(env),
        "threads": _threads(env),
        "memory_bytes": memory_bytes(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "shm": _shm(),
        "infiniband": INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        "interfaces": interfaces(),
        "no_loopback": missing_loopback(),
        "named_interfaces": {name: env[name] for name in (GLOO, NCCL) if env.get(name)},
        "devices": found,
        "visible": visible_by(env, found["kind"] or CUDA, found["program"]),
        "num_visible": len(seen),
        "device": None if device is None else dict(device),
    }


def machine() -> str:
    """The same text for two processes that share a kernel and its network; another one for each container."""
    try:
        boot = BOOT.read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()


def versions() -> dict[str, str]:
    """What must be the same on all ranks."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "codescent": __version__,
        "code of codescent": code_digest(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


def _threads(env: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, if the user or a launcher of others has set it."""
    text = env.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(text) or None if text.isdigit() and OUR_THREADS not in env else None


def cores_of_the_job(
    env: Mapping[str, str], cgroup: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Cores of the machine, or those that this job was given: a launcher may have bound the rank to fewer."""
    found = os.cpu_count() or 1
    if cpus := _cpuset(cgroup, own):
        found = sum(_length(part) for part in cpus.split(","))
    given = [int(env[name]) for name in GIVEN_CORES if env.get(name, "").isdigit()]
    return max(1, min([found, *given]))


def _cpuset(cgroup: Path, own: Path) -> str:
    """The cores of the control group of this process, or of the nearest one above it; "": it is not limited."""
    try:
        groups = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    paths = [line.split(":", 2)[2].lstrip("/") for line in groups if line.startswith("0::")] or [""]
    folder = cgroup / paths[0]
    for file in (*(one / CPUSET for one in (folder, *folder.parents) if one.is_relative_to(cgroup)), cgroup / CPUSET_1):
        try:
            if text := file.read_text(encoding="ascii").strip():
                return text
        except OSError:
            continue
    return ""


def _length(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1


def _shm() -> dict[str, int] | None:
    """Bytes of /dev/shm, in all and free; None: there is none."""
    try:
        found = os.statvfs(SHM)
    except OSError:
        return None
    return {"bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}


@dataclass(frozen=True)
class Host:
    """A machine, or a container: the ranks that share its network.

    Attributes:
        name: of the host; with its address where two hosts have the same name.
        ranks: those on it, the lowest first.
        facts: of each of its ranks, in the same order.
    """

    name: str
    ranks: tuple[int, ...]
    facts: tuple[Facts, ...]

    @property
    def leader(self) -> int:
        """The lowest rank, which acts for the host."""
        return self.ranks[0]

    @property
    def first(self) -> Facts:
        """The facts of the leader."""
        return self.facts[0]

    @property
    def addresses(self) -> set[str]:
        """All addresses of its interfaces, and that from which it has connected."""
        found = {address for one in self.first["interfaces"] for address in one["addresses"]}
        return found | {self.first["address"]}

    @property
    def mtu(self) -> int | None:
        """MTU of the interface by which it reaches the others."""
        used = (one for one in self.first["interfaces"] if self.first["address"] in one["addresses"])
        return next((one["mtu"] for one in used), None)


def hosts_of(every: Mapping[int, Facts]) -> list[Host]:
    """The hosts of the ranks, in the order of their lowest ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(every):
        ranks.setdefault((every[rank]["machine"], every[rank]["host"]), []).append(rank)
    names = [name for _, name in ranks]
    return [
        Host(
            f"{name} ({every[own[0]]['address']})" if names.count(name) > 1 else name,
            tuple(own),
            tuple(every[rank] for rank in own),
        )
        for (_, name), own in ranks.items()
    ]
