"""In: the devices that each rank sees, the device that a run wants. Out: findings: ranks without a device, two
ranks on one device, others on it, different devices. Does not ask a device (device_tools.py asks programs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.counted import counted
from codescent.base.device_kinds import CPU, GPUS
from codescent.doctor.devices import label_of
from codescent.doctor.facts import Host
from codescent.doctor.finding import WARNING, WRONG, Finding, listed, of_ranks
from codescent.doctor.judge_host import common, divided


def judge_devices(
    hosts: Sequence[Host], wanted: str, others: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Iterator[Finding]:
    """All findings of devices.

    Args:
        hosts: with their facts.
        wanted: train.device.
        others: by the leader of a host: processes with memory on a device that are no ranks.
    """
    if wanted == CPU:
        return
    have = [host.name for host in hosts if any(one["device"] for one in host.facts)]
    for host in hosts:
        yield from _broken(host)
        yield from _missing(host, have, wanted)
        yield from _shared(host)
        yield from _used(host, others.get(host.leader, ()))
    for field, what in (("name", "the devices are"), ("driver_version", "the driver of the devices is")):
        yield from _different(hosts, field, what)


def _broken(host: Host) -> Iterator[Finding]:
    if problem := host.first["devices"]["problem"]:
        mend = f"{host.first['devices']['program']}; then dmesg | tail"
        yield Finding(WARNING, "devices", (host.name,), problem, "the list of devices", mend)


def _missing(host: Host, have: Sequence[str], wanted: str) -> Iterator[Finding]:
    without = tuple(one["rank"] for one in host.facts if one["device"] is None)
    if not without or not (have or wanted in GPUS):
        return
    first = next(one for one in host.facts if one["device"] is None)
    label = label_of(first["devices"]["kind"] or wanted)
    seen = f"{counted(first['num_visible'], label)} of {len(first['devices']['all'])}"
    told = f" ({first['visible']})" if first["visible"] else ""
    what = f"{of_ranks(without)}: {'sees' if len(without) == 1 else 'see'} {seen}{told}"
    expected = f"a device for each of {counted(first['local_world_size'], 'local rank')}"
    mend = "ask for as many devices as ranks on each host (srun --gpus-per-node=N), or train.device=cpu"
    yield Finding(WRONG, "devices", (host.name,), what, expected, mend, without)


def _shared(host: Host) -> Iterator[Finding]:
    ranks: dict[str, list[int]] = {}
    for one in host.facts:
        if one["device"]:
            ranks.setdefault(one["device"]["uuid"], []).append(one["rank"])
    for uuid, own in ranks.items():
        if len(own) > 1:
            ranks_here = [one for one in host.facts if one["rank"] in own]
            told = listed(dict.fromkeys(one["visible"] or "no variable says which" for one in ranks_here))
            what = f"{of_ranks(own)}: all on device {uuid} ({told})"
            named = next((one["visible"].partition("=")[0] for one in ranks_here if one["visible"]), "")
            unset = f"unset {named}, so that each rank takes the device of its local rank; or " if named else ""
            mend = f"{unset}start fewer ranks"
            yield Finding(WRONG, "devices", (host.name,), what, "one rank on each device", mend, tuple(own))


def _used(host: Host, others: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    own = {one["device"]["uuid"] for one in host.facts if one["device"]}
    for one in others:
        if one["gpu_uuid"] in own:
            who = one["command"] or "of another container or user"
            what = f"process {one['pid']} ({who}) holds {one['used_memory']} MiB"
            mend = f"end it, if it is yours: kill {one['pid']}; else take another device"
            yield Finding(
                WARNING, "devices", (host.name,), f"{what} of a device", "devices that nobody else uses", mend
            )


def _different(hosts: Sequence[Host], field: str, what: str) -> Iterator[Finding]:
    of_host = {
        host.name: listed(dict.fromkeys(one["device"].get(field, "") for one in host.facts if one["device"]))
        for host in hosts
    }
    of_host = {host: value for host, value in of_host.items() if value}
    if len(set(of_host.values())) > 1:
        wanted = common(of_host)
        mend = "take hosts with the same devices and driver, or expect the speed of the slowest"
        if wanted is None:
            yield Finding(WARNING, "devices", (*of_host,), f"{what} {divided(of_host)}", "the same everywhere", mend)
            return
        for host, value in of_host.items():
            if value != wanted:
                yield Finding(WARNING, "devices", (host,), f"{what} {value}", wanted, mend)
