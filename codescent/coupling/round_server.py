"""In: changes of weights that workers push after rounds of steps. Out: the weights of a server, by an outer optimizer.
Does not learn who arrives when (servers/arrivals.py does) and does not answer requests (server_requests.py does)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from codescent.coupling.outer_optimizer import OuterOptimizer
from codescent.coupling.parameter_server import LOOK_S, WeightServer
from codescent.coupling.pushes import Push, is_finite
from codescent.coupling.told import nonsense
from codescent.plan import Plan
from codescent.servers import Arrivals, Ledger, Portion, Speeds

FLOOR_S = 0.05
"""Least seconds for which a round waits after its quorum: less than scheduling noise would refuse equal workers."""


class RoundServer(WeightServer):
    """A server of changes. A version of its weights is made of the rounds of all workers, or of one change.

    Rounds are weighted by their tokens, as the replicas of local SGD are. With `quorum` a round ends without those who
    are late: their changes are refused and counted, and their samples are not used (Chen et al. 2016, "Revisiting
    distributed synchronous SGD", backup workers).
    """

    outer: OuterOptimizer

    def __init__(
        self,
        plan: Plan,
        index: int,
        optimizer: OuterOptimizer,
        servers: dist.ProcessGroup | None,
        first_step: int,
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(plan, index, optimizer, servers, first_step, stop_requested)
        self.outer, self.quorum = optimizer, plan.layout.quorum
        self.progress: dict[Portion, int] = {}  # steps taken of portions that are not done
        self.speeds = Speeds(self.period) if plan.layout.local_steps == "by_speed" else None
        self.arrivals = Arrivals(FLOOR_S)
        self.begun_s = self.quorum_s = time.monotonic()
        self.arrived: dict[int, float] = {}  # of this round: seconds by worker

    def begin(self, pushes: int) -> None:
        """Count versions on where the order ends: with steps by speed a portion has several pushes."""
        if self.speeds is not None:
            self.ledger = Ledger.restored({**self.ledger.state(), "pushes": pushes}, self.life)

    def serve(self, number: int, rate: float) -> bool:
        """See WeightServer. The first round begins here: before it, all ranks may have validated and saved."""
        self.begun_s = time.monotonic()
        return super().serve(number, rate)

    def _steps_of(self, worker: int, portion: Portion) -> dict[str, int]:
        first = self.progress.get(portion, 0)
        steps = self.period if self.speeds is None else self.speeds.steps(worker)
        return {"first": first, "count": min(steps, self.period - first)}

    def _add(self, push: Push, staleness: int) -> None:
        facts = push.facts
        if facts["finite"] and not is_finite(push.gradients):  # it would be added to the weights
            raise nonsense(self.who(push.worker), "a push", "with a change that is not finite, and says that it is")
        super()._add(push, staleness)
        self.queue.step.skips += int(facts["skips"])
        if facts["skips"] or not facts["finite"]:
            self.queue.step.unsound.add(push.worker)
        if self.speeds is not None:
            self.speeds.record(push.worker, facts["count"], facts["seconds"])
        if push.is_last:
            self.progress.pop(push.portion, None)
        else:
            self.progress[push.portion] = push.first + facts["count"]
        if self.quorum is not None:
            self.arrived[push.worker] = time.monotonic() - self.begun_s
            if len(self.arrived) == self.quorum:
                self.quorum_s = time.monotonic()

    def _look_s(self) -> float:
        left_s = self._left_s()
        return LOOK_S if left_s is None else max(0.0, min(LOOK_S, left_s))

    def _left_s(self) -> float | None:
        """Seconds until the round ends without those who are late; None: there is no quorum yet."""
        if self.quorum is None or len(self.arrived) < self.quorum:
            return None
        wait_s = self.arrivals.wait_s(self.quorum_s - self.begun_s)
        return self.quorum_s + wait_s - time.monotonic()

    def _close_late(self, rate: float) -> bool:
        left_s = self._left_s()
        if left_s is None or left_s > 0 or not self.ledger.close():
            return False
        self.queue.drop_open()
        self._update(rate)
        self.queue.complete_step()
        return True

    @torch.no_grad()
    def _update(self, rate: float) -> None:
        """One step of the outer optimizer, with the mean of the pushes."""
        pushes, self.summed = sorted(self.summed, key=lambda push: (push.portion, push.worker)), []
        counts = [push.facts["count"] for push in pushes]
        whole = sum(counts) if self.quorum is not None else self.period * self.workers
        self.queue.step.square += sum(push.square * count for push, count in zip(pushes, counts, strict=True)) / whole
        self._note_refused([push for push in pushes if not push.facts["finite"]])
        total = mean_change(pushes)
        if total is not None:
            views, begin = [], 0
            for piece, weight in zip(self.part.pieces, self.outer.weights, strict=True):
                views.append(total[begin : begin + piece.numel].view_as(weight.master))
                begin += piece.numel
            self.outer.rule.step(views)
        if self.quorum is not None:
            self.arrivals.record([self.arrived.get(worker) for worker in range(self.workers)])
            self.arrived, self.begun_s = {}, time.monotonic()


def mean_change(pushes: Sequence[Push]) -> torch.Tensor | None:
    """The mean of finite changes, weighted by tokens; None: there is no such change. Overwrites the changes."""
    good = [push for push in pushes if push.facts["finite"]]
    tokens = sum(push.facts["tokens"] for push in good)
    total: torch.Tensor | None = None
    for push in good:
        part = push.gradients.mul_(push.facts["tokens"] / max(1, tokens))
        total = part if total is None else total.add_(part)
    return total
