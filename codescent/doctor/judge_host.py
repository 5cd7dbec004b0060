"""In: what each host knows of itself. Out: findings: versions, cores, limits, interfaces, folders that ranks start in.
Does not look at the network (judge_network.py does) or at devices (judge_devices.py does)."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from codescent.base.amounts import of_bytes
from codescent.base.counted import counted
from codescent.base.loopback import FIX
from codescent.doctor.facts import ABSENT, Facts, Host
from codescent.doctor.finding import WARNING, WRONG, Finding, listed, of_ranks
from codescent.meeting.interfaces import GLOO, unknown_to_gloo

FILES, FILES_OF_A_PEER = 128, 4
"""Open files of a rank by itself, and for each other rank: sockets of several groups."""
SHOWN = 4
"""Most values of hosts in a sentence."""
SHM_BYTES, SHM_BYTES_OF_A_DEVICE = 4 << 20, 64 << 20
"""Shared memory that each rank of a host may need; with a CUDA device NCCL sends through it."""
MEND_VERSIONS: Mapping[str, str] = {
    "python": "start every rank from the same virtual environment (a shared folder, or the same image)",
    "torch": "pip install torch=={wanted}",
    "codescent": "pip install codescent=={wanted}",
    "code of codescent": "install the same sources on every host, and restart what runs the old ones",
}


def judge_hosts(hosts: Sequence[Host], world_size: int) -> Iterator[Finding]:
    """All findings of the hosts themselves."""
    yield from _versions(hosts)
    yield from _same_names(hosts)
    yield from _start_folders(hosts)
    for host in hosts:
        yield from _cores(host)
        yield from _limits(host, world_size)
        yield from _named_interfaces(host)


def common(values: Mapping[str, str]) -> str | None:
    """The value that most hosts have; None: as many hosts have another one, so nobody can say which one is wrong."""
    (value, count), *others = Counter(values.values()).most_common(2)
    return None if others and others[0][1] == count else value


def divided(values: Mapping[str, str]) -> str:
    """Which hosts have which value, where none is that of most hosts."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    parts = [f"{value} on {listed(its)}" for value, its in hosts.items()]
    more = f"; {len(parts) - SHOWN} other values" if len(parts) > SHOWN else ""
    which = "either" if len(parts) == 2 else "any of them"
    return f"{'; '.join(parts[:SHOWN])}{more}; {which} may be the wrong one"


def _versions(hosts: Sequence[Host]) -> Iterator[Finding]:
    names = list(hosts[0].first["versions"])
    differing = [name for name in names if len({one["versions"][name] for host in hosts for one in host.facts}) > 1]
    if "codescent" in differing:  # other versions have other sources
        differing.remove("code of codescent")
    for name in differing:
        of_host = {host.name: "; ".join(dict.fromkeys(one["versions"][name] for one in host.facts)) for host in hosts}
        wanted = common(of_host)
        if wanted is None:
            mend = MEND_VERSIONS[name].format(wanted=next(one for one in of_host.values() if one != ABSENT))
            yield Finding(WRONG, "versions", (*of_host,), f"{name} is {divided(of_host)}", "the same everywhere", mend)
            continue
        others = [host for host, value in of_host.items() if value == wanted]
        for value in dict.fromkeys(value for value in of_host.values() if value != wanted):
            where = tuple(host for host, its in of_host.items() if its == value)
            mend = MEND_VERSIONS[name].format(wanted=wanted)
            yield Finding(WRONG, "versions", where, f"{name} is {value}", f"{wanted}, as on {listed(others)}", mend)
    for host in hosts:
        if host.first["versions"]["torch"] == ABSENT:
            yield Finding(WRONG, "versions", (host.name,), "torch is not installed", "torch", "pip install torch")


def _same_names(hosts: Sequence[Host]) -> Iterator[Finding]:
    counts = Counter(host.first["host"] for host in hosts)
    for name, count in counts.items():
        if count > 1:
            where = tuple(host.name for host in hosts if host.first["host"] == name)
            what = f"{counted(count, 'host')} have the name {name}"
            yield Finding(WARNING, "names", where, what, "a name of its own for each host", "hostnamectl hostname NAME")


def _start_folders(hosts: Sequence[Host]) -> Iterator[Finding]:
    of_host = {host.name: host.first["folder"] for host in hosts}
    wanted = common(of_host)
    mend = f"cd {wanted or hosts[0].first['folder']} before the command, on every host"
    if wanted is None:
        what = f"ranks start in {divided(of_host)}"
        yield Finding(WARNING, "folders", (*of_host,), what, "the same folder everywhere", mend)
        return
    for host, folder in of_host.items():
        if folder != wanted:
            yield Finding(WARNING, "folders", (host,), f"ranks start in {folder}", wanted, mend)


