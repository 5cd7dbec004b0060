"""In: clients of the parameter servers, the weights of this rank. Out: PUSH and PULL: gradients sent, weights fetched.
Does not update weights (parameter_server.py does) and does not choose the samples (the first server does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from codescent.base.progress import OwnPage
from codescent.base.stopwatch import waiting
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.coupling.coupling import WorkItem
from codescent.coupling.membership import MembershipChange
from codescent.coupling.parameter_server import WeightServer
from codescent.coupling.queued import Known, Queued
from codescent.coupling.regroup import regroup
from codescent.coupling.services import Services, WeightUpdater
from codescent.plan import Instruction, Plan, Verb
from codescent.plan.served import Piece
from codescent.plan.wire import Wire, kept_name
from codescent.servers import Portion
from codescent.strategies.wire_messages import Messages
from codescent.transport import Client, Frame, Kind, Refused
from codescent.transport.tensors import bytes_of

WAITS = -1
"""The stage of a worker that waits to be let in: nobody waits for it, so it is never behind others of its stage."""
NORM_PIECE = 1 << 16
"""Elements of a norm in the gradients' own dtype."""


class Worker(Queued):
    """A rank that computes gradients of portions, with the servers' weights.

    Args:
        plan, optimizer, services: see Coupling.
        weights: the trained tensors, in the plan's order.
        clients: of each server, in the order of `plan.servers`.
        server: of this rank, if workers are servers: it serves in a thread.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: WeightUpdater,
        services: Services,
        weights: Sequence[torch.Tensor],
        clients: Sequence[Client],
        server: WeightServer | None = None,
    ) -> None:
        super().__init__(plan, optimizer, services)
        self.weights, self.clients, self.server = list(weights), list(clients), server
        self.verbs = {Verb.PUSH: self._push, Verb.PULL: self._pull}
        self.first, self.count = 0, 1  # in rounds: the steps of the portion that are taken before the next push
        self.period = plan.schedule.period
        self.number = 0  # of the last push
        self.have: list[list[int]] = [[-1, -1]] * len(clients)  # life and version of what is in `fetched`
        self.tickets = [0] * len(clients)  # of the grants, by server
        wide = TORCH_DTYPE[plan.trained[0].optimizer_dtype]
        narrow = weights[0].dtype
        numels = [sum(piece.numel for piece in pieces) for pieces in plan.pieces]
        wire = Wire.parse(plan.layout.wire)
        self.messages = [Messages(wire, numel, plan.trained[0].optimizer_dtype) for numel in numels]
        self.sent = [torch.zeros(numel, dtype=wide) for numel in numels]
        self.fetched = [torch.empty(numel, dtype=narrow) for numel in numels]
        self.pool = ThreadPoolExecutor(len(clients), thread_name_prefix="codescent worker")
        self.after = 0  # pushes that the first server had applied when it answered last
        self.server_stops = False  # a server was asked to stop; the first server hears of it by the next push
        self.reserves = plan.layout.in_steps and len(clients) > 1

    def join(self) -> int:
        """See Coupling: for a worker of the same number that has died. Wait until the first server lets this one in.

        Its pushes are counted on after those of the dead one, so that none is applied twice. From its first word on,
        the launcher counts another death of this worker as that of a worker that trained.
        """
        ranks, own = self.services.ranks, OwnPage.current
        assert ranks.pages is not None
        assert own is not None
        dead = ranks.pages.read(self.services.rank)
        assert dead.died_s, "this rank was started again, and has not died"
        own.at(dead.position, WAITS)
        own.come_again()
        with waiting():
            told = self._ask({"joins": [dead.died_s, dead.position]})
        self.known = Known(told["done"], ends=False)
        self.number, self.after = told["number"], told["applied"]
        return self.known.done

    def work(self, number: int, rate: float) -> Iterator[WorkItem]:
        """See Coupling."""
        self._let_serve(number)
        while self.known.done <= number and not self.known.stops:
            if self.portion is None:
                self.pull()
            else:
                self.step = self.portion.step
                yield WorkItem(self.step, number, rate)

    def _let_serve(self, number: int) -> None:
        """This rank's own server may go on until the end of the segment of step `number`."""
        if self.server is not None:
            self.server.allow(number)

    def divisor(self) -> int:
        """See Coupling. Servers that add the pushes of a step make the mean of the whole batch."""
        return self.at.portion.losses if self.plan.layout.in_steps else self.at.portion.own_losses

    @torch.no_grad()
    def _push(self, instruction: Instruction) -> None:
        """The PUSH verb: send the gradients of the portion. Each server gets its part of them."""
        tensors = self.at.gradients.collect()
        for part, pieces in zip(self.sent, self.plan.pieces, strict=True):
            gather(part, tensors, pieces)
        facts = {"loss": self.at.loss_sum.item(), "losses": self.at.portion.own_losses}
        with waiting():
            self._send(facts, stop=self.at.stop_requested())
        self.at.gradients.release()

    def _send(self, facts: dict[str, Any], *, stop: bool) -> None:
        """Send `sent` to the servers, as a push of the present portion."""
        assert self.portion is not None
        self.number += 1
        encoded = [one.encode(part) for one, part in zip(self.messages, self.sent, strict=True)]
        if "square" not in facts:
            facts = {**facts, "square": sum(square_of(meant) for _, meant in encoded)}
        facts = {**facts, "stop": stop or self.server_stops}
        facts["portion"] = [self.portion.step, self.portion.part]
        if self._sent_to_all(facts, [message for message, _ in encoded]):
            for one in self.messages:
                one.delivered()
        self.portion = None

    def _sent_to_all(self, facts: Mapping[str, Any], messages: Sequence[torch.Tensor]) -> bool:
        """Send each server its part of a push. Returns whether the servers apply it: all of them do, or none.

        When all have their part, the first server is told so. It then decides, and the others follow. It refuses a
        portion that another worker has by now.
        """
        alone = len(messages) == 1

        def send(server: int) -> Frame | None:
            told = {**facts, "ticket": self.tickets[server], "commits": alone}
            payloads = [bytes_of(messages[server])]
            try:
                return self.clients[server].request(Kind.PUSH, metadata=told, payloads=payloads, number=self.number)
            except Refused:
                return None

        answers = list(self.pool.map(send, range(len(messages))))
        first = answers[0]
        if first is not None and not alone:
            told = {"ticket": self.tickets[0], "commits": True}
            try:
                first = self.clients[0].request(Kind.PUSH, metadata=told, number=self.number)
            except Refused:
                first = None
        if first is None:
            return False
        self.after = first.metadata["applied"]
        return True

    def _pull(self, instruction: Instruction) -> None:
        """The PULL verb."""
        self.pull()

    def pull(self) -> None:
        """Fetch the weights of all servers, then the next portion.

        Where no portion is left, wait until the segment is over, and fetch its last weights.
        """
        with waiting():
            told: dict[str, Any] = {"pull": True}
            while told.get("pull"):  # the connection was lost after the weights had come: they are asked for again
                self._fetch({"final": False})
                told = self._ask({})
            while told.get("portion") is None and not told.get("ends"):
                told = self._ask({"waits": True})
                if told.get("portion") is not None or told.get("pull"):  # it has come back; the connection was lost
                    self._fetch({"final": False})
            if told.get("portion") is None:
                pushes = told["done"] // self.period * self.plan.mesh.world_size
                self._fetch({"final": True, "pushes": pushes, "stopped": told["stopped"]})
        self._scatter()
        self.known = Known(told["done"], told["ends"], told["ends"] and told["stopped"])
        for sums in told["sums"]:  # of a round: a row for each step, all alike, and what came late in the last one
            self.sums += [[*sums[:-1], 0.0]] * (self.period - 1) + [sums]
        self.first, self.count = told.get("first", 0), told.get("count", self.period)
        self.portion = None if told.get("portion") is None else Portion(*told["portion"])

    def _ask(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """What the first server says: a portion, or that there is none."""
        return self.clients[0].request(Kind.ASK, metadata={"known": self.known.done, **metadata}).metadata

    def _fetch(self, metadata: dict[str, Any]) -> None:
        """Put the weights of all servers into `fetched`, at once. Weights that are there already do not travel.

        Where pulls may wait, the first server gives its grant before weights are asked for. The others send no older
        weights: they first apply what the first one had applied then.
        """
        metadata = {**metadata, "after": self.after}
        if self.reserves and not metadata["final"]:
            facts = {**metadata, "have": [-1, -1], "reserves": True}
            granted = self.clients[0].request(Kind.PULL, metadata=facts).metadata
            metadata |= {"granted": granted["ticket"], "after": granted["applied"]}

        def fetch(server: int) -> None:
            into, facts = [bytes_of(self.fetched[server])], {**metadata, "have": self.have[server]}
            answer = self.clients[server].request(Kind.PULL, metadata=facts, into=into)
            self.have[server] = [answer.metadata["life"], answer.metadata["version"]]
            self.tickets[server] = answer.metadata.get("ticket", 0)
            self.server_stops |= answer.metadata["stop"]

        list(self.pool.map(fetch, range(len(self.clients))))

    @torch.no_grad()
    def _scatter(self) -> None:
        for part, pieces in zip(self.fetched, self.plan.pieces, strict=True):
            scatter(part, self.weights, pieces)

    def meet(self, step: int) -> MembershipChange:
        """See Coupling."""
        return regroup(self.services.ranks, self.plan, self.server, step)

    def begin(self, run: Path, first_step: int) -> None:
        """See Coupling."""
        if self.server is not None:
            self.server.rewind(run, first_step)

    def write_order(self, run: Path) -> None:
        """See Coupling."""
        if self.server is not None:
            self.server.write_order(run)

    def state(self) -> Mapping[str, torch.Tensor]:
        """See Coupling."""
        numbered = enumerate(self.messages)
        return {kept_name(index, "residual"): one.residual for index, one in numbered if one.wire.lossy}

    def buffers(self) -> Iterator[torch.Tensor]:
        """See Coupling."""
        if self.server is not None:
            yield from self.server.buffers()
        yield from (*self.sent, *self.fetched, *(buffer for one in self.messages for buffer in one.buffers()))

    def hang_up(self) -> None:
        """End the connections to the servers: what waits for an answer fails."""
        for client in self.clients:
            client.close()
        self.pool.shutdown()

    def close(self) -> None:
        """See Coupling."""
        self.hang_up()
        if self.server is not None:
            self.server.close()


def square_of(part: torch.Tensor) -> float:
    """The squared norm of a vector: of pieces in its dtype, summed in fp64. A norm in fp64 casts all elements, which
    takes 30 times as long on a CPU."""
    norms = torch._foreach_norm(torch.split(part, NORM_PIECE))
    return float(torch.stack(norms).double().square().sum())


def gather(part: torch.Tensor, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
    """Copy the rows of a server from the tensors into its part."""
    begin = 0
    for piece in pieces:
        rows = tensors[piece.index][piece.first : piece.stop]
        part[begin : begin + piece.numel].copy_(rows.reshape(-1))
        begin += piece.numel


def scatter(part: torch.Tensor, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
    """Copy a server's part into the rows of the tensors."""
    begin = 0
    for piece in pieces:
        rows = tensors[piece.index][piece.first : piece.stop]
        rows.copy_(part[begin : begin + piece.numel].view_as(rows))
        begin += piece.numel
