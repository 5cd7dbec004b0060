"""In: a plan with parameter servers, a simulated network. Out: who is served when: pushes applied, weights granted.
Decides nothing itself: the rules are those of a run (codescent/servers). Does not compute (ranks_walk.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from codescent.cost.events import Clock, Event, Process
from codescent.cost.network import Network
from codescent.plan import DTYPE_BYTES, Collective, Plan
from codescent.servers import Arrivals, Decision, Ledger, Portion, Portions, Speeds, Verdict


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
        self.period = plan.schedule.period
        own = layout.updates == "synchronous" and layout.quorum is not None
        self.portions = Portions(workers, 0, steps, own=own, period=self.period)
        self.speeds = Speeds(self.period) if layout.local_steps == "by_speed" else None
        self.progress: dict[Portion, int] = {}  # steps taken of portions that are not done
        self.ends: dict[int, int] = {}  # by worker: the step of its portion before which it pushes
        self.quorum, self.arrivals, self.arrived = layout.quorum, Arrivals(0.0), dict[int, float]()
        self.begun_s, self.round = 0.0, 0
        self.pushed, self.refused = [0] * workers, [0] * workers
        self.numbers = [0] * workers  # of each worker's last push
        self.held: dict[int, Portion] = {}
        self.staleness: list[int] = []

    @property
    def pushed_bytes(self) -> float:
        """Bytes that a worker sends for a portion."""
        return sum(queue.push_bytes for queue in self.queues)

    def take(self, worker: int) -> range:
        """Give a worker its next portion. Returns the steps of it before its next push; none: all is done."""
        portion = self.portions.take(worker)
        if portion is None:
            self._release(worker)
            return range(0)
        self.held[worker] = portion
        first = self.progress.get(portion, 0)
        steps = self.period if self.speeds is None else self.speeds.steps(worker)
        self.ends[worker] = min(self.period, first + steps)
        return range(first, self.ends[worker])

    def measured(self, worker: int, steps: int, seconds: float) -> None:
        """How long a worker took for the steps before its last one of a push."""
        if self.speeds is not None:
            self.speeds.record(worker, steps - 1, seconds)

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
            if self.quorum is not None and not (self.portions.finished or self.portions.offers(worker)):
                continue  # it has done its part of this round
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
                self.pushed[worker] += 1
                self.refused[worker] += decision.verdict is Verdict.REFUSED
                if decision.verdict is Verdict.APPLY:
                    self._done(queue, worker, decision)
            self.clock.happens(applied)
            return True
        return False

    def _done(self, queue: _Queue, worker: int, decision: Decision) -> None:
        """The first server has applied a push."""
        self.staleness.append(decision.version - decision.base)
        portion = self.held.pop(worker)
        if self.ends[worker] == self.period:
            self.portions.done(worker, portion)
            self.progress.pop(portion, None)
        else:
            self.progress[portion] = self.ends[worker]
        if self.quorum is None:
            return
        self.arrived[worker] = self.clock.now_s - self.begun_s
        if decision.completes:
            self._begin_round()
        elif len(self.arrived) == self.quorum:
            self.clock.start(self._close(queue, self.round))

    def _begin_round(self) -> None:
        self.arrivals.record([self.arrived.get(worker) for worker in range(len(self.numbers))])
        self.arrived, self.begun_s, self.round = {}, self.clock.now_s, self.round + 1

    def _close(self, queue: _Queue, number: int) -> Process:
        """End a round at its deadline, if it has not ended before."""
        wait_s = self.arrivals.wait_s(self.clock.now_s - self.begun_s)
        if math.isinf(wait_s):
            return
        yield wait_s
        if self.round == number and queue.ledger.close():
            self.portions.drop_open()
            self._begin_round()
            self._settle(queue)

    def counted(self, worker: int) -> float:
        """The share of a worker's pushes that was applied."""
        return 1.0 - self.refused[worker] / max(1, self.pushed[worker])

    def _release(self, worker: int) -> None:
        for queue in self.queues:
            queue.ledger.release(worker)
            self._settle(queue)
