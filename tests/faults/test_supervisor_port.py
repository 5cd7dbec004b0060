"""In: the port at which the supervisor of rank 0's host hears those of other hosts. Out: strangers are rejected there.
Does not attack the ports of ranks: test_slow_hosts.py does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hanging_hosts import CULPRIT, Hosts
from runs import environment

from codescent.base.token import key_of
from codescent.launch.other_hosts import RUN

pytestmark = [
    pytest.mark.slow,  # an outsider is as patient as a listener
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc"),
]

MOVES = """
number = 0
ready()
while not (folder / "attacked").exists():
    number += 1
    own.at(3.6 + number / 1e6, 0, "reduce")
    time.sleep(0.02)
"""
OUTSIDER = Path(__file__).resolve().parents[1] / "outsider.py"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in ("attacked", "go"):
        (tmp_path / name).touch()


def test_s1_s2_an_outsider_reaches_one_address_is_rejected_and_hides_no_verdict(folder: Path) -> None:
    """Fault: it listens everywhere; who has no token is heard, fills the memory, or keeps the other hosts out."""
    hosts = Hosts(folder, MOVES + CULPRIT)
    try:
        end_s = time.monotonic() + 60
        while not all((folder / f"rank-{rank}").exists() for rank in range(4)):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        address, _, port = json.loads((folder / "hub").read_text()).partition(" ")
        assert listeners(hosts.launchers[0].pid) == [(address, int(port))]
        assert (address, listeners(hosts.launchers[1].pid)) == ("127.0.0.1", [])
        asked = {"key": key_of({"CODESCENT_TOKEN": "a token"}, RUN).hex(), "ports": [[address, int(port)]]}
        done = subprocess.run(
            [sys.executable, str(OUTSIDER), json.dumps(asked)],
            env=environment(), text=True, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        ours, *attacks = map(json.loads, done.stdout.splitlines())
        assert ours == [[address, int(port)]], "it speaks as our listeners do"
        ends = {one["attack"]: one["end"] for one in attacks}
        assert ends.pop("right token, store") == "proved, closed", "a frame that is too large ends the connection"
        assert set(ends.values()) == {"closed"}, ends
        assert {one["bytes"] for one in attacks} == {0}
        assert [one.poll() for one in hosts.launchers] == [None, None]
        (folder / "attacked").touch()
        text = hosts.until(0, "codescent:   all stacks: ")
        assert "likely cause: rank 3 on node1 does something that the others do not" in text
    finally:
        hosts.close()


def listeners(pid: int) -> list[tuple[str, int]]:
    """Where a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]
