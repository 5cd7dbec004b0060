"""In: the steps of this host's ranks, the supervisors of other hosts. Out: a link of the run that has become slow.
Does not decide which one is slow (slow_links.py does). The kernel counts; the host of rank 0 compares."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from codescent.base.errors import UserError
from codescent.base.page import Page
from codescent.launch.other_hosts import OtherHosts
from codescent.launch.process_state import queued_s
from codescent.launch.slow_links import HostSent, LinkTraffic, SlowLink, SlowLinks
from codescent.launch.tcp_sockets import Connection, connections_of
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient
from codescent.transport.authenticate import NotProved

LEAST_STEPS, LEAST_S = 3, 1.5
"""A window has at least so many steps of every rank, and so many seconds."""
LOOK_S = 0.2
"""Between two looks at what other hosts say."""
_FAILS = StoreError, OSError, NotProved, UserError, ValueError, TypeError, LookupError
"""Where the host of rank 0 does not answer, or says something else. Then nothing is compared."""


class LinkWatch:
    """Counts what this host sends, window by window, and compares all links on the host of rank 0.

    Args:
        others: the supervisors of the other hosts.
        ranks: number of ranks of the run.
    """

    def __init__(self, others: OtherHosts, ranks: int) -> None:
        self._said = _Said(others, ranks)
        self._judge = SlowLinks()
        self._judged: dict[int, int] = {}  # window of each host, by its first rank, that was compared last
        self._window = 0
        self._before: dict[int, Connection] = {}
        self._steps: dict[int, int] = {}  # of each rank, when the window began
        self._queued_s: dict[int, float] = {}
        self._begin_s = 0.0

    def begin_anew(self, ranks: int) -> None:
        """Others take part, so many: what was seen says nothing of them."""
        self._judge, self._judged, self._steps = SlowLinks(), {}, {}
        self._said.begin_anew(ranks)

    @property
    def current(self) -> SlowLink | None:
        """The link that is slow now."""
        return self._judge.current

    def look(self, pages: Mapping[int, Page], running: Mapping[int, int], now_s: float) -> SlowLink | None:
        """Take in what the pages say. Returns a link that was not slow before."""
        steps = {rank: page.took.steps for rank, page in pages.items() if page.took.steps and not page.died_s}
        if steps and steps.keys() == self._steps.keys():
            self._end_window(steps, running, now_s)
        elif steps:  # the first step, which compiles, is behind these ranks
            self._begin(steps, connections_of(running[rank] for rank in steps), _queued(steps, running), now_s)
        heard = self._said.heard
        windows = {first: one.window for first, one in heard.items()}
        if not heard or any(windows[first] == self._judged.get(first) for first in windows):
            return None
        self._judged = windows
        return self._judge.judge([*heard.values()])

    def _begin(
        self, steps: dict[int, int], counted: dict[int, Connection], queued_s: dict[int, float], now_s: float
    ) -> None:
        self._steps, self._before, self._queued_s, self._begin_s = steps, counted, queued_s, now_s

    def _end_window(self, steps: dict[int, int], running: Mapping[int, int], now_s: float) -> None:
        """Say what was sent in this window, if it is long enough. The next one begins."""
        done, seconds = min(steps[rank] - self._steps[rank] for rank in steps), now_s - self._begin_s
        if done < LEAST_STEPS or seconds < LEAST_S:
            return
        counted, queued_s = connections_of(running[rank] for rank in steps), _queued(steps, running)
        self._window += 1
        if links := uses(self._before, counted):
            most_s = max(queued_s[rank] - self._queued_s[rank] for rank in steps)
            self._said.say(
                HostSent(self._window, socket.gethostname(), sorted(steps), done, seconds, max(0.0, most_s), links)
            )
        self._begin(steps, counted, queued_s, now_s)


def _queued(ranks: Iterable[int], running: Mapping[int, int]) -> dict[int, float]:
    return {rank: queued_s(running[rank]) for rank in ranks}


def uses(before: Mapping[int, Connection], now: Mapping[int, Connection]) -> list[LinkTraffic]:
    """What was sent between two looks at connections, by their addresses."""
    found: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for number, one in now.items():
        base = before.get(number) or replace(one, sent_bytes=0, busy_s=0.0, full_s=0.0)
        busy_s = one.busy_s - base.busy_s - (one.full_s - base.full_s)  # a process that does not read is no slow link
        found[one.source, one.target].append((one.sent_bytes - base.sent_bytes, max(0.0, busy_s)))
    return [
        LinkTraffic(*ends, sum(sent for sent, _ in each), max(busy_s for _, busy_s in each))
        for ends, each in found.items()
    ]


class _Said:
    """Tells the host of rank 0 what this one has sent, in a thread: a link that is cut must not hold up the launcher.

    Attributes:
        heard: on the host of rank 0, the last window of each host by its first rank; empty until all ranks are in one.
    """

    def __init__(self, others: OtherHosts, ranks: int) -> None:
        self._others, self._ranks = others, ranks
        self._own: HostSent | None = None
        self._told = 0  # the number of its window
        self._thread: threading.Thread | None = None
        self.heard: dict[int, HostSent] = {}

    def begin_anew(self, ranks: int) -> None:
        """Others take part, so many."""
        self._ranks, self._own, self.heard = ranks, None, {}

    def say(self, own: HostSent) -> None:
        """Tell a window."""
        self._own = own
        if self._thread is None:
            self._thread = threading.Thread(target=self._talk, name="codescent links", daemon=True)
            self._thread.start()

    def _talk(self) -> None:
        client: StoreClient | None = None
        while True:
            try:
                client = client or self._others.client()
                self._exchange(client)
            except _FAILS:
                client = None  # it is opened anew
            time.sleep(LOOK_S)

    def _exchange(self, client: StoreClient) -> None:
        own = self._own
        if own is not None and own.window != self._told:
            client.set(self._others.key("sent", own.ranks[0]), json.dumps(asdict(own)))
            self._told = own.window
        if self._others.serves:
            self._hear(client)

    def _hear(self, client: StoreClient) -> None:
        """Read the newest window of every host."""
        keys = [self._others.key("sent", rank) for rank in [*self.heard] or range(self._ranks)]
        there = client.there(keys)
        read = [json.loads(client.get(key)) for key, is_there in zip(keys, there, strict=True) if is_there]
        heard = {one.ranks[0]: one for one in map(sent_of_json, read)}
        if sum(len(one.ranks) for one in heard.values()) == self._ranks:
            self.heard = heard


def sent_of_json(read: Mapping[str, Any]) -> HostSent:
    """A window of a host, as JSON has it. Raises TypeError, LookupError: it is another object."""
    links: Sequence[LinkTraffic] = [LinkTraffic(**one) for one in read["links"]]
    return HostSent(**{**read, "links": links})
