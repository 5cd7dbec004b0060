"""In: agents on hosts that are network namespaces; links that are cut, or lossy. Out: who ends, and what is not harmed.
Does not cut links of servers and gossip (test_dead_hosts.py does), or of ranks without agents (test_slow_hosts.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import host_ranks
import pytest
from host_agents import LONG, Agents
from host_ranks import assert_same_weights, hosts, listeners_of
from runs import make_project, train

from codescent.record import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_S = 10
NO_HARDWARE = "02:00:00:00:00:99"
"""An address of hardware that no host has."""


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


def link_down(made: hosts.Hosts, host: int) -> None:
    host_ranks.cut(made, host)


def switch_side(made: hosts.Hosts, host: int) -> None:
    made.cut(host)


def one_way(made: hosts.Hosts, host: int) -> None:
    """What the host sends to the others is lost without a word; what they send arrives."""
    for other in set(range(made.count)) - {host}:
        words = (
            "neigh",
            "replace",
            hosts.address(other),
            "lladdr",
            NO_HARDWARE,
            "dev",
            hosts.DEVICE,
            "nud",
            "permanent",
        )
        hosts._do("ip", "-n", made.name(host), *words)


CUTS = {"link down": link_down, "switch side": switch_side, "one way": one_way}


@pytest.mark.parametrize("host", [0, 2], ids=["rank 0", "another rank"])
@pytest.mark.parametrize("cut", CUTS)
def test_f6_a_link_that_is_cut_for_good_ends_both_sides(made: hosts.Hosts, folder: Path, cut: str, host: int) -> None:
    """Fault: one side waits for ever, in a collective or for an answer of a store; or both sides write the run."""
    cutting: Callable[[hosts.Hosts, int], None] = CUTS[cut]
    words = (*LONG, "train.global_batch_size=9", f"parallel.timeout_s={TIMEOUT_S}", "checkpoint.every=50")
    with Agents(made, 3, folder, "cut", *words) as run:
        run.steps(60)
        listening = [set(listeners_of(agent.pid)) for agent in run.agents]
        cutting(made, host)
        began_s = time.monotonic()
        codes = run.end(6 * TIMEOUT_S)
        print(f"all agents have ended {time.monotonic() - began_s:.1f} s after the cut\n{run.said()}")
        said = run.said()
    assert not {0, 2, 75, None} & set(codes), (codes, said)
    assert f"rank {host} " in said
    steps = [row["step"] for row in RunFolder.open(run.run).read_metrics()]
    assert steps == list(range(1, len(steps) + 1)), "one side has written"
    assert not list((run.run / "checkpoints").glob(".partial*"))
    for number, found in enumerate(listening):  # S1: ranks, store and supervisors
        assert {address for address, _ in found} <= {hosts.address(number), "127.0.0.1"}


def test_f5_a_link_that_is_cut_for_3_seconds_changes_nothing(made: hosts.Hosts, folder: Path) -> None:
    """Fault: a link that works again in time ends the run, or costs a step, a restart or a verdict."""
    words = ("train.num_steps=200", "train.eval_every=0", "train.global_batch_size=9", "log.metrics_every=1")
    words = (*words, "train.precision=fp64")
    with Agents(made, 3, folder, "healed", *words) as run:
        run.steps(60)
        switch_side(made, 1)
        time.sleep(3.0)
        made.heal(1)
        assert run.end() == [0, 0, 0], run.said()
    found = RunFolder.open(run.run)
    assert [one["kind"] for one in found.read_events() if one["kind"] in ("hang", "straggler", "crash")] == []
    assert_same_weights(found, train(folder, "alone", *words, "parallel.ranks=3"))


def test_f22_a_lossy_link_is_no_hang(folder: Path) -> None:
    """Fault: 1 % loss, 10 ms and 100 Mbit/s are taken for a rank that hangs, is slow or is gone."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun for a lossy wire")
    words = ("train.num_steps=100", "train.eval_every=50", "checkpoint.every=50", "train.precision=fp64")
    with hosts.Hosts(2) as pair, pair.lossy(10.0, 100.0, 0.01) as counts:
        began_s = time.monotonic()
        with Agents(pair, 2, folder, "lossy", *words) as run:
            assert run.end(200.0) == [0, 0], run.said()
        print(f"{time.monotonic() - began_s:.0f} s, {run.said()}")
    _, lost = counts
    assert lost > 0
    found = RunFolder.open(run.run)
    assert [one["kind"] for one in found.read_events() if one["kind"] in ("hang", "straggler", "crash")] == []
    assert "likely cause" not in run.said()
    assert_same_weights(found, train(folder, "alone", *words, "parallel.ranks=2"))
