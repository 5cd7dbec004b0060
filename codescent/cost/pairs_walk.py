"""In: a plan with asynchronous gossip, a simulated network. Out: who is given work, who averages with whom and when.
Does not compute (ranks_walk.py does). Pairs are drawn as in a run (gossip_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from codescent.cost.coding import ADD, COPY, Coding
from codescent.cost.diary import Diary
from codescent.cost.doing import Doing
from codescent.cost.events import Clock, Event, Process
from codescent.cost.handed import Handed
from codescent.cost.network import Network
from codescent.cost.processor import Processor
from codescent.plan import DTYPE_BYTES, Plan
from codescent.strategies.gossip_graphs import pairs_of


class Averages(Handed):
    """All averages of pairs of replicas: see coupling/pair_exchange.py.

    Args:
        plan: of a run.
        clock, network: of the walk.
        processors: of the ranks. Threads beside the computation share them with it.
        coding: how fast they are.
        sends: called with a rank and the bytes that it sends.
        diary: of what ranks wait for.
    """

    def __init__(
        self,
        plan: Plan,
        clock: Clock,
        network: Network,
        processors: Sequence[Processor],
        coding: Coding,
        sends: Callable[[int, float], None],
        diary: Diary,
    ) -> None:
        super().__init__(plan, clock)
        self.network, self.processors, self.sends, self.diary = network, processors, sends, diary
        self.pairs, self.every, replicas = pairs_of(plan), plan.layout.gossip_every, plan.mesh.world_size
        numel = sum(tensor.parameter.numel for tensor in plan.trained)
        self.bytes = float(numel * DTYPE_BYTES[plan.trained[0].optimizer_dtype])
        self.copy_s, self.add_s = COPY.seconds(numel, coding), ADD.seconds(numel, coding)
        self.left = self.first = 0  # portions that are left; the step after which the ranks last met
        self.updates, self.begun, self.changes = [0] * replicas, [0] * replicas, [0] * replicas
        self.flying: dict[int, Event] = {}  # by active replica: its last average

    def begin(self, first: int, end: int) -> None:
        """See Handed."""
        super().begin(first, end)
        self.left, self.first = (end - first) * self.workers, first
        self.updates, self.begun = [0] * self.workers, [0] * self.workers

    def take(self, rank: int) -> Generator[Event | float, None, bool]:
        """Give a rank its next portion. False: there is none left. It asks rank 0."""
        begin_s = self.clock.now_s
        yield from self.network.request(rank, 0)
        self.diary.waited(rank, Doing.MESSAGE, begin_s)
        self.left -= 1
        return self.left >= 0

    def merge(self, rank: int) -> float:
        """Take the weights as they are now. Returns seconds of copies: of weights that an average has changed into the
        optimizer's, and of the updated ones back."""
        self.staleness.append(self.changes[rank])
        copies = 2 if self.changes[rank] else 1
        self.changes[rank] = 0
        return copies * self.copy_s

    def average(self, rank: int) -> Process:
        """After an update: begin an average, if one is due. The one before has come back by then."""
        self.portion_done()
        self.updates[rank] += 1
        if not self.pairs.is_active(rank) or self.updates[rank] % self.every:
            return
        yield from self.land(rank)
        partner = self.pairs.partner(rank, self.first, self.begun[rank])
        self.begun[rank] += 1
        yield from self.processors[rank].work(self.copy_s)
        self.flying[rank] = Event()
        self.clock.start(self._carry(rank, partner, self.flying[rank]))

    def land(self, rank: int) -> Process:
        """Wait for the average that is under way."""
        if rank in self.flying:
            begin_s = self.clock.now_s
            yield self.flying[rank]
            self.diary.waited(rank, Doing.MESSAGE, begin_s)

    def _carry(self, rank: int, partner: int, back: Event) -> Process:
        """Weights to the passive replica, which adds half of the difference; that difference back, which is subtracted.

        Each side changes its weights as soon as it can: neither waits for the other's computation.
        """
        yield from self._send(rank, partner)
        yield from self.processors[partner].work(2 * self.add_s + self.copy_s)
        self.changes[partner] += 1
        yield from self._send(partner, rank)
        yield from self.processors[rank].work(self.add_s)
        self.changes[rank] += 1
        self.clock.happens(back)

    def _send(self, sender: int, receiver: int) -> Process:
        self.sends(sender, self.bytes)
        yield self.network.share(sender, receiver, self.bytes)
