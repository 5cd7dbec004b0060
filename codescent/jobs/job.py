"""In: a command, machines, a site. Out: a Job: everything that a script for it says. Checks hosts and slots.
Does not write a script (a file for each target does)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.jobs.site import Site, seconds_of

PORT = 29_400
"""Where rank 0 listens, on targets that need a fixed port."""
NAME_CHARS = 63
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
LEAST_GRACE_S = 60


@dataclass(frozen=True)
class Job:
    """A run as a cluster starts it.

    Attributes:
        name: of the job and its logs: letters, digits, dots, dashes and underscores.
        said: the command that wrote the script, for its first comment.
        words: the command of each rank.
        python: the same as words after `python`: `-m codescent train ...` or `SCRIPT.py ...`.
        folder: where the command is to run.
        slots: ranks of each node. Their sum is the number of ranks.
        hosts: names of the nodes; empty: a scheduler chooses them.
        site: the cluster.
        mark: what marks the processes of the run in their environment.
        grace_s: seconds before the time limit at which the run is asked to save.
        least_nodes: with which an elastic job begins; None: it is not elastic.
        restarts: how often torchrun starts all ranks again.
        times: how many jobs follow each other.
        saved_as: the file of the script; None: it is printed.
    """

    name: str
    said: str
    words: tuple[str, ...]
    python: tuple[str, ...]
    folder: Path
    slots: tuple[int, ...]
    hosts: tuple[str, ...]
    site: Site
    mark: str
    grace_s: int = LEAST_GRACE_S
    least_nodes: int | None = None
    restarts: int = 0
    times: int = 1
    saved_as: Path | None = None

    @property
    def nodes(self) -> int:
        """How many machines."""
        return len(self.slots)

    @property
    def ranks(self) -> int:
        """How many ranks, on all nodes."""
        return sum(self.slots)

    @property
    def devices(self) -> int:
        """Ranks of each node, where all nodes are alike."""
        assert len(set(self.slots)) == 1
        return self.slots[0]

    @property
    def limit_s(self) -> int | None:
        """The time limit in seconds; None: there is none."""
        return None if self.site.time is None else seconds_of(self.site.time)

    def shape(self) -> str:
        """The ranks and nodes in words."""
        if len(set(self.slots)) > 1:
            return f"{counted(self.ranks, 'rank')} on {', '.join(map(str, self.slots))} slots of {self.nodes} nodes"
        if self.nodes == 1:
            return f"{counted(self.ranks, 'rank')} on one node"
        return f"{counted(self.ranks, 'rank')}: {self.nodes} nodes with {counted(self.devices, 'rank')} each"


def read_hosts(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts and slots of a list such as "node1:4,node2:2"; a host without a number has one slot.

    Raises UserError: every entry that cannot be read, and hosts that are named twice.
    """
    problems: list[str] = []
    found: dict[str, int] = {}
    for entry in text.split(","):
        host, colon, slots = entry.strip().partition(":")
        if HOST.fullmatch(host) is None or (colon and not (slots.isascii() and slots.isdigit() and int(slots))):
            problems.append(f'--hosts: given "{entry}"; write HOST:SLOTS, such as node1:4, with commas between')
        elif host in found:
            problems.append(f"--hosts: {host} is named twice; give it once, with all its slots")
        else:
            found[host] = int(slots or 1)
    if problems:
        raise UserError(*problems)
    return tuple(found), tuple(found.values())


def job_name(text: str) -> str:
    """A name that every scheduler takes: other characters become dashes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:NAME_CHARS]
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def grace_of(save_s: Sequence[float]) -> int:
    """Seconds before the limit at which to save: twice as long as the longest save, and half a minute for a step."""
    return max(LEAST_GRACE_S, round(30 + 2 * max(save_s, default=0.0)))
