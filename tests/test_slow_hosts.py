"""In: hosts (network namespaces) with a rank each. Out: that lossy links and outsiders change nothing.
Does not compare times. Without root or iproute2 the tests with hosts are skipped, saying so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import host_ranks
import pytest
from host_ranks import assert_same_weights, attacked, hosts, started
from runs import called, environment

from codescent.base import token
from codescent.launch.environment import read
from codescent.record import RunFolder

ENV = environment(CODESCENT_TOKEN="a token that no outsider knows")
LOCAL = ("parallel.average_every=2", "parallel.dp_replicate=2", "train.eval_every=0", "train.num_steps=40")
WIRES = {"none": (), "int8": ("parallel.wire=int8",)}
SHORT = ("train.eval_every=0", "train.num_steps=60", "train.global_batch_size=12")
BESIDE = ("parallel.gossip_mode=asynchronous", "parallel.agree_every=2")
SERVED: dict[str, tuple[str, ...]] = {
    "server": (*SHORT, "train.precision=fp32", "parallel.servers=1"),
    "workers": (*SHORT, "train.precision=fp32", "parallel.servers=workers"),
    "gossip": (*SHORT, "train.precision=fp64", "parallel.gossip=pairs", *BESIDE),
}
"""Runs of three ranks with listeners of our transport."""
AT = {"server": [0, 2], "workers": [0, 0, 1, 2], "gossip": [0, 0, 1, 2]}
"""The hosts of our listeners: of the store, then of the ranks that serve."""
SERVED_MBIT = 1.0
"""The weights alone take longer to travel than an outsider is there, whatever the processor."""
OF_WAITING = ("is stopped", "is behind", "wait for it", "stands still", "timed out", "Timeout")


@pytest.fixture(scope="module")
def made() -> Iterator[hosts.Hosts]:
    """Hosts 0 to 2 for ranks, and host 3 for an outsider."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    with hosts.Hosts(4) as found:
        yield found


def test_addresses_of_listeners() -> None:
    assert host_ranks.address_of("01004D0A:733C") == ("10.77.0.1", 29_500)
    assert host_ranks.address_of("00000000:0050") == ("0.0.0.0", 80)
    assert host_ranks.address_of("00000000000000000000000000000000:0050") == ("::", 80)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("wire", WIRES)
def test_averaging_does_not_depend_on_the_link(project: Path, wire: str) -> None:
    """1 % loss, 10 ms and 100 Mbit/s in each direction (F22)."""
    reason = hosts.missing() or ("" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun for a lossy wire")
    if reason:
        pytest.skip(reason)
    words = (*LOCAL, *WIRES[wire])
    with hosts.Hosts(2) as pair:
        with started(pair, 2, project, f"even-{wire}", ENV, words) as run:
            expected = run.finish()
        with pair.lossy(10.0, 100.0, 0.01) as counts, started(pair, 2, project, f"lossy-{wire}", ENV, words) as run:
            found = run.finish()
            said = run.said()
    carried, lost = counts
    assert carried > 400
    assert lost > 0
    assert_same_weights(found, expected)
    assert [word for word in OF_WAITING if word in said] == []
    assert kinds(found) == kinds(expected)


def kinds(run: RunFolder) -> list[str]:
    return [event["kind"] for event in run.read_events() if event["kind"] != "slow_steps"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("words", [(), ("parallel.average_every=2",), ("parallel.gossip=ring",)], ids=" ".join)
def test_a_dead_link_ends_a_synchronous_run_and_its_rank_is_named(project: Path, words: tuple[str, ...]) -> None:
    """The others wait for parallel.timeout_s, then one of them says for whom. The rank itself reaches nobody."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    name, ends = f"cut-{len(words)}{words[0][9] if words else ''}", ("train.eval_every=0", "parallel.timeout_s=4")
    words = (*words, *ends, "train.global_batch_size=9", "train.num_steps=100000")
    with hosts.Hosts(3) as made, started(made, 3, project, name, ENV, words) as run:
        host_ranks.until(run.has_steps)
        host_ranks.cut(made, 2)
        host_ranks.until(lambda: all(process.poll() is not None for process in run.processes), 60.0)
        said = [log.read_text(encoding="utf-8", errors="replace") for log in run.logs]
    assert [process.returncode for process in run.processes] == [1, 1, 1]
    assert "".join(said).count("the others waited in vain for rank 2 (on ") == 1
    assert "rank 2 cannot reach rank 0 at 10.77.0.1" in said[2]


@dataclass(frozen=True)
class Whole:
    """A run on three hosts without an outsider, and where each host has listened from its start to its end."""

    method: str
    run: RunFolder
    listeners: list[set[tuple[str, int]]]


@pytest.fixture(scope="module", params=SERVED)
def served(made: hosts.Hosts, project: Path, request: pytest.FixtureRequest) -> Whole:
    name = f"served-{request.param}"
    with started(made, 3, project, name, ENV, SERVED[request.param]) as run:
        return Whole(request.param, run.finish(), run.listeners)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_listener_is_on_the_interface_of_the_route(served: Whole) -> None:
    """The store's, the servers' and gloo's; on all addresses, or IPv6, there is none (S1)."""
    assert ("10.77.0.1", host_ranks.PORT) in served.listeners[0]
    for host, found in enumerate(served.listeners):
        assert found
        assert {address for address, _ in found} <= {hosts.address(host), "127.0.0.1"}
        assert len([address for address, _ in found if address == hosts.address(host)]) >= AT[served.method].count(host)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_outsider_is_rejected_and_changes_nothing(made: hosts.Hosts, project: Path, served: Whole) -> None:
    """From another host, at every port (S2). gloo has no token and stays silent: docs/launch.md says so."""
    rank = read(hosts.rank_environment(ENV, 0, 3, host_ranks.PORT))
    assert rank is not None
    key = token.key_of(ENV, f"{rank.job} attempt {rank.attempt}")
    made.shape(SERVED_MBIT)
    try:
        with started(made, 3, project, f"attacked-{served.method}", ENV, SERVED[served.method]) as run:
            host_ranks.until(run.has_steps)
            run.look()
            ports = sorted(set().union(*run.listeners))
            ours, attacks = attacked(made, 3, ENV, ports, key)
            assert run.is_running()  # so that it was the listeners that closed connections
            made.shape(None)
            found = run.finish()
            said = run.said()
    finally:
        made.shape(None)
    assert [address for address, _ in ours] == [hosts.address(host) for host in AT[served.method]]
    ends = {(tuple(one["address"]), one["attack"]): one["end"] for one in attacks}
    assert {one["bytes"] for one in attacks} == {0}
    proved = [{name for (at, name), end in ends.items() if at == address and "proved" in end} for address in ours]
    assert proved == [{"right token, store"}, *[{"right token, server"}] * (len(ours) - 1)]
    assert {end for (address, _), end in ends.items() if address in ours} == {"closed", "proved, closed"}
    assert "proved" not in "".join(end for (address, _), end in ends.items() if address not in ours)
    assert "did not prove this run's token: rejected" in said
    assert "10.77.0.4 was rejected" in said
    if served.method == "gossip":  # speeds decide the weights: one process finds them again
        assert called(project, "prove", "--replay", str(found.path)).returncode == 0
        return
    assert_same_weights(found, served.run)
