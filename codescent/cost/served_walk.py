"""In: a plan with parameter servers, a simulated network. Out: who is served when: pushes applied, weights granted.
Decides nothing itself: the rules are those of a run (codescent/servers). Does not compute (ranks_walk.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from codescent.cost.events import Clock, Event, Process
from codescent.cost.network import Network
from codescent.plan import DTYPE_BYTES, Collective, Plan
from codescent.servers import Ledger, Portion, Portions, Verdict


@dataclass
class _Queue:
    """One server: its ledger, the pushes and the pulls that wait."""

    ledger: Ledger
    rank: int
    push_bytes: float
    pull_bytes: float
    pushes: list[tuple[int, int, Event]] = field(default_factory=list)  # worker, number, applied
    pulls: list[tuple[int, Event]] = field(default_factory=list)  # worker, granted
    tickets: dict[int, int] = field(default_factory=dict)  # by worker


class Servers:
    """All servers of a plan, for `steps` steps.

    Attributes:
        staleness: of each push that the first server has applied, in versions.
    """

    def __init__(self, plan: Plan, clock: Clock, network: Network, steps: int) -> None:
        self.clock, self.network = clock, network
        workers, layout = plan.mesh.world_size, plan.layout
        bound = 0 if layout.updates == "synchronous" else layout.staleness
        together = workers if layout.in_steps else 1
        pushed = [float(t.payload_bytes) for t in plan.traffic if t.collective is Collective.PUSH]
        pulled = [DTYPE_BYTES[plan.work.precision] * sum(piece.numel for piece in pieces) for pieces in plan.pieces]
        sizes = zip(plan.servers, pushed, map(float, pulled), strict=True)
        self.queues = [_Queue(Ledger(bound, together), rank, push, pull) for rank, push, pull in sizes]
        self.portions = Portions(workers, 0, steps)
        self.numbers = [0] * workers  # of each worker's last push
        self.held: dict[int, Portion] = {}
        self.staleness: list[int] = []

    @property
    def pushed_bytes(self) -> float:
        """Bytes that a worker sends for a portion."""
        return sum(queue.push_bytes for queue in self.queues)

    def take(self, worker: int) -> bool:
        """Give a worker its next portion. False: there is none left."""
        portion = self.portions.take(worker)
        if portion is None:
            self._release(worker)
            return False
        self.held[worker] = portion
        return True

    def push(self, worker: int) -> Iterator[Event]:
        """Send a portion's gradients to all servers. Yields the events after which all have applied them."""
        self.numbers[worker] += 1
        applied = [Event() for _ in self.queues]
        for index in self._turned(worker):
            self.clock.start(self._send_push(self.queues[index], worker, self.numbers[worker], applied[index]))
        yield from applied

    def pull(self, worker: int) -> Iterator[Event]:
        """Fetch the weights of all servers. Yields the events after which all are there."""
        arrived = [Event() for _ in self.queues]
        for index in self._turned(worker):
            self.clock.start(self._send_weights(self.queues[index], worker, arrived[index]))
        yield from arrived
        self.portions.weights_given(worker)

    def _turned(self, worker: int) -> list[int]:
        """The servers, beginning with another one for each worker: connections share a card, they do not queue up."""
        count = len(self.queues)
        return [(worker + index) % count for index in range(count)]

    def _send_push(self, queue: _Queue, worker: int, number: int, applied: Event) -> Process:
        yield self.network.share(worker, queue.rank, queue.push_bytes)
        queue.pushes.append((worker, number, applied))
        self._settle(queue)

    def _send_weights(self, queue: _Queue, worker: int, arrived: Event) -> Process:
        granted = Event()
        queue.pulls.append((worker, granted))
        self._settle(queue)
        yield granted
        yield self.network.share(queue.rank, worker, queue.pull_bytes)
        self.clock.happens(arrived)

    def _settle(self, queue: _Queue) -> None:
        """Apply and grant what the ledger allows now."""
        while self._apply_one(queue):
            pass
        first, workers = self.queues.index(queue), len(self.numbers)
        for waiting in sorted(queue.pulls, key=lambda one: (one[0] + first) % workers):
            worker, granted = waiting
            if (grant := queue.ledger.pull(worker)) is not None:
                queue.tickets[worker] = grant.ticket
                queue.pulls.remove(waiting)
                self.clock.happens(granted)

    def _apply_one(self, queue: _Queue) -> bool:
        for waiting in queue.pushes:
            worker, number, applied = waiting
            decision = queue.ledger.push(worker, number, queue.tickets[worker])
            if decision.verdict is Verdict.WAIT:
                continue
            queue.pushes.remove(waiting)
            if queue is self.queues[0]:
                self.staleness.append(decision.version - decision.base)
                self.portions.done(worker, self.held.pop(worker))
            self.clock.happens(applied)
            return True
        return False

    def _release(self, worker: int) -> None:
        for queue in self.queues:
            queue.ledger.release(worker)
            self._settle(queue)
