"""In: a program of ranks. Out: two launchers of one run, as on two hosts, with two ranks each that run the program.
Both are on this machine: a host is what a launcher calls itself. Does not decide what is tested: tests/faults/ does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hanging import RANK, SETUP
from runs import environment
from test_launch_agent import free_port
from test_launch_local import PRELUDE

from codescent.record import RunFolder

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
