"""In: requests of workers: pushes, pulls, questions for work. Out: the answers of one parameter server.
Does not apply pushes and does not update weights (parameter_server.py does); the caller of `answer` sends frames."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from codescent.coupling.failure_detector import FailureDetector, StallTimeout
from codescent.coupling.followers import Followers
from codescent.coupling.membership import Death, Membership
from codescent.coupling.pushes import Push
from codescent.coupling.server_part import ServerPart
from codescent.coupling.services import WeightUpdater
from codescent.coupling.told import (
    AMOUNT,
    FLAG,
    HOST,
    MOMENT,
    NUMBER,
    PORTION,
    POSITIVE,
    SQUARE,
    VERSION,
    WHOLE,
    Fields,
    check,
    nonsense,
    up_to,
)
from codescent.coupling.work_queue import WorkQueue
from codescent.plan import Plan
from codescent.plan.served import pushes_together
from codescent.plan.wire import Wire
from codescent.servers import Ledger, Portion
from codescent.strategies.wire_messages import Messages
from codescent.transport import Answer, Frame, Kind, Refused, Server
from codescent.transport.tensors import bytes_of

PUSH: Fields = {
    "portion": PORTION, "ticket": WHOLE, "commits": FLAG, "loss": NUMBER, "losses": AMOUNT, "square": SQUARE,
    "stop": FLAG,
}  # fmt: skip
"""The fields of a push that has payloads."""
COMMIT: Fields = {"ticket": WHOLE, "commits": FLAG}
"""Of the word to the first of several servers that all have their part."""
PUSH_OF_ROUND: Fields = {
    **PUSH, "first": WHOLE, "count": POSITIVE, "tokens": WHOLE, "skips": AMOUNT, "finite": FLAG, "seconds": AMOUNT,
}  # fmt: skip
PULL: Fields = {"after": WHOLE, "final": FLAG, "have": VERSION}
OF_A_PULL: Fields = {"granted": WHOLE, "reserves": FLAG}
LAST_PULL: Fields = {**PULL, "pushes": WHOLE, "stopped": FLAG}


class Requests:
    """What one parameter server answers (transport.Service), and what it knows for that.

    Args:
        plan: of the run.
        index: of this server, among `plan.servers`.
        optimizer: over the pieces of this server.
        first_step: number of complete steps when the command begins.
        stop_requested: whether this process was asked to stop.
    """

    def __init__(
        self, plan: Plan, index: int, optimizer: WeightUpdater, first_step: int, stop_requested: Callable[[], bool]
    ) -> None:
        self.plan, self.index, self.stop_requested = plan, index, stop_requested
        self.part = ServerPart(plan, index, optimizer)
        self.workers, self.period = plan.mesh.world_size, plan.schedule.period
        self.in_steps = plan.layout.in_steps
        wire, dtype = Wire.parse(plan.layout.wire), plan.trained[0].optimizer_dtype
        self.messages = Messages(wire, self.part.numel, dtype)
        together = pushes_together(plan.layout, self.workers)
        synchronous = plan.layout.updates == "synchronous"
        bound = 0 if synchronous else plan.layout.staleness
        bound = None if index else bound  # the others apply what the first server has applied
        self.queue = WorkQueue(self.workers, first_step, own=synchronous, period=self.period)
        self.life = secrets.randbits(31)
        state: dict[str, Any] = {"staleness": bound, "together": together, "pushes": self.queue.count}
        self.ledger = Ledger.restored({**state, "last": {}, "refused": {}}, self.life)
        self.change = threading.Condition()
        self.staged: dict[int, Push] = {}  # by worker; the others follow the first server's decisions
        self.committed: set[tuple[int, int]] = set()  # worker and number: every server has its part
        self.refusals: set[tuple[int, int]] = set()
        self.bases: dict[int, int] = {}  # version of the weights that each worker has pulled last
        self.applied = 0  # pushes in this command, also those that end no portion
        self.followers = Followers(self.queue.count, [self.workers + other for other in range(1, len(plan.servers))])
        self.membership, self.stalls = Membership(), StallTimeout()
        self.tells = False  # no launcher sees all ranks: the workers hear from here why the run is over
        self.detector: FailureDetector | None = None  # of the first server then
        self.incoming: dict[int, torch.Tensor] = {}
        self.ended = self.updating = False
        self.server: Server | None = None
        self.hosts: dict[int, str] = {}

    def who(self, sender: int) -> str:
        """A rank in messages, such as "rank 2 (on node1)". `sender`: a worker, or another server's number."""
        rank = sender if sender < self.workers else self.plan.servers[sender - self.workers]
        return f"rank {rank} (on {self.hosts.get(sender, 'an unknown host')})"

    def meet(self, sender: int, facts: dict[str, Any]) -> dict[str, Any]:
        """See Service. Raises Refused: it was taken for dead. Raises Nonsense, as all that answers a rank."""
        check(self.who(sender), "a greeting", facts, {"host": HOST})
        with self.change:
            self.hosts[sender] = facts["host"]
            if self.detector is not None and sender < self.workers:
                self.detector.met(sender, facts["host"])
        return {}

    def into(self, request: Frame) -> Sequence[memoryview] | None:
        """See Service."""
        if request.kind is not Kind.PUSH:
            return None
        self._check_push(request)
        self.incoming[request.sender] = torch.empty(self.messages.length, dtype=torch.uint8)
        return [bytes_of(self.incoming[request.sender])]

    def answer(self, request: Frame) -> Answer | None:
        """See Service."""
        with self.change:
            self._check(request)
            if request.sender >= self.workers:
                return self.followers.answer(request, self.ledger.version)
            if "joins" in request.metadata:
                return None if self.updating else self._answer_join(request)
            found, waits = None, False
            try:
                found = self._answer_worker(request)
                waits = found is None
            finally:  # it is answered also if it is refused
                self.stalls.note(request.sender, (request.kind, request.request), waits=waits)
            return found

    def _check(self, request: Frame) -> None:
        """Raise Nonsense: no rank of this run sends such a request."""
        who, told = self.who(request.sender), request.metadata
        if request.sender >= self.workers:
            check(who, "a question", told, {"after": up_to(self.followers.told, "the pushes of which it was told")})
        elif request.kind is Kind.PUSH:
            self._check_push(request)
        elif request.kind is Kind.PULL:
            check(who, "a pull", told, LAST_PULL if told.get("final") else PULL, OF_A_PULL)
        elif request.kind is Kind.ASK:
            known = {"known": up_to(self.queue.done, "the steps that are done")}
            check(who, "a question", told, known, {"waits": FLAG, "joins": MOMENT})
        else:
            raise nonsense(who, f"a request of kind {request.kind.name}", "to a parameter server")

    def _check_push(self, request: Frame) -> None:
        who, told = self.who(request.sender), request.metadata
        if request.sender >= self.workers:
            raise nonsense(who, "a push", "although it is a server")
        if not request.lengths:
            check(who, "a push", told, COMMIT)
            return
        if request.sender not in self.bases:
            raise nonsense(who, "a push", "before it has pulled weights")
        is_round = self.plan.layout.served_rounds
        check(who, "a push", told, PUSH_OF_ROUND if is_round else PUSH)
        if is_round and told["first"] + told["count"] > self.period:
            steps = f"with steps {told['first']} to {told['first'] + told['count'] - 1} of a round"
            raise nonsense(who, "a push", f"{steps} that has {self.period}")

    def _decoded(self, request: Frame, arrived: torch.Tensor) -> torch.Tensor:
        """The gradients of a push. Indices of the largest ones may lie outside of the vector."""
        try:
            return self.messages.decoded(arrived)
        except (IndexError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise nonsense(self.who(request.sender), "a push", f"with gradients that are none ({why})") from error

    def _answer_worker(self, request: Frame) -> Answer | None:
        if request.kind is Kind.PUSH:
            return self._answer_push(request)
        if self.updating:
            return None
        return self._answer_pull(request) if request.kind is Kind.PULL else self._answer_ask(request)

    def left(self, sender: int, why: str, *, silent: bool = False) -> None:
        """See Service. Servers but the first keep what the worker has sent: the first one may have applied it."""
        if self.index or sender >= self.workers:
            return
        with self.change:
            if self.detector is not None:
                self.detector.left(sender, self.queue.position(sender), silent=silent)
            self.stalls.note(sender, None, waits=False)
            self.ledger.release(sender)
            self.staged.pop(sender, None)
            self.committed = {key for key in self.committed if key[0] != sender}
            self.queue.leave(sender)
            self.change.notify_all()

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
                self.queue.step.late += self.plan.layout.quorum is None  # a round that ends by quorum has counted it
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
            self._decoded(request, arrived),
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
            if self.queue.count != told["pushes"]:
                return None
            if told["stopped"]:
                self.ended = True
                self.change.notify_all()
        elif self.index == 0 and told.get("granted") is not None:
            grant = self.ledger.granted.get(sender)
            facts["ticket"] = told["granted"]
            is_ready = grant is not None and grant.ticket == told["granted"]
        else:
            self.queue.returned(sender)
            if self.queue.must_wait(sender) or (grant := self.ledger.pull(sender)) is None:
                return None
            facts["ticket"] = grant.ticket
            if told.get("reserves"):
                return Answer(version, facts)
        if is_ready:  # without its grant, it is told to pull anew when it asks for work
            self.queue.weights_given(sender)
        self.bases[sender] = version
        if told["have"] == [self.life, version]:
            return Answer(version, facts)
        return Answer(version, facts, [bytes_of(self.part.weights(version))])

    def _answer_ask(self, request: Frame) -> Answer | None:
        queue, sender, known = self.queue, request.sender, request.metadata["known"]
        if queue.is_known(known):
            return None
        if queue.needs_weights(sender):
            return Answer(self.ledger.version, {"pull": True})
        portion = queue.take(sender)
        if portion is None and not queue.ends:
            self.ledger.release(sender)
            self.change.notify_all()  # a push that waited for this worker's grant
            if request.metadata.get("waits"):
                return None
        facts = queue.facts(sender, known, portion)
        if portion is not None:
            facts |= self._steps_of(sender, portion)
        return Answer(self.ledger.version, facts)

    def _answer_join(self, request: Frame) -> Answer | None:
        """A worker that was started again comes in while a segment is under way: it meets the others at its end.

        It counts its pushes on after its predecessor's. Their connections have ended: see Server.
        """
        moment_s, position = request.metadata["joins"]
        if self.membership.died(request.sender, Death(moment_s, position)):
            self.left(request.sender, "it has died")
        if self.queue.stopping or self.queue.ends:
            return None
        self.refusals = {key for key in self.refusals if key[0] != request.sender}
        self.membership.comes(request.sender, self.queue.done)
        facts = {"done": self.queue.done, "number": self.ledger.join(request.sender), "applied": self.applied}
        return Answer(self.ledger.version, facts)

    def _steps_of(self, worker: int, portion: Portion) -> dict[str, int]:
        """Which steps of a portion the worker takes before its next push: see RoundServer."""
        return {}
