"""In: what each host finds for the names of all hosts. Out: findings: names that are unknown, wrong, loopback or slow.
Does not look names up (names.py does)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.amounts import of_seconds
from codescent.doctor.facts import Host
from codescent.doctor.finding import WARNING, WRONG, Finding, listed

SLOW_S = 2.0


def judge_names(hosts: Sequence[Host], found: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """All findings of names.

    Args:
        hosts: with their facts.
        found: by the leader of a host: what it finds for each name.
    """
    counts = [host.first["host"] for host in hosts]
    named = [host for host in hosts if counts.count(host.first["host"]) == 1]
    for host in hosts:
        answers = found.get(host.leader, {})
        known = {other.name: answers[other.first["host"]] for other in named if other.first["host"] in answers}
        yield from _own(host, known.pop(host.name, None))
        yield from _of_others(host, {other.name: other for other in named}, known)
        slow = max((answer["seconds"] for answer in answers.values()), default=0.0)
        if slow > SLOW_S:
            what = f"a name takes {of_seconds(slow)}"
            mend = "list all hosts in /etc/hosts, or mend /etc/resolv.conf"
            yield Finding(WARNING, "names", (host.name,), what, f"an answer within {of_seconds(SLOW_S)}", mend)


def _own(host: Host, answer: Mapping[str, Any] | None) -> Iterator[Finding]:
    """The own name: torchrun and gloo go by it, where nobody tells them an address."""
    if answer is None:
        return
    name, address = host.first["host"], host.first["address"]
    mend = f"in /etc/hosts: {address} {name}"
    shown = listed(answer["addresses"])
    expected = f"{address}: other launchers go by this name"
    if not answer["addresses"]:
        what = f"its own name {name} is unknown there: {answer['error']}"
        yield Finding(WARNING, "names", (host.name,), what, expected, mend)
    elif all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in answer["addresses"]):
        yield Finding(WARNING, "names", (host.name,), f"its own name {name} means {shown} there", expected, mend)
    elif not host.addresses.intersection(answer["addresses"]):
        what = f"its own name {name} means {shown}, which is no address of it"
        yield Finding(WRONG, "names", (host.name,), what, expected, mend)


def _of_others(host: Host, hosts: Mapping[str, Host], known: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    unknown = [name for name, answer in known.items() if not answer["addresses"]]
    if unknown:
        mend = "list all hosts in /etc/hosts, or let the DNS server know them"
        what = f"the names of other hosts are unknown there: {listed(unknown)}"
        yield Finding(WARNING, "names", (host.name,), what, "an address for each", mend)
    for name, answer in known.items():
        other = hosts[name]
        if answer["addresses"] and not other.addresses.intersection(answer["addresses"]):
            what = f"{other.first['host']} means {listed(answer['addresses'])} there"
            address = other.first["address"]
            mend = f"in /etc/hosts of {host.name}: {address} {other.first['host']}"
            yield Finding(WRONG, "names", (host.name,), what, f"{address}, an address of {name}", mend)
