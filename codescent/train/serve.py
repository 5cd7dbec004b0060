"""In: pushes and requests of workers; the weights and the optimizer of one parameter server. Out: weights updated.
Does not decide who waits (servers/ledger.py does) and does not send frames (transport/ does)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from codescent.base.stopwatch import waiting
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan import Plan
from codescent.plan.wire import Wire
from codescent.record.order import Applied
from codescent.servers import Decision, Ledger, Portion, Portions, Verdict
from codescent.strategies.wire_messages import Messages
from codescent.train.followers import Followers
from codescent.train.lost import Death, Lost
from codescent.train.optimize import Optimizer
from codescent.train.pushes import Push, Step
from codescent.train.served_part import ServedPart
from codescent.transport import Answer, Frame, Kind, Refused, Server
from codescent.transport.tensors import bytes_of

MOST_TOLD = 300
"""Most steps of which an answer has the sums: the metadata of a frame is bounded."""
LOOK_S = 0.2
"""Seconds between two looks at what else may end a step: a failed thread, a request to stop."""


class Serving:
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
        optimizer: Optimizer,
        servers: dist.ProcessGroup | None,
        first_step: int,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.stop_requested = stop_requested
        self.plan, self.index, self.group = plan, index, servers
        self.part = ServedPart(plan, index, optimizer)
        self.workers = plan.mesh.world_size
        self.in_steps = plan.layout.in_steps
        wire, dtype = Wire.parse(plan.layout.wire), plan.trained[0].optimizer_dtype
        self.messages, self.wide = Messages(wire, self.part.numel, dtype), TORCH_DTYPE[dtype]
        together = self.workers if self.in_steps else 1
        bound = 0 if plan.layout.updates == "synchronous" else plan.layout.staleness
        bound = None if index else bound  # the others apply what the first server has applied
        self.period = plan.schedule.period
        self.life, self.pushes = secrets.randbits(31), first_step // self.period * self.workers
        state: dict[str, Any] = {"staleness": bound, "together": together, "pushes": self.pushes}
        self.ledger = Ledger.restored({**state, "last": {}, "refused": {}}, self.life)
        self.change = threading.Condition()
        self.staged: dict[int, Push] = {}  # by worker; the others follow the first server's decisions
        self.committed: set[tuple[int, int]] = set()  # worker and number: every server has its part
        self.refusals: set[tuple[int, int]] = set()
        self.bases: dict[int, int] = {}  # version of the weights that each worker has pulled last
        self.applied = 0  # pushes in this command, also those that end no portion
        self.followers = Followers(self.pushes, [self.workers + other for other in range(1, len(plan.servers))])
        self.to_apply: list[tuple[int, int]] = []  # what the first server has applied, and this one has not
        self.failure: BaseException | None = None
        self.lost: dict[int, Lost] = {}  # workers that have died
        self.deaths: Callable[[], dict[int, Death]] = dict
        self.summed: list[Push] = []
        self.incoming: dict[int, torch.Tensor] = {}
        self.portions: Portions | None = None  # of the first server
        self.step = Step()
        self.sums: list[float] = []
        self.order: list[Applied] | None = [] if plan.layout.updates == "asynchronous" else None
        self.unread: list[list[float]] = []  # of the steps that rank 0 has not been told of
        self.stopping = self.ended = self.closed = self.updating = False
        self.server: Server | None = None
        self.thread: threading.Thread | None = None
        self.allowed = first_step  # a thread serves the steps before this one

    @property
    def done(self) -> int:
        """The number of complete steps."""
        return self.pushes // self.workers * self.period

    @property
    def has_ended(self) -> bool:
        """Whether a rank was asked to stop, and all work that was given out is done."""
        return self.ended or (self.stopping and self.portions is not None and self.done == self.portions.end)

    def allow(self, number: int) -> None:
        """The thread may serve until the end of the segment of step `number`."""
        if self.thread is None:
            return
        with self.change:
            self.allowed = self.plan.schedule.agrees_next(number)
            self.change.notify_all()

    def begin(self, pushes: int) -> None:
        """So many pushes were applied before this command: see RoundServing."""

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

    def meet(self, sender: int, facts: dict[str, Any]) -> dict[str, Any]:
        """See Service."""
        return {}

    def into(self, request: Frame) -> Sequence[memoryview] | None:
        """See Service."""
        if request.kind is not Kind.PUSH:
            return None
        self.incoming[request.sender] = torch.empty(self.messages.length, dtype=torch.uint8)
        return [bytes_of(self.incoming[request.sender])]

    def answer(self, request: Frame) -> Answer | None:
        """See Service."""
        with self.change:
            if request.kind is Kind.PUSH:
                return self._answer_push(request)
            if request.sender >= self.workers:
                return self.followers.answer(request, self.ledger.version)
            if self.updating:
                return None
            if request.kind is Kind.PULL:
                return self._answer_pull(request)
            return self._answer_ask(request)

    def left(self, sender: int, why: str) -> None:
        """See Service. Servers but the first keep what the worker has sent: the first one may have applied it."""
        if self.index or sender >= self.workers:
            return
        with self.change:
            self.ledger.release(sender)
            self.staged.pop(sender, None)
            self.committed = {key for key in self.committed if key[0] != sender}
            if self.portions is not None:
                self.portions.leave(sender)
            self.change.notify_all()

    def raise_failure(self) -> None:
        """Raise the error of a thread of this server, if there is one."""
        if (failure := self.failure or (self.server.failure if self.server else None)) is not None:
            raise failure

    def look_for_dead(self) -> None:
        """Give out again what workers held that have died since the last call."""
        with self.change:
            for worker, death in self.deaths().items():
                if worker not in self.lost:
                    self.left(worker, "it has died")
                    self.lost[worker] = Lost.of(worker, death)

    def _answer_push(self, request: Frame) -> Answer | None:
        """A push comes in two requests where there are several servers: a part to each, then the word to the first that
        all have theirs. The first one decides when it applies the push, and answers then."""
        key, told = (request.sender, request.request), request.metadata
        arrived = self.incoming.pop(request.sender, None) if request.lengths else None
        if request.request <= self.ledger.join(request.sender):
            return Answer(self.ledger.version, {"applied": self.applied})
        if key in self.refusals:
            self.refusals.discard(key)
            raise Refused("the weights are too old")
        if arrived is not None:
            self._stage(request, arrived)
        if self.index or not told["commits"]:
            return Answer(self.ledger.version)
        if key not in self.committed:
            staged, grant = self.staged.get(request.sender), self.ledger.granted.get(request.sender)
            lost = staged is None or staged.number != request.request
            if lost or grant is None or grant.ticket != told["ticket"]:
                self.staged.pop(request.sender, None)
                self.ledger.push(*key, 0)  # no grant has this ticket: it counts the refusal
                raise Refused("the worker has no grant for these weights")
            self.committed.add(key)
            self.change.notify_all()
        return None

    def _stage(self, request: Frame, arrived: torch.Tensor) -> None:
        told = request.metadata
        self.staged[request.sender] = Push(
            request.sender,
            request.request,
            told["ticket"],
            Portion(*told["portion"]),
            self.messages.decode(arrived, torch.empty(self.part.numel, dtype=self.wide)),
            told["loss"],
            told["losses"],
            told["square"],
            told["stop"],
            told,
            first := told.get("first", 0),
            first + told.get("count", self.period) == self.period,
        )

    def _answer_pull(self, request: Frame) -> Answer | None:
        """Grant the weights and send them. A worker of several servers has the grant first, where pulls may wait, and
        `granted` is its ticket: weights of no server are then older than the grant."""
        told, sender, version = request.metadata, request.sender, self.ledger.version
        facts = {"life": self.life, "version": version, "stop": self.stop_requested(), "applied": self.applied}
        if self.applied < told["after"]:
            return None
        is_ready = True
        if told["final"]:
            self.ledger.release(sender)
            if self.pushes != told["pushes"]:
                return None
            if told["stopped"]:
                self.ended = True
                self.change.notify_all()
        elif self.index == 0 and told.get("granted") is not None:
            grant = self.ledger.granted.get(sender)
            facts["ticket"] = told["granted"]
            is_ready = grant is not None and grant.ticket == told["granted"]
        else:
            if self.portions is not None:
                self.portions.returned(sender)
            idle = self.portions is not None and not (self.portions.finished or self.portions.offers(sender))
            if idle or (grant := self.ledger.pull(sender)) is None:
                return None
            facts["ticket"] = grant.ticket
            if told.get("reserves"):
                return Answer(version, facts)
        if self.portions is not None and is_ready:  # without its grant, it is told to pull anew when it asks for work
            self.portions.weights_given(sender)
        self.bases[sender] = version
        if told["have"] == [self.life, version]:
            return Answer(version, facts)
        return Answer(version, facts, [bytes_of(self.part.weights(version))])

    def _answer_ask(self, request: Frame) -> Answer | None:
        ends = self.portions is None or (self.portions.finished and self.done == self.portions.end)
        if ends and request.metadata["known"] == self.done:
            return None  # this worker knows it already: it waits for the next segment
        if not ends and self.portions is not None and not self.portions.is_ready(request.sender):
            return Answer(self.ledger.version, {"pull": True})
        portion = None if ends or self.portions is None else self.portions.take(request.sender)
        if portion is None and not ends:
            self.ledger.release(request.sender)
            self.change.notify_all()  # a push that waited for this worker's grant
            if request.metadata.get("waits"):
                return None
        facts: dict[str, Any] = {"done": self.done, "ends": ends, "stopped": self.stopping}
        unknown = self.done - request.metadata["known"]
        if request.sender == 0:  # it writes the metrics, so it is told of each step
            del self.unread[: max(0, len(self.unread) - unknown // self.period)]
        facts["sums"] = (self.unread[-MOST_TOLD:] if request.sender == 0 else [self.sums]) if unknown else []
        if portion is not None:
            facts |= {"portion": [portion.step, portion.part], **self._steps_of(request.sender, portion)}
        return Answer(self.ledger.version, facts)

    def serve(self, number: int, rate: float) -> bool:
        """The SERVE verb: apply pushes until step `number` (from 0) is complete.

        Returns:
            False: the run has ended at step `number` already, because a rank was asked to stop.
        """
        with self.change:
            if self.index == 0 and (self.portions is None or self.portions.finished):
                own = self.plan.layout.updates == "synchronous"
                end = self.plan.schedule.agrees_next(number)
                self.portions = Portions(self.workers, number, end, own=own, period=self.period)
                for worker in self.ledger.granted:  # they have pulled before this step began
                    self.portions.weights_given(worker)
            self._changed()
            while self.done <= number and not (self.has_ended or self.closed):
                if self._apply_ready(rate) or self._close_late(rate):
                    self._changed()
                    continue
                self.raise_failure()
                if self.stop_requested():
                    self._stop()
                self.look_for_dead()
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
            if self.portions is not None and not self.portions.holds(push.worker, push.portion):
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
        if push.is_last and self.pushes % self.workers == 0:
            self._complete_step()

    def _complete_step(self) -> None:
        self.sums, self.step = self.step.sums, Step()
        if self.index == 0:
            self.unread.append(self.sums)

    def _steps_of(self, worker: int, portion: Portion) -> dict[str, int]:
        """Which steps of a portion the worker takes before its next push: see RoundServing."""
        return {}

    def _close_late(self, rate: float) -> bool:
        """End a round without those who are late: see RoundServing."""
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
        self.pushes += push.is_last
        step = self.step
        step.pushes += 1
        step.loss += push.loss
        step.losses += push.losses
        step.stops += push.stop
        step.stale += staleness
        step.most_stale = max(step.most_stale, staleness)
        if self.portions is not None:
            if push.is_last:
                self.portions.done(push.worker, push.portion)
            if push.stop:
                self._stop()

    def _stop(self) -> None:
        """End with the last step of which a portion was given out. Servers but the first are told by the workers."""
        if self.portions is not None and not self.stopping:
            self.stopping = True
            self.portions.end_after_given()

    def _sum_over_servers(self, square: torch.Tensor) -> None:
        """Other threads take pushes meanwhile: another server may wait for one that would wait here. No weights are
        given out: they are not those of the version yet."""
        self.updating = True
        self.change.release()
        try:
            with waiting():
                dist.all_reduce(square, group=self.group)
        finally:
            self.change.acquire()
            self.updating = False

    def _update(self, rate: float) -> None:
        """One step of the optimizer, with the sum of the pushes since the last one."""
        pushes, self.summed = self.summed, []
        loss = sum(push.loss for push in pushes)

        def agree(square: torch.Tensor) -> torch.Tensor:
            if not self.in_steps:
                return torch.tensor([loss, pushes[0].square], dtype=torch.float64)
            sums = torch.stack((torch.tensor(loss, dtype=torch.float64), square.cpu()))
            if self.group is not None:
                self._sum_over_servers(sums[1:])
            return sums

        sums = self.part.update(pushes, rate, agree)
        share = self.workers if not self.in_steps else 1
        self.step.square += float(sums[-1]) / share
        self.step.skips += not bool(sums.isfinite().all())
