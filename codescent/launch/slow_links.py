"""In: what hosts of a run have sent to each other in some steps. Out: a link, or a host, that is slower than others.
Makes no collective, and asks nobody (link_watch.py does). Where all links are slow alike, it names none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

SLOWER = 2.0
"""A slow link takes this many times as long for its bytes as the median of the others. Links vary more than devices."""
LEAST_SHARE = 1 / 3
"""A slow link costs at least this part of a step, beside the others. What costs less holds nobody up."""
LOADED = 0.5
"""Links are compared that carry at least this part of what the busiest one does. Short messages measure no rate."""
TICK_S = 0.004
"""The kernel counts seconds in ticks: what takes less may be counted as nothing."""
IN_A_ROW = 2
"""Windows in a row in which a link must be slow: a pause of the machine, or other traffic, is over by then."""


@dataclass(frozen=True)
class LinkTraffic:
    """What connections between two addresses have carried in the steps of a window.

    Attributes:
        source, target: the addresses.
        sent_bytes: of all connections between them.
        busy_s: seconds in which bytes were on their way, of the connection with most of them. Several that send at the
            same time share the link, so the sum would count its time twice.
    """

    source: str
    target: str
    sent_bytes: int
    busy_s: float


@dataclass(frozen=True)
class HostSent:
    """A window of a host.

    Attributes:
        window: its number, from 1.
        host: name.
        ranks: of the host.
        steps: done in the window.
        seconds: of the window.
        queued_s: seconds of the window in which a rank waited for a processor; of the rank with most of them.
        links: from this host to others.
    """

    window: int
    host: str
    ranks: Sequence[int]
    steps: int
    seconds: float
    queued_s: float
    links: Sequence[LinkTraffic]


@dataclass(frozen=True)
class SlowLink:
    """A link that is slower than the others, or all links of a host.

    Attributes:
        rank: the first one of the host that sends, or whose links are slow.
        hosts: from and to; one: the host whose links are slow.
        addresses: from and to, of the slowest link.
        factor: how many times as long its bytes take as over the median of the others.
        own_s: seconds of a step in which its bytes are on their way.
        others_s: the same, if the bytes went over the median of the others.
    """

    rank: int
    hosts: tuple[str, ...]
    addresses: tuple[str, str]
    factor: float
    own_s: float
    others_s: float

    def __str__(self) -> str:
        return f"{' to '.join(self.hosts)} {self.factor:.1f}x slower (network)"

    @property
    def who(self) -> str:
        """The link, in words."""
        return f"the link of {self.hosts[0]}" if len(self.hosts) == 1 else f"the link from {' to '.join(self.hosts)}"


class SlowLinks:
    """Compares the links of a run, window by window.

    Attributes:
        current: the slow link of the last window, if there was one before; None: there is none.
    """

    def __init__(self) -> None:
        self.current: SlowLink | None = None
        self._seen: tuple[tuple[str, ...], int] = (), 0  # hosts, and in how many windows in a row

    def judge(self, sent: Sequence[HostSent]) -> SlowLink | None:
        """Take in a window of every host. Returns a slow link that was not one before."""
        if not any(link.sent_bytes for one in sent for link in one.links):
            return None  # replicas that train apart: nothing is known of this window
        found = slowest(sent)
        hosts, often = self._seen
        if found is None:
            self._seen, self.current = ((), 0), None
            return None
        often = often + 1 if found.hosts == hosts else 1
        self._seen = found.hosts, often
        self.current = found if often >= IN_A_ROW else None
        return found if often == IN_A_ROW else None


@dataclass(frozen=True)
class _Link:
    """A link in the mean of the steps of a window."""

    source: HostSent
    target: HostSent
    addresses: tuple[str, str]
    step_bytes: float
    busy_s: float

    @property
    def rate(self) -> float:
        return self.step_bytes / self.busy_s

    @property
    def excused_s(self) -> float:
        """Seconds of a step that a link may take without being slow.

        Where processors are busy, packets wait for them as the ranks do. That says nothing of the link.
        """
        each = [(one.queued_s / one.steps, LEAST_SHARE * one.seconds / one.steps) for one in (self.source, self.target)]
        return max(second for both in each for second in both)


def slowest(sent: Sequence[HostSent]) -> SlowLink | None:
    """The slowest link, if it holds up the steps; the host, if two slow links have one in common.

    The answers of a host whose sending is slow wait behind what it sends. So the link to it looks slow, too. The same
    holds for a host that receives slowly.
    """
    links = _loaded(sent)
    slow = [(usual, link) for link in links if (usual := _usual(link, links)) >= SLOWER * link.rate]
    if not slow:
        return None
    usual, worst = min(slow, key=lambda one: one[1].rate)
    own_s, factor = worst.busy_s, usual / worst.rate
    if own_s - own_s / factor < worst.excused_s:
        return None
    common = set.intersection(*({link.source.ranks[0], link.target.ranks[0]} for _, link in slow))
    ends = [worst.source, worst.target]
    named = [one for one in ends if len(slow) > 1 and common == {one.ranks[0]}] or ends
    hosts = tuple(one.host for one in named)
    return SlowLink(named[0].ranks[0], hosts, worst.addresses, factor, own_s, own_s / factor)


def _loaded(sent: Sequence[HostSent]) -> list[_Link]:
    """The links that carry much, between hosts of the run."""
    at: Mapping[str, HostSent] = {link.source: one for one in sent for link in one.links}
    links = [
        _Link(
            one,
            at[link.target],
            (link.source, link.target),
            link.sent_bytes / one.steps,
            max(TICK_S, link.busy_s) / one.steps,
        )
        for one in sent
        for link in one.links
        if link.target in at and at[link.target] is not one
    ]
    most = max((link.step_bytes for link in links), default=0.0)
    return [link for link in links if link.step_bytes >= LOADED * most > 0]


def _usual(own: _Link, links: Sequence[_Link]) -> float:
    """The rate of the median of the others; 0: there are none. Of two it is the faster one: see `slowest`."""
    return median_high([link.rate for link in links if link is not own] or [0.0])
