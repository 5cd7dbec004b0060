"""In: two launchers of one run, as on two hosts, whose ranks stand still. Out: one verdict that names the host.
Both are on this machine (hanging_hosts.py). The ranks write their pages by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging_hosts import CULPRIT, Hosts

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    (tmp_path / "go").touch()


def test_the_rank_of_another_host_is_named_with_its_host(folder: Path) -> None:
    """Fault: each host says that the cause is elsewhere, or the line where the culprit stands stays on its host."""
    hosts = Hosts(folder, CULPRIT)
    try:
        text = hosts.until(0, "codescent:   all stacks: ")
        assert "no rank of node0, node1 has moved for" in text
        assert "likely cause: rank 3 on node1 does something that the others do not" in text
        at = text.partition("codescent:   rank 3 (pid ")[2]
        assert " on node1) is at:" in at
        assert " in evaluates_alone\n" in at
        said = hosts.until(1, "codescent: no rank of node1 has moved for ")
        assert said.endswith(" s: node0, which has rank 0, says why\n")
        (event,) = [one for one in RunFolder.open(folder / "run").read_events() if one["kind"] == "hang"]
        assert (event["ranks"], event["host"], len(event["steps"])) == ([3], "node0", 4)
    finally:
        hosts.close()


def test_a_host_that_cannot_be_reached_is_what_the_verdict_says(folder: Path) -> None:
    """Fault: behind a cut link both launchers wait for each other's answer for ever, or blame ranks of their own."""
    hosts = Hosts(folder, "meet() if rank < 2 else None\nready()\nin_torch()", reaches=False)
    try:
        text = hosts.until(0, "codescent:   all stacks: ")
        assert "no rank of node0 has moved for" in text
        assert "likely cause: all these ranks wait: another host, whose supervisor is silent, holds them up" in text
    finally:
        hosts.close()
