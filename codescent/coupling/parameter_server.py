"""In: pushes of workers; the weights and the optimizer of one parameter server. Out: weights updated.
Does not decide who waits (servers/ledger.py does) and does not answer requests (server_requests.py does)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from codescent.base.errors import RunFailed
from codescent.base.output import warn
from codescent.base.stopwatch import waiting
from codescent.coupling.lost_peer import is_lost_peer
from codescent.coupling.pushes import Push, is_finite, unsound, untrue
from codescent.coupling.server_requests import Requests
from codescent.coupling.services import WeightUpdater
from codescent.coupling.told import nonsense
from codescent.plan import Plan
from codescent.record import order
from codescent.record.order import Applied
from codescent.servers import Decision, Verdict

TOLD_S = 5.0
"""Seconds in which the workers hear why the run is over: each connects again within a second."""
LOOK_S = 0.2
"""Seconds between two looks at what else may end a step: a failed thread, a request to stop."""


class WeightServer(Requests):
    """One parameter server: the service of its socket, and the updates of its part, in one thread.

    Args:
        plan: of the run.
        index: of this server, among `plan.servers`.
        optimizer: over the pieces of this server.
        servers: process group of all servers, for the norm of a step's gradients; None: there is one.
        first_step: number of complete steps when the command begins.
        stop_requested: whether this process was asked to stop.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        optimizer: WeightUpdater,
        servers: dist.ProcessGroup | None,
        first_step: int,
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(plan, index, optimizer, first_step, stop_requested)
        self.group = servers
        self.to_apply: list[tuple[int, int]] = []  # what the first server has applied, and this one has not
        self.failure: BaseException | None = None
        self.summed: list[Push] = []
        self.order: list[Applied] | None = [] if plan.layout.updates == "asynchronous" else None
        self.closed = False
        self.thread: threading.Thread | None = None
        self.allowed = first_step  # a thread serves the steps before this one

    @property
    def has_ended(self) -> bool:
        """Whether a rank was asked to stop, and all work that was given out is done."""
        return self.ended or self.queue.has_stopped

    def allow(self, number: int) -> None:
        """The thread may serve until the end of the segment of step `number`."""
        if self.thread is None:
            return
        with self.change:
            self.allowed = self.plan.schedule.agrees_next(number)
            self.change.notify_all()

    def begin(self, pushes: int) -> None:
        """So many pushes were applied before this command: see RoundServer."""

    def rewind(self, run: Path, first_step: int) -> None:
        """Remove from the order in the run's folder what came after the checkpoint of this step."""
        self.begin(order.rewind(run, self.index, first_step))

    def write_order(self, run: Path) -> None:
        """Write into the run's folder which pushes were applied since the last call."""
        order.append(run, self.index, self.take_order())

    def take_order(self) -> list[Applied]:
        """The pushes that were applied since the last call."""
        with self.change:
            found, self.order = self.order or [], None if self.order is None else []
            return found

    def close(self) -> None:
        """Disconnect all workers, and drop the process group."""
        with self.change:
            self.closed = True
            self.change.notify_all()
        if self.thread is not None:
            self.thread.join()
        if self.server is not None:
            self.server.close()
        self.group = None

    def buffers(self) -> Iterator[torch.Tensor]:
        """The memory that it holds beside weights and optimizer state: pushes on their way, and weights to be sent."""
        with self.change:
            yield from (*self.incoming.values(), *self.messages.buffers())
            yield from (push.gradients for push in (*self.staged.values(), *self.summed))
            yield from self.part.buffers()

    def raise_failure(self) -> None:
        """Raise the error of a thread of this server, if there is one."""
        if (failure := self.failure or (self.server.failure if self.server else None)) is not None:
            raise failure

    def look_for_dead(self) -> None:
        """Give out again what workers held that have died since the last call.

        Raises RunFailed: the run does not go on without one of them, and no launcher has ended it.
        """
        with self.change:
            for worker in self.membership.new_deaths():
                self.left(worker, "it has died")
                if self.detector is not None:
                    self._tell_death(worker, self.detector.how(worker))

    def _tell_death(self, worker: int, how: str) -> None:
        if worker and self.plan.layout.can_lose_workers:
            warn(f"codescent: rank {worker} {how}: the others go on without it")
            return
        why = "this run needs all its workers" if worker else "only rank 0 writes the run folder"
        raise RunFailed(f"rank {worker} {how}, and {why}; `codescent train --resume` goes on from the last checkpoint")

    def serve(self, number: int, rate: float) -> bool:
        """The SERVE verb: apply pushes until step `number` (from 0) is complete.

        Returns:
            False: the run has ended at step `number` already, because a rank was asked to stop.

        Raises RunFailed: the run is over. The workers hear why; on one machine the launcher ends them.
        """
        try:
            return self._serve(number, rate)
        except RunFailed as error:
            if self.tells and self.server is not None:
                self.server.refuse_all(str(error), TOLD_S)
            raise

    def _serve(self, number: int, rate: float) -> bool:
        with self.change:
            self.stalls.begin()
            if self.index == 0 and self.queue.ends:
                self.queue.begin(number, self.plan.schedule.agrees_next(number))
                for worker in self.ledger.granted:  # they have pulled before this step began
                    self.queue.weights_given(worker)
            self._changed()
            while self.queue.done <= number and not (self.has_ended or self.closed):
                if self._apply_ready(rate) or self._close_late(rate):
                    self._changed()
                    continue
                self.raise_failure()
                if self.stop_requested():
                    self.queue.stop()  # servers but the first are told by the workers
                self.look_for_dead()
                if self.index == 0:
                    self.stalls.check(self.queue.held, set(range(self.workers)) - self.membership.absent)
                with waiting():
                    self.change.wait(self._look_s())
            return not self.has_ended

    def _changed(self) -> None:
        if self.server is not None:
            self.server.changed()

    def _apply_ready(self, rate: float) -> bool:
        """Apply the first push that may be applied, or refuse one. Returns whether there was one."""
        if self.index:
            if self.to_apply:
                worker, number = self.to_apply.pop(0)
                push = self.staged.pop(worker)
                assert push.number == number, (
                    f"push {push.number} of worker {worker}, where the first server has {number}"
                )
                ticket = self.ledger.granted[worker].ticket
                self._apply(push, self.ledger.push(worker, number, ticket), rate)
                return True
            return False
        for key in sorted(self.committed):
            push = self.staged[key[0]]
            if not self.queue.holds(push.worker, push.portion):
                self._refuse(key)
                return True
            decision = self.ledger.push(push.worker, push.number, push.ticket)
            if decision.verdict is Verdict.WAIT:
                continue
            if decision.verdict is Verdict.REFUSED:
                self._refuse(key)
                return True
            self.committed.discard(key)
            self.followers.decided.append(*key)
            self._apply(self.staged.pop(push.worker), decision, rate)
            return True
        return False

    def _apply(self, push: Push, decision: Decision, rate: float) -> None:
        """Add a push, and update if a version is complete."""
        base = self.bases[push.worker]  # not older than the grant
        self.applied += 1
        self._add(push, decision.version - base)
        self.summed.append(push)
        if self.order is not None:
            at, versions = push.portion, (base, decision.version)
            steps = (push.first, push.facts["count"]) if "count" in push.facts else ()
            self.order.append(Applied(push.worker, push.number, *versions, at.step, at.part, *steps))
        if decision.completes:
            self._changed()  # the other servers update together with this one
            self._update(rate)
        if push.is_last:
            self.queue.complete_step()

    def _close_late(self, rate: float) -> bool:
        """End a round without those who are late: see RoundServer."""
        return False

    def _look_s(self) -> float:
        """Seconds until the next look at what else may end a step."""
        return LOOK_S

    def _refuse(self, key: tuple[int, int]) -> None:
        self.committed.discard(key)
        del self.staged[key[0]]
        self.refusals.add(key)

    def _add(self, push: Push, staleness: int) -> None:
        """Count a push that is applied."""
        step = self.queue.step
        step.count(staleness, stop=push.stop)
        if self.in_steps or math.isfinite(push.loss + push.square):  # else it is refused, alone
            step.loss += push.loss
            step.losses += push.losses
        if push.is_last:
            self.queue.finish(push.worker, push.portion)
        if push.stop:
            self.queue.stop()

    def _sum_over_servers(self, square: torch.Tensor) -> None:
        """Other threads take pushes meanwhile: another server may wait for one that would wait here. No weights are
        given out: they are not those of the version yet.

        Raises RunFailed: another server has died, or its link is cut.
        """
        self.updating = True
        self.change.release()
        try:
            with waiting():
                dist.all_reduce(square, group=self.group)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            others = [f"server {k} (rank {rank})" for k, rank in enumerate(self.plan.servers) if k != self.index]
            raise RunFailed(
                f"{' or '.join(others)} did not take part in an update of all servers: it has died, or its link is "
                "cut; `codescent train --resume` goes on from the last checkpoint"
            ) from error
        finally:
            self.change.acquire()
            self.updating = False

    def _update(self, rate: float) -> None:
        """One step of the optimizer, with the sum of the pushes since the last one. What is not finite is refused.

        Raises Nonsense: a worker has sent gradients that are not finite, and a finite norm of them.
        """
        pushes, self.summed = self.summed, []
        loss = sum(push.loss for push in pushes)

        def agree(square: torch.Tensor) -> torch.Tensor:
            if not self.in_steps:
                finite = bool(square.isfinite()) or is_finite(pushes[0].gradients)  # a sum of squares may overflow
                return torch.tensor([loss, 0.0 if finite else math.nan, pushes[0].square], dtype=torch.float64)
            sums = torch.stack((torch.tensor(loss, dtype=torch.float64), square.cpu()))
            if self.group is not None:
                self._sum_over_servers(sums[1:])
            return sums

        sums = self.part.update(pushes, rate, agree)
        sound = bool(sums.isfinite().all())
        if self.in_steps:
            self.queue.step.square += float(sums[-1])
        else:
            self.queue.step.square += pushes[0].square / self.workers if sound else math.nan
        if not sound:
            self.queue.step.skips += 1
            ordered = sorted(pushes, key=lambda push: (push.portion, push.worker))
            for worker in untrue(ordered, ordered[0].gradients):
                raise nonsense(self.who(worker), "a push", "with gradients that are not finite and a norm that is")
            self.queue.step.unsound |= unsound(ordered, ordered[0].gradients)
            self._note_refused(pushes)

    def _note_refused(self, pushes: Collection[Push]) -> None:
        """Pushes in the order have changed nothing: what they sent is not finite."""
        refused = {(push.worker, push.number) for push in pushes}
        if self.order is not None and refused:
            rows = self.order
            self.order = [replace(row, refused=1) if (row.worker, row.number) in refused else row for row in rows]
