"""In: pushes and requests of workers; the weights and the optimizer of one parameter server. Out: weights updated.
Does not decide who waits (servers/ledger.py does) and does not send frames (transport/ does)."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codescent.base.stopwatch import beside, waiting
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan import Plan
from codescent.plan.wire import Wire
from codescent.record.order import Applied
from codescent.servers import Ledger, Portion, Portions, Verdict
from codescent.strategies.wire_messages import Messages
from codescent.train.optimize import Optimizer
from codescent.transport import Answer, Frame, Kind, Refused, Server
from codescent.transport.tensors import bytes_of

MOST_TOLD = 300
"""Most steps of which an answer has the sums: the metadata of a frame is bounded."""
LOOK_S = 0.2
"""Seconds between two looks at what else may end a step: a failed thread, a request to stop."""


@dataclass(frozen=True)
class Push:
    """What a worker has sent: its part of the gradients, of which portion, and with which weights."""

    worker: int
    number: int
    ticket: int
    portion: Portion
    gradients: torch.Tensor
    loss: float
    losses: int
    square: float
    stop: bool
    facts: Mapping[str, Any]
    first: int = 0  # in rounds: the first of its steps, counted from that of the portion
    is_last: bool = True  # with it the portion is done


@dataclass
class Step:
    """What the pushes of one step say, summed: `sums` is what all ranks are told."""

    loss: float = 0.0
    losses: int = 0
    stops: int = 0
    square: float = 0.0
    skips: int = 0
    stale: int = 0
    most_stale: int = 0
    pushes: int = 0
    late: int = 0

    @property
    def sums(self) -> list[float]:
        """[loss, stops, squared norm, skipped updates, mean and largest staleness, losses, parts that
        came late]. With several updates in a step the squared norm is their mean."""
        mean = self.stale / max(1, self.pushes)
        loss = math.nan if self.skips and not self.losses else self.loss
        return [loss, self.stops, self.square, self.skips, mean, self.most_stale, max(1, self.losses), self.late]


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
        self.plan, self.index, self.optimizer, self.group = plan, index, optimizer, servers
        self.workers = plan.mesh.world_size
        self.in_steps = plan.layout.in_steps
        self.pieces = plan.pieces[index]
        self.numel = sum(piece.numel for piece in self.pieces)
        self.messages = Messages(Wire.parse(plan.layout.wire), self.numel, plan.trained[0].optimizer_dtype)
        self.wide, self.narrow = TORCH_DTYPE[plan.trained[0].optimizer_dtype], TORCH_DTYPE[plan.work.precision]
        together = self.workers if self.in_steps else 1
        bound = 0 if plan.layout.updates == "synchronous" else plan.layout.staleness
        self.period = plan.schedule.period
        self.life, self.pushes = secrets.randbits(31), first_step // self.period * self.workers
        state: dict[str, Any] = {"staleness": bound, "together": together, "pushes": self.pushes}
        self.ledger = Ledger.restored({**state, "last": {}, "refused": {}}, self.life)
        self.change = threading.Condition()
        self.staged: dict[tuple[int, int], Push] = {}
        self.refusals: set[tuple[int, int]] = set()
        self.repeated: set[tuple[int, int]] = set()  # pushes of portions that were applied already
        self.applied: set[tuple[Portion, int]] = set()  # of this segment, with the first step of each push
        self.summed: list[Push] = []
        self.incoming: dict[int, torch.Tensor] = {}
        self.portions: Portions | None = None  # of the first server
        self.step = Step()
        self.sums: list[float] = []
        self.order: list[Applied] | None = [] if plan.layout.updates == "asynchronous" else None
        self.unread: list[list[float]] = []  # of the steps that rank 0 has not been told of
        self.published: tuple[int, torch.Tensor] | None = None
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

    def serve_beside(self, rate_of: Callable[[int], float], give_up: Callable[[BaseException], None]) -> None:
        """SERVE in a thread, beside the computation of a worker in this process.

        Args:
            rate_of: learning rate of a step.
            give_up: ends this process, which would wait for its own server.
        """
        arguments = rate_of, give_up
        self.thread = threading.Thread(target=self._serve_all, args=arguments, name="codescent serves", daemon=True)
        self.thread.start()

    def allow(self, number: int) -> None:
        """The thread may serve until the end of the segment of step `number`."""
        if self.thread is None:
            return
        with self.change:
            self.allowed = self._segment_end(number)
            self.change.notify_all()

    def _serve_all(self, rate_of: Callable[[int], float], give_up: Callable[[BaseException], None]) -> None:
        beside()
        try:
            while not (self.closed or self.has_ended):
                with self.change:
                    self.change.wait_for(lambda: self.done < self.allowed or self.closed, LOOK_S)
                    number = self.done
                    waits = number >= self.allowed
                if not (waits or self.closed):
                    self.serve(number, rate_of(number))
        except BaseException as error:
            give_up(error)

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
            if self.published is not None:
                yield self.published[1]

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
            if self.updating:
                return None
            if request.kind is Kind.PULL:
                return self._answer_pull(request)
            return self._answer_ask(request)

    def left(self, sender: int, why: str) -> None:
        """See Service."""
        with self.change:
            self.ledger.release(sender)
            self.staged = {key: push for key, push in self.staged.items() if key[0] != sender}
            if self.portions is not None:
                self.portions.leave(sender)
            self.change.notify_all()

    def _answer_push(self, request: Frame) -> Answer | None:
        key = (request.sender, request.request)
        if request.request <= self.ledger.join(request.sender) or key in self.repeated:
            self.repeated.discard(key)
            return Answer(self.ledger.version)
        if key in self.refusals:
            self.refusals.discard(key)
            raise Refused("the weights are too old")
        if key not in self.staged:
            told, grant = request.metadata, self.ledger.granted.get(request.sender)
            if grant is None or grant.ticket != told["ticket"]:  # at once: no step may be under way that would look
                self.incoming.pop(request.sender)
                self.ledger.push(*key, told["ticket"])  # counts it
                raise Refused("the worker has no grant for these weights")
            self.staged[key] = Push(
                *key,
                told["ticket"],
                Portion(*told["portion"]),
                self.messages.decode(self.incoming.pop(request.sender), torch.empty(self.numel, dtype=self.wide)),
                told["loss"],
                told["losses"],
                told["square"],
                told["stop"],
                told,
                first := told.get("first", 0),
                first + told.get("count", self.period) == self.period,
            )
            self.change.notify_all()
        return None

    def _answer_pull(self, request: Frame) -> Answer | None:
        told, version = request.metadata, self.ledger.version
        facts = {"life": self.life, "version": version, "stop": self.stop_requested()}
        if told["final"]:
            self.ledger.release(request.sender)
            if self.pushes != told["pushes"]:
                return None
            if told["stopped"]:
                self.ended = True
                self.change.notify_all()
        else:
            if self.portions is not None:
                self.portions.returned(request.sender)
            idle = self.portions is not None and not (self.portions.finished or self.portions.offers(request.sender))
            grant = None if idle else self.ledger.pull(request.sender)
            if grant is None:
                return None
            facts["ticket"] = grant.ticket
            if told.get("reserves"):
                return Answer(self.ledger.version, facts)
        if self.portions is not None:
            self.portions.weights_given(request.sender)
        if told["have"] == [self.life, version]:
            return Answer(version, facts)
        if self.published is None or self.published[0] != version:
            flat, begin = torch.empty(self.numel, dtype=self.narrow), 0
            for piece, weight in zip(self.pieces, self.optimizer.weights, strict=True):
                flat[begin : begin + piece.numel].copy_(weight.master.reshape(-1))
                begin += piece.numel
            self.published = version, flat
        return Answer(version, facts, [bytes_of(self.published[1])])

    def _answer_ask(self, request: Frame) -> Answer | None:
        if request.metadata.get("release"):
            self.ledger.release(request.sender)
            return Answer()
        ends = self.portions is None or (self.portions.finished and self.done == self.portions.end)
        if ends and request.metadata["known"] == self.done:
            return None  # this worker knows it already: it waits for the next segment
        if not ends and self.portions is not None and not self.portions.is_ready(request.sender):
            return Answer(self.ledger.version, {"pull": True})
        portion = None if ends or self.portions is None else self.portions.take(request.sender)
        if portion is None and not ends:
            self.ledger.release(request.sender)
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
                end = self._segment_end(number)
                self.portions = Portions(self.workers, number, end, own=own, period=self.period)
                for worker in self.ledger.granted:  # they have pulled before this step began
                    self.portions.weights_given(worker)
            if self.plan.schedule.agrees_after(number):
                self.applied.clear()
            self._changed()
            while self.done <= number and not (self.has_ended or self.closed):
                if self._apply_ready(rate) or self._close_late(rate):
                    self._changed()
                    continue
                if self.server is not None and self.server.failure is not None:
                    raise self.server.failure
                if self.stop_requested():
                    self._stop()
                with waiting():
                    self.change.wait(self._look_s())
            return not self.has_ended

    def _segment_end(self, number: int) -> int:
        """The number of steps after which all ranks act next."""
        return self.plan.schedule.agrees_next(number)

    def _changed(self) -> None:
        if self.server is not None:
            self.server.changed()

    def _apply_ready(self, rate: float) -> bool:
        """Apply the first push that may be applied, or refuse one. Returns whether there was one."""
        for key, push in list(self.staged.items()):
            if self.portions is not None and not self.portions.holds(push.worker, push.portion):
                self._refuse(key)
                return True
            if (push.portion, push.first) in self.applied:  # another server had refused it, so it was computed again
                self.ledger.release(push.worker)
                del self.staged[key]
                self.repeated.add(key)
                return True
            decision = self.ledger.push(push.worker, push.number, push.ticket)
            if decision.verdict is Verdict.WAIT:
                continue
            if decision.verdict is Verdict.REFUSED:
                self._refuse(key)
                return True
            del self.staged[key]
            self._add(push, decision.version - decision.base)
            self.summed.append(push)
            if self.order is not None:
                portion = push.portion
                versions = decision.base, decision.version
                steps = (push.first, push.facts["count"]) if "count" in push.facts else ()
                self.order.append(Applied(push.worker, push.number, *versions, portion.step, portion.part, *steps))
            if decision.completes:
                self._update(rate)
            if push.is_last and self.pushes % self.workers == 0:
                self._complete_step()
            return True
        return False

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
        del self.staged[key]
        self.refusals.add(key)

    def _add(self, push: Push, staleness: int) -> None:
        """Count a push that is applied."""
        self.pushes += push.is_last
        self.applied.add((push.portion, push.first))
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

    @torch.no_grad()
    def _update(self, rate: float) -> None:
        """One step of the optimizer, with the sum of the pushes. They are added in the order of their portions, so that
        the sum does not depend on who was first."""
        pushes, self.summed = sorted(self.summed, key=lambda push: (push.portion, push.worker)), []
        total = pushes[0].gradients
        for push in pushes[1:]:
            total += push.gradients
        views, begin = [], 0
        for piece, weight in zip(self.pieces, self.optimizer.weights, strict=True):
            views.append(total[begin : begin + piece.numel].view_as(weight.master))
            begin += piece.numel
        loss = sum(push.loss for push in pushes)

        def agree(square: torch.Tensor) -> torch.Tensor:
            if not self.in_steps:
                return torch.tensor([loss, pushes[0].square], dtype=torch.float64)
            sums = torch.stack((torch.tensor(loss, dtype=torch.float64), square.cpu()))
            if self.group is not None:
                self._sum_over_servers(sums[1:])
            return sums

        sums = self.optimizer.step(views, rate, agree)
        share = self.workers if not self.in_steps else 1
        self.step.square += float(sums[-1]) / share
        self.step.skips += not bool(sums.isfinite().all())
