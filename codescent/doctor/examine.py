"""In: this process among the ranks, what is wanted. Out: on rank 0 the report of all checks, in their order.
Does not judge (judge_*.py do) and does not print (report.py does)."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.base.token import key_of
from codescent.doctor.facts import Host, facts_of, hosts_of
from codescent.doctor.finding import WARNING, WRONG, Finding, listed, of_ranks
from codescent.doctor.hub import Hub, serve
from codescent.doctor.judge_devices import judge_devices
from codescent.doctor.judge_folders import judge_folder, judge_processes
from codescent.doctor.judge_host import judge_hosts
from codescent.doctor.judge_memory import judge_memory
from codescent.doctor.judge_names import judge_names
from codescent.doctor.judge_network import Pair
from codescent.doctor.meeting import gather, join
from codescent.doctor.network import PairMeasurements, look_at_network
from codescent.doctor.processes import listener
from codescent.doctor.report import Report
from codescent.doctor.roll import Gathered
from codescent.doctor.tasks import Tasks
from codescent.doctor.wanted import Wanted


def examine(this_rank: Rank, env: Mapping[str, str], wanted: Wanted) -> Report | None:
    """Run all checks. Returns the report on rank 0, None on the others. Collective.

    Raises:
        UserError: this rank cannot listen, cannot reach rank 0, or has lost it before the end.
    """
    key = _key(this_rank, env)
    mine = facts_of(this_rank, env, "")
    if this_rank.rank:
        with (
            closing(join(this_rank, key, mine, wanted.wait_s)) as store,
            closing(Tasks(store.address(), key, store)) as tasks,
        ):
            ended = serve(store, this_rank.rank, tasks)
        if not ended:
            raise UserError(f"rank {this_rank.rank} on {socket.gethostname()}: rank 0 has gone before the checks ended")
        return None
    alone = Gathered(LOOPBACK, 0, facts={0: mine | {"address": _own_address(mine)}})
    found = alone if this_rank.world_size == 1 else gather(this_rank, key, mine, wanted.wait_s, wanted.listen)
    begin_s = time.monotonic()
    with closing(found), closing(Tasks(found.address, key, found.meeting.store)) as tasks:
        hub = Hub(found, tasks)
        try:
            return _report(this_rank, found, hub, wanted, begin_s)
        finally:
            hub.end()


def dismiss(this_rank: Rank, env: Mapping[str, str], wait_s: float) -> None:
    """Rank 0, which has an error of its own: let the other ranks come, and end without one. They would wait for it."""
    # Where it cannot listen, the error of its own is told.
    with suppress(UserError), closing(gather(this_rank, _key(this_rank, env), {}, wait_s)) as found:
        Hub(found, lambda _: None).end()


def _key(this_rank: Rank, env: Mapping[str, str]) -> bytes:
    return key_of(env, f"doctor {this_rank.job}")


def _own_address(facts: Mapping[str, Any]) -> str:
    """An address of this machine that is not loopback, where it has one."""
    every = [address for one in facts["interfaces"] if one["name"] != "lo" for address in one["addresses"]]
    return next(iter(every), LOOPBACK)


def _report(this_rank: Rank, found: Gathered, hub: Hub, wanted: Wanted, begin_s: float) -> Report:
    hosts = hosts_of(found.facts)
    findings = [*wanted.problems, *_came(this_rank, found, hosts), *judge_hosts(hosts, this_rank.world_size)]
    measured, notes = PairMeasurements(), [*wanted.notes]
    seen = hub.ask({host.leader: {"do": "processes", "pids": [one["pid"] for one in host.facts]} for host in hosts})
    findings += judge_processes(hosts, {rank: one["left"] for rank, one in seen.items()}, wanted.mark or None)
    findings += judge_memory(hosts, wanted)
    findings += judge_devices(hosts, wanted.device, {rank: one["on_devices"] for rank, one in seen.items()})
    findings += _folders(hosts, hub, wanted)
    if len(hosts) > 1:
        names = list(dict.fromkeys(host.first["host"] for host in hosts))
        findings += judge_names(hosts, hub.ask({host.leader: {"do": "names", "names": names} for host in hosts}))
        network = look_at_network(hosts, hub, wanted)
        findings += network.findings
        measured, notes = network.measured, [*notes, *network.notes]
    findings += _unanswered(hosts, hub)
    order = {WRONG: 0, WARNING: 1}
    findings.sort(key=lambda one: order[one.severity])
    seconds = time.monotonic() - begin_s
    return Report(this_rank.world_size, hosts, findings, measured, notes, seconds, f"{found.address}:{found.port}")


def _unanswered(hosts: list[Host], hub: Hub) -> Iterator[Finding]:
    """Ranks that were lost meanwhile, and checks that a host could not do."""
    names = {rank: host.name for host in hosts for rank in host.ranks}
    for rank, why in hub.lost.items():
        mend = "look at that host: its process, its link (ping), its log"
        yield Finding(WRONG, "ranks", (names[rank],), f"rank {rank} was lost: {why}", "an answer", mend, (rank,))
    for rank, what, why in dict.fromkeys(hub.failed):
        mend = f"mend what it says; the check needs it: {why}"
        yield Finding(WARNING, "ranks", (names[rank],), f'the check "{what}" failed: {why}', "an answer", mend, (rank,))


def _came(this_rank: Rank, found: Gathered, hosts: list[Host]) -> Iterator[Finding]:
    """Ranks that have not come, or came twice; strangers; a port that is taken."""
    first = (hosts[0].name,)
    missing = sorted({*range(this_rank.world_size)} - found.facts.keys())
    if missing:
        came = f"{counted(len(found.facts), 'rank')} of {this_rank.world_size} came, on {listed(h.name for h in hosts)}"
        mend = f"look at their own messages; they must reach {found.address}, port {found.port}"
        what = f"{of_ranks(missing)} did not come: {came}"
        yield Finding(WRONG, "ranks", first, what, "all ranks", mend, tuple(missing))
    for rank, address, why in sorted(found.surplus):
        what = f"a process at {address} says that it is rank {rank}, which {why}"
        mend = "start each rank once, with one launcher; do not set RANK and WORLD_SIZE by hand"
        yield Finding(WRONG, "ranks", (address,), what, "each rank once", mend, (rank,))
    addresses = [*dict.fromkeys(found.rejected)]
    if missing and addresses:  # where all ranks came, a stranger knocked: the run does not need its token
        what = f"a process at {listed(addresses)} did not know the token of this run"
        mend = "export CODESCENT_TOKEN, the same text on every host, or copy ~/.codescent/token to all of them"
        yield Finding(WRONG, "token", tuple(addresses), what, "the same token on every host", mend)
    if found.taken:
        who = listener(this_rank.master_port) or "a process of another user"
        mend = "end it, or export MASTER_PORT=N with a free port, for every rank"
        yield Finding(WRONG, "port", first, f"{found.taken} is taken by {who}", "a free port for rank 0", mend)


def _folders(hosts: list[Host], hub: Hub, wanted: Wanted) -> Iterator[Finding]:
    """Write a file on each host, look from each host for the others' files, remove them."""
    for what, path, key, shared, ready in (
        ("run folder", wanted.run_folder, "run.folder", True, ""),
        ("data folder", wanted.data_folder, "data.folder", False, wanted.data_ready),
    ):
        if not path:
            continue
        nonce = secrets.token_hex(8)
        name = {host.leader: f".codescent-doctor-{nonce}-{host.leader}" for host in hosts}
        request = {"do": "look", "path": path, "ready": ready}
        looks = hub.ask({rank: {**request, "name": file, "text": f"{nonce} {rank}"} for rank, file in name.items()})
        try:
            unseen = list(_unseen(hosts, hub, looks, name, nonce)) if shared else []
        finally:
            hub.ask({rank: {"do": "remove", "file": look["written"]} for rank, look in looks.items()})
        of_host = {host.name: looks[host.leader] for host in hosts if host.leader in looks}
        yield from judge_folder(what, of_host, unseen, wanted.checkpoint_bytes if shared else None, key)


def _unseen(
    hosts: list[Host], hub: Hub, looks: Mapping[int, Mapping[str, Any]], name: Mapping[int, str], nonce: str
) -> Iterator[Pair]:
    """Pairs of hosts: the first does not see what the second has written."""
    written = {rank for rank, look in looks.items() if look["written"] and not look["error"]}
    texts = {rank: {name[other]: f"{nonce} {other}" for other in written - {rank}} for rank in looks}
    seen = hub.ask(
        {rank: {"do": "seen", "folder": look["exists"], "texts": texts[rank]} for rank, look in looks.items()}
    )
    names = {host.leader: host.name for host in hosts}
    for rank, found in seen.items():
        for other in sorted(written - {rank}):
            if name[other] not in found:
                yield names[rank], names[other]
