"""In: what pairs of hosts have measured. Out: findings: pairs that are not reached, packets that do not pass, clocks,
slow links and the host to blame. Does not measure (pairs.py does)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from codescent.base.amounts import of_rate, of_seconds, of_share
from codescent.doctor.facts import Host
from codescent.doctor.finding import WARNING, WRONG, Finding, listed
from codescent.doctor.judge_host import common, divided
from codescent.doctor.mtu import MOST

Pair = tuple[str, str]
"""From a host to a host, by name."""
Hosts = tuple[str, ...]
"""Names: of one host, or of two of which either may be the cause."""
CLOCK_S = 1.0
SLOW_SHARE = 0.4
"""A link is slow below this share of what is usual among the others."""
LATE_TIMES, LATE_S = 5.0, 1e-3
"""A latency is long if it is that many times the usual one, and that much longer."""
TIMEOUT_SHARE = 0.5
LINK_SHARE = 0.7
"""A link is below its declared rate if it reaches less than this share of it."""
MEND_LINK = "its cable, port and speed (ethtool INTERFACE), other traffic, the interface of the ranks (ip route get)"


def blamed(pairs: Collection[Pair]) -> list[tuple[Hosts, list[Pair]]]:
    """The hosts that explain the pairs: first the one with most of them, with its pairs, then that of the rest.

    Of as many pairs, a host to which they lead comes before one from which they come. Where two hosts explain the same
    pairs, as always with two hosts, nobody can say which one it is: both are named.
    """
    left, found = list(pairs), list[tuple[Hosts, list[Pair]]]()
    while left:
        counts = Counter(host for pair in left for host in pair)
        into = Counter(host for _, host in left)
        host = max(counts, key=lambda name: (counts[name], into[name]))
        own = [pair for pair in left if host in pair]
        where = tuple(dict.fromkeys(other for pair in own for other in pair))
        found.append((where if len(where) == 2 and counts[where[0]] == counts[where[1]] else (host,), own))
        left = [pair for pair in left if host not in pair]
    return found


def either(where: Hosts) -> str:
    """What a sentence about the hosts of `blamed` says at its end, where there are two."""
    return "; either host may be the cause" if len(where) > 1 else ""


def judge_reach(errors: Mapping[Pair, str]) -> Iterator[Finding]:
    """Pairs whose connection fails."""
    for where, pairs in blamed(errors):
        what = f"{_reach(where, pairs)} by TCP: {errors[pairs[0]]}{either(where)}"
        mend = "let TCP through between all hosts, on ports above 1023 (nft list ruleset, iptables -S, security groups)"
        yield Finding(WRONG, "ports", where, what, "a connection between every two hosts", mend)


def _reach(where: Hosts, pairs: Sequence[Pair]) -> str:
    """Which host does not reach which."""
    if len(where) == 2:
        return " and ".join(f"{first} does not reach {second}" for first, second in pairs)
    sources = [first for first, second in pairs if second == where[0]]
    targets = [second for first, second in pairs if first == where[0]]
    parts = [f"is not reached from {listed(sources)}"] if sources else []
    return " and ".join([*parts, *([f"does not reach {listed(targets)}"] if targets else [])])


def judge_mtu(hosts: Sequence[Host], paths: Mapping[Pair, int]) -> Iterator[Finding]:
    """Interfaces that differ, and packets of the own size that do not arrive."""
    yield from _interfaces(hosts, {host.name: str(host.mtu) for host in hosts if host.mtu is not None})
    own = {host.name: host.mtu for host in hosts}
    short = {pair: mtu for pair, mtu in paths.items() if mtu < min(own[pair[0]] or 0, own[pair[1]] or 0, MOST)}
    for where, pairs in blamed(short):
        least, (source, target) = min((short[pair], pair) for pair in pairs)
        size = min(own[source] or 0, MOST)
        what = f"packets of {size} bytes from {source} do not reach {target}; {least} bytes do{either(where)}"
        mend = f"the same MTU on hosts and switches; until then ip link set dev INTERFACE mtu {least} on every host"
        yield Finding(WRONG, "mtu", where, what, "packets as large as the MTU of the interface", mend)


def _interfaces(hosts: Sequence[Host], of_host: Mapping[str, str]) -> Iterator[Finding]:
    """Those whose MTU is not that of most hosts. `of_host`: the MTU by host."""
    wanted = common(of_host) if of_host else ""
    if wanted is None:
        least = min(map(int, of_host.values()))
        mend = f"the same MTU on all hosts, such as the least: ip link set dev INTERFACE mtu {least}"
        yield Finding(WARNING, "mtu", (*of_host,), f"the MTU is {divided(of_host)}", "the same everywhere", mend)
        return
    for host, mtu in of_host.items():
        if mtu != wanted:
            name = next(one.first for one in hosts if one.name == host)
            device = next(one["name"] for one in name["interfaces"] if name["address"] in one["addresses"])
            what = f"the MTU of {device} is {mtu}"
            mend = f"ip link set dev {device} mtu {wanted}"
            yield Finding(WARNING, "mtu", (host,), what, f"{wanted}, as on the other hosts", mend)


def judge_clocks(ahead: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Clocks that differ: from that of most hosts.

    Args:
        ahead: by host: seconds ahead of the host of rank 0, and their uncertainty.
    """
    if len(ahead) < 2:
        return
    usual = statistics.median_low(seconds for seconds, _ in ahead.values())
    expected, mend = f"clocks within {of_seconds(CLOCK_S)}", "timedatectl set-ntp true, or chronyc makestep"
    wrong = {
        host: seconds - usual
        for host, (seconds, uncertain_s) in ahead.items()
        if abs(seconds - usual) - uncertain_s > CLOCK_S
    }
    if 2 * len(wrong) >= len(ahead):  # the others are not most hosts
        first, *_, second = sorted(ahead, key=lambda host: ahead[host][0])
        differs = ahead[second][0] - ahead[first][0]
        what = f"the clock of {second} is {of_seconds(differs)} ahead of that of {first}; either may be the wrong one"
        yield Finding(WARNING, "clocks", tuple(ahead), what, expected, f"{mend}, on all")
        return
    for host, differs in wrong.items():
        what = f"its clock is {of_seconds(abs(differs))} {'ahead' if differs > 0 else 'behind'}"
        yield Finding(WARNING, "clocks", (host,), what, expected, mend)


