"""In: a plan with parameter servers, a simulated network. Out: who is served when: pushes applied, weights granted.
Decides nothing itself: the rules are those of a run (codescent/servers). Does not compute (ranks_walk.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from codescent.cost.coding import COPY, Coding, of_push
from codescent.cost.diary import Diary
from codescent.cost.doing import Doing
from codescent.cost.events import Clock, Event, Process
from codescent.cost.handed import Handed
from codescent.cost.network import Network
from codescent.cost.processor import Processor
from codescent.plan import DTYPE_BYTES, Collective, Plan
from codescent.plan.served import pushes_together
from codescent.servers import Arrivals, Decision, Ledger, Portion, Portions, Speeds, Verdict


@dataclass
class _Queue:
    """One server: its ledger, the pushes and the pulls that wait.

    Attributes:
        receive_s, publish_s: seconds of its processor for a push, and for a version that it sends.
        have: by worker: the version that was sent to it last. It is not sent again.
        published: the version that lies ready to be sent.
    """

    ledger: Ledger
    rank: int
    push_bytes: float
    pull_bytes: float
    receive_s: float = 0.0
    publish_s: float = 0.0
    pushes: list[tuple[int, int, Event]] = field(default_factory=list)  # worker, number, applied
    pulls: list[tuple[int, Event]] = field(default_factory=list)  # worker, granted
    tickets: dict[int, int] = field(default_factory=dict)  # by worker
    have: dict[int, int] = field(default_factory=dict)
    published: int = -1


class Servers(Handed):
    """All servers of a plan.

    Args:
        plan: of a run.
        clock, network: of the walk.
        processors: of all ranks, those that only serve included.
        coding: how fast they are.
        diary: of what workers wait for, and of what servers do.
    """

    def __init__(
        self,
        plan: Plan,
        clock: Clock,
        network: Network,
        processors: Sequence[Processor],
        coding: Coding,
        diary: Diary,
    ) -> None:
        super().__init__(plan, clock)
        self.network, self.processors, self.diary = network, processors, diary
        workers, layout = plan.mesh.world_size, plan.layout
        bound = 0 if layout.updates == "synchronous" else layout.staleness
        together = pushes_together(layout, workers)
        _, received = of_push(plan)
        self.queues = []
        pushed = [float(t.payload_bytes) for t in plan.traffic if t.collective is Collective.PUSH]
        for rank, push, pieces in zip(plan.servers, pushed, plan.pieces, strict=True):
            numel = sum(piece.numel for piece in pieces)
            pulled, ledger = float(DTYPE_BYTES[plan.work.precision] * numel), Ledger(bound, together)
            times = received.seconds(numel, coding), COPY.seconds(numel, coding)
            self.queues.append(_Queue(ledger, rank, push, pulled, *times))
        self.largest_bytes = max(max(queue.push_bytes, queue.pull_bytes) for queue in self.queues)
        self.own = layout.updates == "synchronous" and layout.quorum is not None
        self.reserves = layout.in_steps and len(self.queues) > 1
        self.speeds = Speeds(self.period) if layout.local_steps == "by_speed" else None
        self.progress: dict[Portion, int] = {}  # steps taken of portions that are not done
        self.ends: dict[int, int] = {}  # by worker: the step of its portion before which it pushes
        self.quorum, self.arrivals, self.arrived = layout.quorum, Arrivals(0.0), dict[int, float]()
        self.begun_s, self.round = 0.0, 0
        self.numbers = [0] * workers  # of each worker's last push
        self.held: dict[int, Portion] = {}

    @property
    def pushed_bytes(self) -> float:
        """Bytes that a worker sends for a portion."""
        return sum(queue.push_bytes for queue in self.queues)

    def begin(self, first: int, end: int) -> None:
        """See Handed."""
        super().begin(first, end)
        self.portions = Portions(self.workers, first, end, own=self.own, period=self.period)
        self.begun_s = self.clock.now_s

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

    def push(self, worker: int) -> Process:
        """Send a portion's gradients to all servers. Ends when the first one has said that it is applied.

        Where there are several, the worker tells the first one when all have their part. The first one decides, and the
        others ask it (see `Worker._sent_to_all` of coupling/worker.py).
        """
        self.numbers[worker] += 1
        begin_s = self.clock.now_s
        arrived, applied = ([Event() for _ in self.queues] for _ in range(2))
        for index in self._turned(worker):
            self.clock.start(self._send_part(self.queues[index], worker, arrived[index]))
        yield from arrived
        first = self.queues[0].rank
        if len(self.queues) > 1:
            yield self.network.latency_s(worker, first) * 2  # their answers, and the word to the first one
        self.diary.waited(worker, Doing.SERVER, begin_s)
        begin_s = self.clock.now_s
        for queue, done in zip(self.queues, applied, strict=True):
            queue.pushes.append((worker, self.numbers[worker], done))
            self._settle(queue)
        yield applied[0]
        self.diary.waited(worker, Doing.RANK, begin_s)
        begin_s = self.clock.now_s
        yield self.network.latency_s(worker, first)
        self.diary.waited(worker, Doing.SERVER, begin_s)

    def pull(self, worker: int) -> Process:
        """Fetch the weights of all servers, and ask for work. A request and its answer cross the link one by one.

        Where pulls may wait, the first server grants the weights before they are asked for.
        """
        first, granted, begin_s = self.queues[0], Event(), self.clock.now_s
        there_and_back_s = 2 * self.network.latency_s(worker, first.rank)
        if self.reserves:
            self.clock.start(self._grant(first, worker, granted))
            yield granted
            self.diary.waited(worker, Doing.RANK, begin_s)
            begin_s = self.clock.now_s
            yield there_and_back_s
        arrived = [Event() for _ in self.queues]
        for index in self._turned(worker):
            is_granted = self.reserves and index == 0
            self.clock.start(self._send_weights(self.queues[index], worker, arrived[index], is_granted=is_granted))
        yield from arrived
        leaves_s = max((event.begun_s or 0.0 for event in arrived), default=begin_s)
        yield there_and_back_s  # for work
        asked_s = min(leaves_s, begin_s + self.network.latency_s(worker, first.rank))  # until then the request flew
        self.diary.waited(worker, Doing.SERVER, begin_s, leaves_s, asked_s)
        self.portions.weights_given(worker)

    def _turned(self, worker: int) -> list[int]:
        """The servers, beginning with another one for each worker: connections share a card, they do not queue up."""
        count = len(self.queues)
        return [(worker + index) % count for index in range(count)]

    def _send_part(self, queue: _Queue, worker: int, arrived: Event) -> Process:
        begin_s = self.clock.now_s
        yield self.network.share(worker, queue.rank, queue.push_bytes, self.largest_bytes)
        yield from self.processors[queue.rank].work(queue.receive_s)
        self.diary.did(queue.rank, Doing.RECEIVE, begin_s)
        self.clock.happens(arrived)

    def _grant(self, queue: _Queue, worker: int, granted: Event) -> Process:
        """Wait until a worker may compute with this server's weights."""
        queue.pulls.append((worker, granted))
        self._settle(queue)
        yield 0.0

    def _send_weights(self, queue: _Queue, worker: int, arrived: Event, *, is_granted: bool) -> Process:
        """Send the weights, unless the worker has them: then it is told so."""
        yield self.network.latency_s(worker, queue.rank)
        if not is_granted:
            granted = Event()
            self.clock.start(self._grant(queue, worker, granted))
            yield granted
        arrived.begun_s = begin_s = self.clock.now_s  # until then it has waited for other workers
        version = queue.ledger.version
        if queue.have.get(worker) == version:
            yield self.network.latency_s(worker, queue.rank)
        else:
            if queue.published != version:
                queue.published = version
                yield from self.processors[queue.rank].work(queue.publish_s)
            yield self.network.share(queue.rank, worker, queue.pull_bytes, self.largest_bytes)
            queue.have[worker] = version
            self.diary.did(queue.rank, Doing.ANSWER, begin_s)
        self.clock.happens(arrived)

    def _settle(self, queue: _Queue) -> None:
        """Apply and grant what the ledger allows now."""
        while self._apply_one(queue):
            pass
        first = self.queues.index(queue)
        for waiting in sorted(queue.pulls, key=lambda one: (one[0] + first) % self.workers):
            worker, granted = waiting
            if not first and not (self.portions.finished or self.portions.offers(worker)):
                continue  # it waits for work, or for the last weights
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
            if decision.verdict is Verdict.APPLY:
                self.diary.did(queue.rank, Doing.APPLY, self.clock.now_s)
            if queue is self.queues[0] and decision.verdict is Verdict.APPLY:
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
            self.portion_done()
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
        self.arrivals.record([self.arrived.get(worker) for worker in range(self.workers)])
        self.arrived, self.begun_s, self.round = {}, self.clock.now_s, self.round + 1

    def _close(self, queue: _Queue, number: int) -> Process:
        """End a round at its deadline, if it has not ended before."""
        wait_s = self.arrivals.wait_s(self.clock.now_s - self.begun_s)
        if math.isinf(wait_s):
            return
        yield wait_s
        if self.round == number and queue.ledger.close():
            self.dropped += len(self.portions.drop_open())
            self._begin_round()
            self._settle(queue)

    def _release(self, worker: int) -> None:
        for queue in self.queues:
            queue.ledger.release(worker)
            self._settle(queue)

    def cards(self) -> Iterator[float]:
        """For each server the seconds in which its busiest card receives or sends, whichever is longer."""
        for queue in self.queues:
            yield max(max(card.sending_s, card.receiving_s) for card in self.network.cards_of(queue.rank))
