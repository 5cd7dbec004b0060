"""In: hosts with several ranks, rank 0's connections. Out: what pairs of hosts measure, and findings of the network.
Does not measure itself: leaders do (pairs.py, mtu.py). A suspicion is measured again, alone, before it is a finding."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from codescent.base.counted import counted
from codescent.doctor import judge_network as judge
from codescent.doctor.facts import Host
from codescent.doctor.finding import Finding, listed
from codescent.doctor.hub import Hub
from codescent.doctor.judge_network import Pair
from codescent.doctor.wanted import Wanted

VOLLEY_S, ALONE_S = 0.3, 0.6
CLOCK_ANSWER_S = 10.0
"""A rank that has not measured its clock by then is lost."""
MOST_ROUNDS = 15
"""With more hosts than that each one measures its bandwidth to so many others."""
MOST_AGAIN = 24
BUSY_CORES = 1.0
"""A volley wants about 3 cores where cores limit it, and at most a fifth of one where the link does."""


@dataclass
class PairMeasurements:
    """What pairs of hosts have measured, by the names of both.

    Attributes:
        latencies: half of the shortest round trip, in seconds.
        rates: bytes per second that have arrived.
        mtus: the largest packet that passes.
    """

    latencies: dict[Pair, float] = field(default_factory=dict)
    rates: dict[Pair, float] = field(default_factory=dict)
    mtus: dict[Pair, int] = field(default_factory=dict)


@dataclass
class NetworkCheck:
    """What was measured, the findings, and what could not be measured."""

    measured: PairMeasurements
    findings: list[Finding]
    notes: list[str]


def look_at_network(hosts: Sequence[Host], hub: Hub, wanted: Wanted) -> NetworkCheck:
    """All measurements between hosts."""
    survey = _NetworkSurvey(hosts, hub)
    survey.ping()
    survey.path_mtus()
    clocks = hub.ask({host.leader: {"do": "clock"} for host in hosts}, CLOCK_ANSWER_S)
    ahead = {host.name: clocks[host.leader] for host in hosts if host.leader in clocks}
    measured = survey.measured
    late = survey.late_again()
    findings = [
        *judge.judge_reach(survey.errors),
        *judge.judge_mtu(hosts, measured.mtus),
        *judge.judge_clocks(ahead),
        *judge.judge_latencies(measured.latencies, late),
    ]
    if wanted.bandwidth:
        survey.volleys()
        findings += judge.judge_rates(measured.rates, survey.slow_again())
        if wanted.machines is not None:
            declared = {host.name: wanted.machines.card_of(number).bytes_per_s for number, host in enumerate(hosts)}
            findings += judge.judge_link(measured.rates, declared)
        findings += judge.judge_timeout(measured.rates, wanted.message_bytes, wanted.message, wanted.timeout_s)
    return NetworkCheck(measured, findings, list(survey.notes()))


class _NetworkSurvey:
    """Lets the leaders of hosts measure, and keeps what they say."""

    def __init__(self, hosts: Sequence[Host], hub: Hub) -> None:
        self._hub, self._nonce = hub, secrets.token_hex(16)
        self._ports = hub.ask({host.leader: {"do": "serve", "nonce": self._nonce} for host in hosts})
        self._hosts = [host for host in hosts if host.leader in self._ports]
        self._names = {host.leader: host.name for host in hosts}
        self._address = {host.leader: host.first["address"] for host in hosts}
        self._leader = {host.name: host.leader for host in hosts}
        self.errors: dict[Pair, str] = {}
        self.measured = PairMeasurements()
        self._silent: list[Pair] = []  # pairs without an answer to a datagram
        self._wanted: dict[Pair, float] = {}  # cores that the threads of a volley wanted
        self._busy: list[Pair] = []  # slow pairs of which not the link is the reason

    def ping(self) -> None:
        """Every host reaches every other one."""
        leaders = [host.leader for host in self._hosts]
        found = self._hub.ask({rank: self._to_others(rank, leaders, "ping") for rank in leaders})
        for rank, answers in found.items():
            for other, answer in answers.items():
                pair = (self._names[rank], self._names[int(other)])
                if "error" in answer:
                    self.errors[pair] = answer["error"]
                else:
                    self.measured.latencies[pair] = answer["latency_s"]

    def _to_others(self, rank: int, leaders: Sequence[int], do: str, port: str = "tcp") -> dict[str, object]:
        pairs = [
            other for other in leaders if other != rank and (self._names[rank], self._names[other]) not in self.errors
        ]
        return {"do": do, "peers": {str(other): [self._address[other], self._ports[other][port]] for other in pairs}}

    def path_mtus(self) -> None:
        """The largest packet from every host to every other one that is reached."""
        leaders = [host.leader for host in self._hosts if host.mtu is not None]
        requests = {
            host.leader: {
                **self._to_others(host.leader, leaders, "mtu", "udp"), "nonce": self._nonce, "own_mtu": host.mtu,
            }
            for host in self._hosts
            if host.mtu is not None
        }  # fmt: skip
        for rank, answers in self._hub.ask(requests).items():
            for other, mtu in answers.items():
                pair = (self._names[rank], self._names[int(other)])
                if mtu is None:
                    self._silent.append(pair)
                else:
                    self.measured.mtus[pair] = mtu

    def late_again(self) -> list[Pair]:
        """The pairs with a long latency that have it alone, too."""
        for source, target in judge.late_pairs(self.measured.latencies)[:MOST_AGAIN]:
            rank, other = self._leader[source], self._leader[target]
            answers = self._hub.ask({rank: self._to_others(rank, [other], "ping")}).get(rank, {})
            again = answers.get(str(other), {}).get("latency_s")
            if again is not None:
                before = self.measured.latencies[source, target]
                self.measured.latencies[source, target] = min(before, again)
        return judge.late_pairs(self.measured.latencies)

    def volleys(self) -> None:
        """The bandwidth of pairs: in each round every host has one other, first in one direction, then back."""
        names = [host.name for host in self._hosts]
        for round_ in list(tournament(names))[:MOST_ROUNDS]:
            for pairs in (round_, [(second, first) for first, second in round_]):
                self._volley([pair for pair in pairs if pair not in self.errors], VOLLEY_S)

    def slow_again(self) -> list[Pair]:
        """The pairs that are slow, and are so alone, too, although their hosts had cores to spare."""
        for pair in judge.slow_pairs(self.measured.rates)[:MOST_AGAIN]:
            self._volley([pair], ALONE_S)
        slow = judge.slow_pairs(self.measured.rates)
        self._busy = [pair for pair in slow if self._wanted[pair] > BUSY_CORES]
        return [pair for pair in slow if pair not in self._busy]

    def _volley(self, pairs: Sequence[Pair], seconds: float) -> None:
        requests = {}
        for source, target in pairs:
            other = self._leader[target]
            peer = [self._address[other], self._ports[other]["tcp"]]
            requests[self._leader[source]] = {"do": "volley", "peer": peer, "seconds": seconds}
        target_of = {self._leader[source]: target for source, target in pairs}
        for rank, answer in self._hub.ask(requests).items():
            pair = (self._names[rank], target_of[rank])
            if "error" in answer:
                self.errors[pair] = answer["error"]
            else:
                self.measured.rates[pair] = max(answer["bytes_per_s"], self.measured.rates.get(pair, 0.0))
                self._wanted[pair] = min(answer["wanted"], self._wanted.get(pair, answer["wanted"]))

    def notes(self) -> Iterator[str]:
        """What could not be measured."""
        if self._silent:
            pairs = counted(len(self._silent), "pair")
            yield f"no datagram is answered between {pairs} of hosts: MTUs are not measured"
        if self._busy:
            pairs = listed((f"{source} to {target}" for source, target in self._busy), 3)
            yield f"bandwidth: cores were too busy to judge the links {pairs}"
        if len(self._hosts) > MOST_ROUNDS + 1 and self.measured.rates:
            yield f"bandwidth: each host has measured {MOST_ROUNDS} others"


def tournament(names: Sequence[str]) -> Iterator[list[Pair]]:
    """Rounds in which each has one other, until every two have met."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(first, second) for first, second in pairs if first is not None and second is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def mapping_of(measured: PairMeasurements) -> list[Mapping[str, object]]:
    """What was measured, as JSON data: one entry for each pair."""
    pairs = dict.fromkeys([*measured.latencies, *measured.rates, *measured.mtus])
    return [
        {
            "from": pair[0], "to": pair[1], "latency_s": measured.latencies.get(pair),
            "bytes_per_s": measured.rates.get(pair), "mtu": measured.mtus.get(pair),
        }
        for pair in pairs
    ]  # fmt: skip
