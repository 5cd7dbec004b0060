"""In: a plan with asynchronous gossip, a simulated network. Out: who is given work, who averages with whom and when.
Does not compute (ranks_walk.py does). Pairs are drawn as in a run (gossip_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from codescent.cost.events import Clock, Event, Process
from codescent.cost.network import Network
from codescent.plan import DTYPE_BYTES, Plan
from codescent.strategies.gossip_graphs import pairs_of


class Averages:
    """All averages of pairs of replicas, for `steps` steps of as many portions as there are ranks.

    Args:
        plan: of a run.
        clock, network: of the walk.
        steps: that are walked.
        sends: called with a rank and the bytes that it sends.

    Attributes:
        staleness: of each update: averages of its replica since the weights of its gradient were read.
    """

    def __init__(
        self, plan: Plan, clock: Clock, network: Network, steps: int, sends: Callable[[int, float], None]
    ) -> None:
        self.clock, self.network, self.sends = clock, network, sends
        self.pairs, self.every, replicas = pairs_of(plan), plan.layout.gossip_every, plan.mesh.world_size
        numel = sum(tensor.parameter.numel for tensor in plan.trained)
        self.bytes = float(numel * DTYPE_BYTES[plan.trained[0].optimizer_dtype])
        self.left = steps * replicas  # portions
        self.updates, self.begun, self.changes = [0] * replicas, [0] * replicas, [0] * replicas
        self.flying: dict[int, Event] = {}  # by active replica: its last average
        self.staleness: list[int] = []

    def take(self, rank: int) -> bool:
        """Give a rank its next portion. False: there is none left."""
        self.left -= 1
        return self.left >= 0

    def merge(self, rank: int) -> None:
        """Take the weights as they are now."""
        self.staleness.append(self.changes[rank])
        self.changes[rank] = 0

    def average(self, rank: int) -> Iterator[Event]:
        """After an update: begin an average, if one is due. Yields the end of the one before."""
        self.updates[rank] += 1
        if not self.pairs.is_active(rank) or self.updates[rank] % self.every:
            return
        if rank in self.flying:
            yield self.flying[rank]
        partner = self.pairs.partner(rank, 0, self.begun[rank])
        self.begun[rank] += 1
        self.flying[rank] = Event()
        self.clock.start(self._carry(rank, partner, self.flying[rank]))

    def _carry(self, rank: int, partner: int, back: Event) -> Process:
        """Weights to the passive replica, their change back."""
        for sender, receiver in ((rank, partner), (partner, rank)):
            self.sends(sender, self.bytes)
            yield self.network.share(sender, receiver, self.bytes)
            self.changes[receiver] += 1
        self.clock.happens(back)
