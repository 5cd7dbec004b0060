"""In: what a command line says of machines, and a target. Out: ranks of each machine and their names; else one error.
Does not look whether the machines are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from codescent.base.errors import UserError
from codescent.config.given import shown
from codescent.jobs.job import names_of, read_hosts
from codescent.jobs.targets import TARGETS, Target
from codescent.plan import MOST_RANKS


@dataclass(frozen=True)
class Asked:
    """What a command line says of machines; None: not given.

    Attributes:
        nodes: how many; a pair: the least and the most.
        devices: of each node, with a rank each.
        hosts: such as "a:4,b:2".
        restarts: how often torchrun starts all ranks again.
        times: how many jobs follow each other.
    """

    nodes: tuple[int, int] | None = None
    devices: int | None = None
    hosts: str | None = None
    restarts: int | None = None
    times: int | None = None


@dataclass(frozen=True)
class JobShape:
    """Ranks of each node, the nodes' names (none: a scheduler chooses), and the least nodes of an elastic job."""

    slots: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    least_nodes: int | None = None

    @property
    def possible(self) -> list[int]:
        """The numbers of ranks that the job may have, the largest first."""
        ranks = list(accumulate(self.slots))
        return ranks[(self.least_nodes or len(ranks)) - 1 :][::-1]


def shape_of(name: str, asked: Asked, ranks: int | None) -> JobShape:
    """The machines of a job.

    Args:
        name: of the target.
        asked: what the command line says.
        ranks: number of ranks in the config, for one machine; None: unknown.

    Raises:
        UserError: all that is missing, too much or contradictory.
    """
    target = TARGETS[name]
    elastic = asked.nodes is not None and asked.nodes[0] < asked.nodes[1]
    problems = list(_problems(name, target, asked, ranks, elastic=elastic))
    hosts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    if asked.hosts is not None and not target.schedules:
        try:
            hosts, slots = (tuple(names_of(asked.hosts)), ()) if elastic else read_hosts(asked.hosts)
        except UserError as error:
            problems += error.problems
        if not target.uneven and len(set(slots)) > 1:
            problems.append(f"--hosts {shown(asked.hosts)}: --to {name} needs as many ranks on each host")
    if not problems and (ranks_in_all := _ranks(asked, slots, ranks)) > MOST_RANKS:
        what = "--hosts" if slots else "--nodes and --devices"
        problems.append(f"{what}: {ranks_in_all} ranks: more than anybody has; give at most {MOST_RANKS:,}")
    if problems:
        raise UserError(*problems)
    if elastic:
        assert asked.nodes is not None
        assert asked.devices is not None
        return JobShape((asked.devices,) * asked.nodes[1], hosts, asked.nodes[0])
    if hosts:
        return JobShape(slots, hosts)
    return JobShape((asked.devices or ranks or 1,) * (asked.nodes or (1, 1))[1])


def _ranks(asked: Asked, slots: tuple[int, ...], ranks: int | None) -> int:
    """How many ranks there are in all, at most."""
    return sum(slots) or (asked.devices or ranks or 1) * (asked.nodes or (1, 1))[1]


def _problems(name: str, target: Target, asked: Asked, ranks: int | None, *, elastic: bool) -> Iterator[str]:
    """Why the machines do not fit the target."""
    nodes = 1 if asked.nodes is None else asked.nodes[1]
    uses_hosts = asked.hosts is not None and not elastic
    if asked.hosts is not None and target.schedules:
        given = f"--hosts {shown(asked.hosts)}"
        yield f"{given}: with --to {name} the scheduler chooses the machines; give --nodes and --devices"
    if uses_hosts and not target.schedules and (asked.nodes is not None or asked.devices is not None):
        yield "--hosts says which nodes there are, and how many ranks each has: leave out --nodes and --devices"
    if uses_hosts and name == "local":
        yield "--hosts: --to local is this machine; for others: --to ssh, mpirun or torchrun"
    if name == "local" and nodes > 1:
        yield f"--nodes {nodes}: --to local is this machine; for others: --to ssh, mpirun or torchrun with --hosts"
    elif not (target.schedules or elastic or asked.hosts) and (nodes > 1 or name == "ssh"):
        yield f"--to {name} needs the names of the machines: --hosts node1:4,node2:4"
    if elastic and not target.elastic:
        yield f"--nodes {asked.nodes[0]}:{nodes}: only --to torchrun takes nodes that come and go; give one number"  # type: ignore[index]
    elif elastic and (asked.hosts is None or "," in asked.hosts or ":" in asked.hosts):
        yield "--nodes A:B needs the machine where all others meet: --hosts with one name or address, without slots"
    if asked.devices is None and (elastic or (asked.hosts is None and (target.schedules or ranks is None))):
        yield f"--to {name} needs the number of ranks on each node: --devices N (one for each GPU)"
    if asked.restarts is not None and name not in ("torchrun", "torchx"):
        yield f"--max-restarts: --to {name} has no agent that starts all ranks again; leave it out"
    if asked.times is not None and name != "slurm":
        yield f"--times {asked.times}: only jobs of SLURM follow each other; start the script again to go on"
