"""In: a command, machines, a site. Out: a Job: everything that a script for it says. Checks hosts and slots.
Does not write a script (a file for each target does)."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.config.given import shown
from codescent.jobs.grace import LEAST_GRACE_S
from codescent.jobs.leftovers import mark_of
from codescent.jobs.site import Site, seconds_of
from codescent.launch.environment import PORTS
from codescent.plan import MOST_RANKS

NAME_CHARS = 63
HOST = re.compile(r"(?=.{1,253}$)(?![._-])[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*(?<![._-])")
"""Names that resolvers take: parts of 1 to 63 characters with dots between."""


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
        run: the run folder, as the config names it; of an own script: where --submit keeps its jobs.
        trains: whether the ranks save when they are asked to, and are then started again: not those of the doctor.
        has_checkpoints: whether the run folder says how long checkpoints take: not that of an own script.
        grace_s: seconds before the time limit at which the run is asked to save, by the checkpoints of now.
        least_nodes: with which an elastic job begins; None: it is not elastic.
        restarts: how often torchrun starts all ranks again.
        times: how many jobs follow each other.
        agents: words for all agents.
        survives: words for the agents of a run that goes on after losses (survive.on_loss); none: it ends.
        spares: processes of all hosts that wait for a place.
        saved_as: the file of the script; None: it is printed.
        does: what the script does, for its first comment.
        record: the folder in which a submitted job is written down; None: --submit is not given.
    """

    name: str
    said: str
    words: tuple[str, ...]
    python: tuple[str, ...]
    folder: Path
    slots: tuple[int, ...]
    hosts: tuple[str, ...]
    site: Site
    run: Path
    trains: bool = True
    has_checkpoints: bool = True
    grace_s: int = LEAST_GRACE_S
    least_nodes: int | None = None
    restarts: int = 0
    times: int = 1
    saved_as: Path | None = None
    record: Path | None = None
    survives: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    spares: int = 0
    does: str = "begins the run, and the same continues it."

    @property
    def mark(self) -> str:
        """What marks the processes of the run in their environment."""
        return mark_of(self.folder / self.run)

    @property
    def port(self) -> int:
        """A port for launchers whose nodes have to agree on one before they meet: that of this run."""
        return PORTS[zlib.crc32(self.mark.encode()) % len(PORTS)]

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

    def machines(self) -> str:
        """The ranks and nodes in words."""
        if len(set(self.slots)) > 1:
            each = (f"{slots} on {host}" for host, slots in zip(self.hosts, self.slots, strict=True))
            return f"{counted(self.ranks, 'rank')}: {', '.join(each)}"
        if self.nodes == 1:
            return f"{counted(self.ranks, 'rank')} on one node"
        return f"{counted(self.ranks, 'rank')}: {self.nodes} nodes with {counted(self.devices, 'rank')} each"


def read_hosts(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts and slots of a list such as "node1:4,node2:2".

    Raises UserError: every entry that cannot be read, hosts without slots, and hosts that are named twice.
    """
    problems: list[str] = []
    found, seen = dict[str, int](), set[str]()
    for entry in (one.strip() for one in text.split(",")):
        host, colon, slots = entry.partition(":")
        if HOST.fullmatch(host) is None or _is_ipv6(entry):
            problems.append(_no_host(entry, "write HOST:SLOTS, such as node1:4, with commas between"))
        elif not colon:
            problems.append(f"--hosts: {host} has no slots; write {host}:N, where N is its number of ranks")
        elif re.fullmatch(r"0*[1-9]\d{0,6}", slots, re.ASCII) is None or int(slots) > MOST_RANKS:
            wanted = f"its number of ranks is a whole number, at least 1 and at most {MOST_RANKS:,}"
            problems.append(f"--hosts: {host} has {shown(slots)} slots; {wanted}")
        elif host.lower() in seen:
            problems.append(f"--hosts: {host} is named twice; give it once, with all its slots")
        else:
            found[host] = int(slots)
            seen.add(host.lower())
    if problems:
        raise UserError(*problems)
    return tuple(found), tuple(found.values())


def names_of(text: str) -> list[str]:
    """The hosts of a list, whose slots do not matter. Raises UserError: every entry that is not a host."""
    names = [entry.strip().partition(":")[0] for entry in text.split(",")]
    problems = [_no_host(entry, "write the names of hosts, with commas between")
                for entry, name in zip(text.split(","), names, strict=True)
                if HOST.fullmatch(name) is None or _is_ipv6(entry)]  # fmt: skip
    if problems:
        raise UserError(*problems)
    return list(dict.fromkeys(names))


def _is_ipv6(entry: str) -> bool:
    return "[" in entry or "::" in entry or entry.count(":") > 2


def _no_host(entry: str, wanted: str) -> str:
    """Why an entry is refused."""
    if _is_ipv6(entry):
        wanted = "addresses of IPv6 are not taken: give the name of the host, or its address of IPv4"
    elif len(entry.partition(":")[0]) > 63 or ".." in entry:
        wanted += "; a name has parts of 1 to 63 characters with dots between, 253 in all"
    return f"--hosts: given {shown(entry)}; {wanted}"


def job_name(text: str) -> str:
    """A name that every scheduler takes: other characters become dashes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return distinct(name if name[:1].isalpha() else f"run-{name}", text, NAME_CHARS)


def folder_of_script(script: str) -> Path:
    """Where the jobs of an own script are recorded; its name is theirs. It is that of the file. In another folder its
    path is a part: scripts of one name in two folders are two runs."""
    path = Path(script)
    return Path("runs") / job_name(os.path.relpath((path.parent.resolve() / path.name).with_suffix("")))


def distinct(name: str, real: str, longest: int) -> str:
    """The name, if it is the real one and not too long; else with a hash of the real one: other names become the same
    one, too."""
    if name == real and len(name) <= longest:
        return name
    digest = f"-{zlib.crc32(real.encode(errors='surrogateescape')):08x}"
    return name[: longest - len(digest)].rstrip("-._") + digest
