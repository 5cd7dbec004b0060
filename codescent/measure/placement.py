"""In: the host of each rank. Out: `RankPlacement`: which ranks share a node, and which reach each other over a link.
Does not choose who is where (a launcher does) and makes no process group (groups.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codescent.base.errors import UserError
from codescent.cost.collective_time import BETWEEN, INSIDE


@dataclass(frozen=True)
class RankPlacement:
    """Where the ranks are.

    Attributes:
        hosts: the host of each rank.
        devices: ranks of a node.
        nodes: how many there are.
    """

    hosts: tuple[str, ...]
    devices: int
    nodes: int

    def members(self, link: str, rank: int) -> tuple[int, ...]:
        """The ranks that a rank reaches over a link: all of its node, or those with its place on each node."""
        if link == INSIDE:
            first = rank - rank % self.devices
            return tuple(range(first, first + self.devices))
        return tuple(range(rank % self.devices, len(self.hosts), self.devices))

    @property
    def links(self) -> tuple[str, ...]:
        """Those that ranks can measure."""
        return tuple(name for name, ranks in ((INSIDE, self.devices), (BETWEEN, self.nodes)) if ranks > 1)


def placement(hosts: Sequence[str], leaders: Sequence[int]) -> RankPlacement:
    """How ranks lie on nodes. `hosts`: of each rank; `leaders`: the first rank of each node.

    Raises UserError: a price takes neighbouring ranks to share a node, and all nodes to be alike; these do not.
    """
    devices, left = divmod(len(hosts), len(leaders))
    wanted = [devices * node for node in range(len(leaders))]
    if (
        left
        or list(leaders) != wanted
        or any(hosts[rank] != hosts[rank - rank % devices] for rank in range(len(hosts)))
    ):
        ranks = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
        shown = "; ".join(f"{host}: {', '.join(map(str, found))}" for host, found in list(ranks.items())[:4])
        raise UserError(
            f"the ranks are not divided evenly over nodes, one node after the other ({shown}); start as many on each "
            "node, neighbours together (srun --distribution=block)"
        )
    return RankPlacement(tuple(hosts), devices, len(leaders))