def _cores(host: Host) -> Iterator[Finding]:
    """Ranks that share cores, or are bound to fewer than they could have."""
    masks: dict[tuple[int, ...], list[Facts]] = {}
    for one in host.facts:
        masks.setdefault(tuple(one["mask"]), []).append(one)
    union = {core for mask in masks for core in mask}
    machine_cores = max(host.first["machine_cores"], len(union))
    fair = max(1, machine_cores // len(host.ranks))
    mend = (
        f"give each rank {counted(fair, 'core')} of its own: srun --cpus-per-task={fair} --cpu-bind=cores, mpirun "
        f"--map-by slot:PE={fair} --bind-to core, or no binding: mpirun --bind-to none, srun --cpu-bind=none"
    )
    if len(host.ranks) > machine_cores:
        what = f"{counted(len(host.ranks), 'rank')} share {counted(machine_cores, 'core')}"
        few = f"start at most {counted(machine_cores, 'rank')} on this host"
        yield Finding(WARNING, "cores", (host.name,), what, "a core for each rank", few, host.ranks)
        return
    for mask, own in masks.items():
        ranks = tuple(one["rank"] for one in own)
        cores = min(len(mask), own[0]["cores"])
        threads = [one["threads"] or max(1, cores // len(own)) for one in own]
        if sum(threads) > cores > 0:
            shared = (
                f"{of_ranks(ranks)}: {counted(sum(threads), 'thread')} on core{'s' * (len(mask) > 1)} {listed(mask)}"
            )
            more = f"OMP_NUM_THREADS={max(1, cores // len(own))}" if len(own) <= cores else mend
            yield Finding(WARNING, "cores", (host.name,), shared, "a core for each thread", more, ranks)
        elif len(mask) == 1 and machine_cores >= 2 * len(host.ranks):
            what = f"{of_ranks(ranks)}: bound to core {mask[0]} of {machine_cores}"
            yield Finding(WARNING, "cores", (host.name,), what, f"{counted(fair, 'core')} for each rank", mend, ranks)
    for first, second in ((one, other) for one in masks for other in masks if one < other):
        if both := sorted({*first} & {*second}):
            ranks = tuple(one["rank"] for mask in (first, second) for one in masks[mask])
            what = f"{of_ranks(ranks)}: bound to different cores, but share {listed(both)}"
            yield Finding(WARNING, "cores", (host.name,), what, "cores of its own for each rank", mend, ranks)


def _limits(host: Host, world_size: int) -> Iterator[Finding]:
    where = (host.name,)
    soft, hard = host.first["files"]
    need = FILES + FILES_OF_A_PEER * world_size
    if 0 <= soft < need:
        by_root = f"nofile {need} in /etc/security/limits.conf (the hard limit is {hard})"
        mend = f"ulimit -n {need}" if hard < 0 or hard >= need else by_root
        yield Finding(WRONG, "limits", where, f"at most {soft} open files", f"at least {need}", mend)
    locked = host.first["memlock"][0]
    if host.first["infiniband"] and locked != resource.RLIM_INFINITY:
        what = f"at most {of_bytes(locked)} of locked memory"
        mend = "ulimit -l unlimited; under SLURM in the unit of slurmd: LimitMEMLOCK=infinity"
        yield Finding(WARNING, "limits", where, what, "no limit: InfiniBand locks its buffers", mend)
    shm, ranks = host.first["shm"], len(host.ranks)
    uses_devices = any(one["device"] for one in host.facts)
    need = ranks * (SHM_BYTES_OF_A_DEVICE if uses_devices else SHM_BYTES)
    if shm is not None and ranks > 1 and shm["free_bytes"] < need:
        what = f"/dev/shm has {of_bytes(shm['free_bytes'])} free of {of_bytes(shm['bytes'])}"
        mend = (
            "remove what fills it (ls -l /dev/shm), or docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        )
        severity = WRONG if shm["free_bytes"] < ranks << 20 else WARNING
        yield Finding(severity, "limits", where, what, f"{of_bytes(need)} for {counted(ranks, 'rank')}", mend)


def _named_interfaces(host: Host) -> Iterator[Finding]:
    if why := host.first.get("no_loopback"):  # a rank of another release does not say it
        yield Finding(WRONG, "interfaces", (host.name,), why, "one: ranks of one machine meet there", FIX)
    there = [one["name"] for one in host.first["interfaces"] if one["addresses"]]
    for name, value in host.first["named_interfaces"].items():
        if _is_there(name, value, there):
            continue
        outside = [one for one in there if one != "lo"]
        mend = f"export {name}={outside[0]}" if outside else f"unset {name}"
        yield Finding(WRONG, "interfaces", (host.name,), f"{name}={value} is no interface here", listed(there), mend)


def _is_there(variable: str, value: str, there: Sequence[str]) -> bool:
    """Whether the variable leaves an interface to use. NCCL takes the beginning of a name, after "=" the whole name,
    after "^" all others."""
    if variable == GLOO:
        return not unknown_to_gloo(value, there)
    wanted = [part.strip() for part in value.removeprefix("=").split(",") if part.strip()]
    if value.startswith("="):
        return any(part in there for part in wanted)
    return value.startswith("^") or any(one.startswith(part) for one in there for part in wanted)
