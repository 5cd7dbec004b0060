"""In: what each host knows of itself, what the ranks of a run hold. Out: findings: hosts and devices without room.
Does not count what a rank holds (cost/stage_memory.py does) and does not ask a device (devices.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_bytes
from codescent.base.counted import counted
from codescent.doctor.facts import Host
from codescent.doctor.finding import WRONG, Finding, of_ranks
from codescent.doctor.wanted import Wanted

MIB = 2**20
"""nvidia-smi counts the memory of a device in it."""
DIVIDE = "divide the model over more ranks (parallel.dp_shard, tp, pp); codescent plan CONFIG says what a rank holds"


def judge_memory(hosts: Sequence[Host], wanted: Wanted) -> Iterator[Finding]:
    """All findings of memory. Without a config nothing is known of what ranks hold."""
    for host in hosts:
        on_devices = wanted.device != "cpu" and all(one["device"] for one in host.facts)
        yield from _host(host, wanted.host_bytes if on_devices else wanted.state_bytes, on_devices=on_devices)
        if on_devices:
            yield from _devices(host, wanted.device_bytes)


def _host(host: Host, each_bytes: float, *, on_devices: bool) -> Iterator[Finding]:
    """The ranks of a host share its memory."""
    needed, there = each_bytes * len(host.ranks), host.first["memory_bytes"]
    if needed > there:
        what = "what is offloaded" if on_devices else "weights, gradients and optimizer state"
        said = f"{of_bytes(there)} for {counted(len(host.ranks), 'rank')}"
        yield Finding(WRONG, "memory", (host.name,), said, f"{of_bytes(needed)}: {what}", DIVIDE, host.ranks)


def _devices(host: Host, least_bytes: float) -> Iterator[Finding]:
    """A part of a device (MIG) does not say how large it is."""
    sizes = {one["rank"]: one["device"].get("memory.total", "") for one in host.facts}
    small = {
        rank: int(size) * MIB for rank, size in sizes.items() if size.isdecimal() and int(size) * MIB < least_bytes
    }
    if small:
        what = f"{of_ranks(tuple(small))}: a device of {of_bytes(min(small.values()))}"
        expected = f"{of_bytes(least_bytes)}, the least that a step needs"
        yield Finding(WRONG, "memory", (host.name,), what, expected, DIVIDE, tuple(small))
