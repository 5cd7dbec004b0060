"""In: two launchers of one run, as on two hosts, whose ranks stand still. Out: one verdict that names the host.
Both are on this machine: a host is what a launcher calls itself. The ranks write their pages by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging import RANK, SETUP
from runs import environment
from test_launch_agent import free_port
from test_launch_local import PRELUDE

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc"),
]

DRIVER = """
import os, sys
from codescent.launch import local, supervisor
from codescent.launch.group import Group
supervisor.host = lambda: "node%s" % sys.argv[1]
host, port = int(sys.argv[1]), int(sys.argv[2])
group = Group(2, 2 * host, 4, "127.0.0.1", port, "a token")
sys.exit(local.run_ranks([sys.executable, *sys.argv[3:]], group, os.environ))
"""
HUB = """
if rank == 0:
    write("hub", own.pages.hub)
if rank == 2:
    wait_for("hub")
    own.pages.hub = json.loads((folder / "hub").read_text()) if {reaches} else "127.0.0.1 1"
write(f"here-{{rank}}", 1)
for other in range(4):
    wait_for(f"here-{{other}}")
own.at(3.6, 0, "reduce")
"""
"""What `codescent` does at the run's store: tests/test_launch_ranks.py."""


class Hosts:
    """The launchers of two hosts with two ranks each."""

    def __init__(self, folder: Path, program: str, *, reaches: bool = True) -> None:
        RunFolder.create(folder / "run", "", {})
        (folder / "program.py").write_text(PRELUDE + RANK + HUB.format(reaches=reaches) + program)
        self.folder, port = folder, free_port()
        self.launchers = [
            subprocess.Popen(
                [sys.executable, "-c", SETUP_OF_LAUNCHERS, str(host), str(port), "program.py", str(folder)],
                cwd=folder,
                env=environment(),
                text=True,
                stderr=subprocess.PIPE,
            )
            for host in range(2)
        ]

    def until(self, host: int, begin: str) -> str:
        """What a launcher says, up to a line that begins so."""
        stderr = self.launchers[host].stderr
        assert stderr is not None
        lines: list[str] = []
        for line in stderr:
            lines.append(line)
            if line.startswith(begin):
                return "".join(lines)
        raise AssertionError(f"no line begins with {begin!r}:\n{''.join(lines)}")

    def close(self) -> None:
        for one in self.launchers:
            one.kill()
            one.communicate()


SETUP_OF_LAUNCHERS = DRIVER.replace("from codescent.launch.group", f"{SETUP}\nfrom codescent.launch.group")
CULPRIT = "meet() if rank != 3 else None\nready()\nevaluates_alone() if rank == 3 else stand()"


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