def slow_pairs(rates: Mapping[Pair, float]) -> list[Pair]:
    """Pairs that are slow beside what is usual between the other hosts."""
    return [pair for pair in rates if rates[pair] < SLOW_SHARE * _usual(rates, pair)]


def late_pairs(latencies: Mapping[Pair, float]) -> list[Pair]:
    """Pairs whose latency is long beside what is usual between the other hosts."""
    return [
        pair
        for pair, latency_s in latencies.items()
        if latency_s > LATE_TIMES * (usual := _usual(latencies, pair)) and latency_s - usual > LATE_S
    ]


def _usual(values: Mapping[Pair, float], pair: Pair) -> float:
    """The median of the pairs without one of these hosts; with fewer hosts that of all others."""
    apart = [value for other, value in values.items() if not {*other} & {*pair}]
    rest = apart or [value for other, value in values.items() if other != pair]
    return statistics.median(rest) if rest else values[pair]


def judge_rates(rates: Mapping[Pair, float], slow: Collection[Pair]) -> Iterator[Finding]:
    """The hosts of slow pairs. `slow`: those that were slow when they were measured again, alone."""
    for where, pairs in blamed(slow):
        pair = min(pairs, key=lambda one: rates[one])
        usual = _usual({one: rate for one, rate in rates.items() if one == pair or one not in slow}, pair)
        what = f"{of_rate(rates[pair], 'B/s')} from {pair[0]} to {pair[1]}{either(where)}"
        yield Finding(WARNING, "bandwidth", where, what, f"{of_rate(usual, 'B/s')}, as between the others", MEND_LINK)


def judge_latencies(latencies: Mapping[Pair, float], late: Collection[Pair]) -> Iterator[Finding]:
    """The hosts of pairs with a long latency."""
    for where, pairs in blamed(late):
        pair = max(pairs, key=lambda one: latencies[one])
        usual = _usual({one: seconds for one, seconds in latencies.items() if one == pair or one not in late}, pair)
        what = f"{of_seconds(latencies[pair])} from {pair[0]} to {pair[1]}{either(where)}"
        mend = "the way of its packets (ip route get, traceroute), and what else the host does (uptime)"
        yield Finding(WARNING, "latency", where, what, f"{of_seconds(usual)}, as between the others", mend)


def judge_link(rates: Mapping[Pair, float], declared: Mapping[str, float]) -> Iterator[Finding]:
    """Hosts that send or receive less than --link says. `declared`: bytes per second by host."""
    for host, wanted in declared.items():
        own = [
            (rate, pair)
            for pair, rate in rates.items()
            if host in pair and wanted == min(declared[one] for one in pair)
        ]
        if own and (best := max(own)[0]) < LINK_SHARE * wanted:
            what = f"at most {of_rate(best, 'B/s')}, {of_share(best / wanted)} of its link"
            mend = "give --link the rate that is there, or look at card, cable and switch (ethtool INTERFACE)"
            yield Finding(WARNING, "bandwidth", (host,), what, f"{of_rate(wanted, 'B/s')}, as --link says", mend)


def judge_timeout(rates: Mapping[Pair, float], message_bytes: float, what: str, timeout_s: float) -> Iterator[Finding]:
    """Whether every link carries the largest message of a run in time. A rate may be 0: nothing has arrived."""
    late = [pair for pair, rate in rates.items() if message_bytes > TIMEOUT_SHARE * timeout_s * rate]
    if not late:
        return
    hosts = tuple(dict.fromkeys(host for where, _ in blamed(late) for host in where))
    pair = min(late, key=lambda one: rates[one])
    seconds = message_bytes / rates[pair] if rates[pair] else math.inf
    text, mend = f"{what}: nothing has arrived from {pair[0]} at {pair[1]} when bandwidth was measured", MEND_LINK
    if math.isfinite(seconds):
        text = f"{what}: {of_seconds(seconds)} from {pair[0]} to {pair[1]}"
        mend = f"parallel.timeout_s={max(60, round(4 * seconds))}, or a smaller parallel.bucket_bytes"
    severity = WRONG if seconds > timeout_s else WARNING
    yield Finding(severity, "timeouts", hosts, text, f"well below parallel.timeout_s = {timeout_s:g}", mend)
