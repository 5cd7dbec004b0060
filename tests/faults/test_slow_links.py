"""In: agents on hosts that are network namespaces, whose links differ. Out: the slow link is named, and no other.
Does not cut links (test_links.py does). What is counted and compared has quick tests here, without namespaces."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

import pytest
from host_agents import LONG, Agents
from host_ranks import hosts, until
from runs import make_project

from codescent.launch.link_watch import sent_of_json, uses
from codescent.launch.slow_links import HostSent, LinkTraffic, SlowLinks, slowest
from codescent.launch.tcp_sockets import connections_of
from codescent.record import RunFolder

pytestmark = pytest.mark.timeout(180)

SLOW_MBIT = 100.0
WORDS = (*LONG, "model.hidden_dim=256", "train.global_batch_size=12")
"""A step sends 9 MB from each host: 0.7 s at 100 Mbit/s."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if reason := hosts.missing():
        pytest.skip(reason)
    make_project(tmp_path)
    return tmp_path


@pytest.fixture
def made(folder: Path) -> Iterator[hosts.Hosts]:
    with hosts.Hosts(3) as found:
        yield found


def slow_down(made: hosts.Hosts, host: int, end: str) -> None:
    """Limit what a host sends ("sends"), or what it receives, at its port of the switch ("receives")."""
    where = (made.name(host), hosts.DEVICE) if end == "sends" else (made._switch, f"port{host}")
    hosts._do("tc", "-n", where[0], "qdisc", "replace", "dev", where[1], "root", *hosts.shaper(SLOW_MBIT))


def named(run: Path) -> list[dict[str, object]]:
    return [dict(one) for one in RunFolder.open(run).read_events() if one["kind"] == "straggler"]


def ring(rates: list[float], *, sent_bytes: int = 1_000_000, window: int = 1, queued_s: float = 0.0) -> list[HostSent]:
    """A window of 10 steps in a ring of hosts. `rates`: bytes a second from each host to the one before it. A step
    takes as long as its slowest link; a few short messages go the other way."""
    count, slowest_s = len(rates), max(sent_bytes / rate for rate in rates)
    found = []
    for host, rate in enumerate(rates):
        here, to, back = (f"10.0.0.{one % count}" for one in (host, host - 1, host + 1))
        links = [
            LinkTraffic(here, to, 10 * sent_bytes, 10 * sent_bytes / rate),
            LinkTraffic(here, back, 5_000, 10 * slowest_s),
        ]
        found.append(HostSent(window, f"host{host}", [host], 10, 10 * slowest_s, queued_s, links[: count - 1]))
    return found


@pytest.mark.parametrize(
    ("rates", "hosts_named", "factor"),
    [
        ([1e8, 1e7, 1e8, 1e8], ("host1", "host0"), 10.0),  # the answers are quick: the link, in one direction
        ([1e8, 1e7, 1.1e7, 1e8], ("host1",), 10.0),  # what host1 sends is slow; answers to host2 wait behind it
        ([1e8, 1.1e7, 1e7, 1e8], ("host1",), 10.0),  # what host1 receives is slow; answers of host0 wait behind it
        ([1e8, 1e7], ("host1", "host0"), 10.0),
        ([inf, 1e7, inf], ("host1", "host0"), 250.0),  # the kernel has counted nothing: less than its tick of 4 ms
    ],
)
def test_the_host_that_slow_links_have_in_common_is_named(
    rates: list[float], hosts_named: tuple[str, ...], factor: float
) -> None:
    """Fault: the neighbour is blamed whose bytes wait for the answers of the slow host; or the wrong end of a link."""
    found = slowest(ring(rates))
    assert found is not None
    assert (found.hosts, found.rank, found.own_s) == (hosts_named, 1, pytest.approx(0.1, rel=0.2))
    assert found.factor == pytest.approx(factor)
    assert found.others_s == pytest.approx(found.own_s / factor)


