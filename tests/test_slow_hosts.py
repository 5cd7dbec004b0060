"""In: hosts (network namespaces) with a rank each. Out: lossy links and outsiders that change nothing; who listens where.
Does not compare times. Without root or iproute2 the tests with hosts are skipped, saying so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import host_ranks
import pytest
from host_ranks import assert_same_weights, hosts, listeners_of, lossy, started
from runs import environment

from codescent.record import RunFolder

ENV = environment(CODESCENT_TOKEN="a token that no outsider knows")
LOCAL = ("parallel.average_every=2", "parallel.dp_replicate=2", "train.eval_every=0", "train.num_steps=40")
WIRES = {"none": (), "int8": ("parallel.wire=int8",)}
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
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    words = (*LOCAL, *WIRES[wire])
    with hosts.Hosts(2) as pair:
        with started(pair, 2, project, f"even-{wire}", ENV, words) as run:
            expected = run.finish()
        with lossy(pair, 10.0, 100.0, 0.01) as counts, started(pair, 2, project, f"lossy-{wire}", ENV, words) as run:
            found = run.finish()
            said = run.said()
    carried, lost = counts
    assert carried > 400
    assert lost > 0
    assert_same_weights(found, expected)
    assert [word for word in OF_WAITING if word in said] == []
    assert kinds(found) == kinds(expected)


def kinds(run: RunFolder) -> list[str]:
    return [event["kind"] for event in run.read_events()]