@pytest.mark.parametrize(
    ("case", "sent"),
    [
        ("all alike", ring([1e7, 1.2e7, 0.9e7, 1e7])),
        ("less than twice", ring([1e8, 0.6e8, 1e8, 1e8])),
        ("processors are busy", ring([1e8, 1e7, 1e8, 1e8], queued_s=2.0)),
        ("most of the step is something else", [replace(one, seconds=10.0) for one in ring([1e8, 1e7, 1e8, 1e8])]),
        ("one host has not said anything", ring([1e8, 1e7])[1:]),
        ("another machine, no host of the run", [replace(one, links=one.links[1:]) for one in ring([1e8, 1e7])]),
    ],
)
def test_what_is_no_slow_link(case: str, sent: list[HostSent]) -> None:
    """Fault: links that are slow alike, short messages, busy processors or a link that costs nothing name a host."""
    assert slowest(sent) is None, case


def test_a_pause_of_one_window_is_no_slow_link_and_one_that_recovers_is_none_any_more() -> None:
    """Fault: any pause is told; a window without traffic, of replicas that train apart, forgets what was seen."""
    judge, told = SlowLinks(), []
    quick, slow = ring([1e8, 1e8, 1e8]), ring([1e8, 1e7, 1e8])
    quiet = [replace(one, links=[]) for one in quick]
    for sent in (quick, slow, quick, slow, quiet, slow, slow, quick):
        told.append((judge.judge(sent) is not None, judge.current is not None))
    nothing, begins, goes_on = (False, False), (True, True), (False, True)
    assert told == [nothing, nothing, nothing, nothing, nothing, begins, goes_on, nothing]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux counts")
def test_the_kernel_says_what_a_connection_carries() -> None:
    """Fault: fields of the kernel's answer are read at wrong places; a reader that does not read is a slow link."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        far, _ = listener.accept()
    with near, far:
        before = connections_of([os.getpid()])
        reader = threading.Thread(target=far.recv, args=(1 << 20, socket.MSG_WAITALL))
        reader.start()
        near.sendall(bytes(1 << 20))
        reader.join()
        (read,) = [one for one in uses(before, connections_of([os.getpid()])) if one.source == "127.0.0.2"]
        assert (read.target, read.sent_bytes) == ("127.0.0.1", 1 << 20)
        assert 0 <= read.busy_s < 60
        near.settimeout(0.5)
        with pytest.raises(TimeoutError):
            near.sendall(bytes(1 << 26))
        (full,) = [one for one in connections_of([os.getpid()]).values() if one.source == "127.0.0.2"]
        assert 0.2 < full.full_s <= full.busy_s < 60


def test_a_window_of_a_host_comes_as_it_was_sent() -> None:
    """Fault: the host of rank 0 reads another window than a host has sent."""
    for one in ring([1e8, 1e7, 1e8]):
        assert sent_of_json(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sends", "receives"])
def test_f17_a_host_with_a_slow_link_is_named_with_its_part(made: hosts.Hosts, folder: Path, end: str) -> None:
    """Fault: a link becomes slow, all ranks wait for it alike, and nobody says which one it is within 20 steps."""
    with Agents(made, 3, folder, "slow", *WORDS) as run:
        run.steps(60)
        before = named(run.run)
        slow_down(made, 1, end)
        at = (run.run / "metrics.csv").read_text().count("\n")
        until(lambda: len(named(run.run)) > len(before))
        run.steps((run.run / "metrics.csv").read_text().count("\n") + 10)
        said = run.said()
    assert before == []
    (event,) = named(run.run)
    print(f"slow at step {at}: {event}")
    assert (event["part"], event["rank"], event["host"]) == ("network", 1, "host1"), said
    assert int(str(event["step"])) <= at + 20
    assert float(str(event["factor"])) > 4
    assert re.search(
        r"codescent: the link .*host1.* is \d+\.\d times slower than the others: its bytes take \d+\.?\d* s", said
    )
    assert re.search(r"step \d+/.*host1.* \d+\.\dx slower \(network\)", said)


@pytest.mark.slow
def test_f17_links_that_are_slow_alike_name_nobody(made: hosts.Hosts, folder: Path) -> None:
    """Fault: a slow network, or a quick one with noise, is taken for a slow host."""
    with Agents(made, 3, folder, "alike", *WORDS) as run:
        run.steps(250)
        made.shape(SLOW_MBIT)
        run.steps((run.run / "metrics.csv").read_text().count("\n") + 50)
        assert named(run.run) == [], run.said()
