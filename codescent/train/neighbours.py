"""In: a plan with asynchronous gossip, this rank's world. Out: a rank that is given work, connected to its neighbours.
Does not average (strategies/pair_exchange.py does) and does not choose the work (coordinate.py does)."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from codescent.base.errors import RunFailed
from codescent.base.stopwatch import waiting
from codescent.plan import Plan
from codescent.servers import Portion
from codescent.strategies.pair_exchange import PairExchange
from codescent.strategies.turns import Known, Turns
from codescent.train.away import OF_TIMEOUT, Away
from codescent.train.coordinate import Coordinator
from codescent.train.told import HOST, WHOLE, check, nonsense
from codescent.train.world import World
from codescent.transport import Answer, Client, Frame, Kind, Server, listen
from codescent.transport.tensors import bytes_of

NOTICE_S = 5.0
"""Seconds until a silent machine is noticed: see transport/sockets.py."""
PATIENCE = 2.0
"""A rank waits for a neighbour so many times parallel.timeout_s: rank 0 says before why the run is over."""


class Neighbour:
    """The service of a rank (transport.Service). It averages with active neighbours; rank 0 also gives out work."""

    def __init__(self, exchange: PairExchange, coordinator: Coordinator | None) -> None:
        self.exchange, self.coordinator = exchange, coordinator
        self.memory: dict[int, torch.Tensor] = {}  # by active neighbour: its weights, then what it has to subtract
        self.hosts: dict[int, str] = {}
        self.answered: dict[int, int] = {}  # by active neighbour: the request to which the memory is the answer

    def meet(self, sender: int, facts: dict[str, Any]) -> dict[str, Any]:
        """See Service. Raises Refused: it was taken for dead. Raises Nonsense, as all that answers a rank."""
        check(f"rank {sender}", "a greeting", facts, {"host": HOST})
        self.hosts[sender] = facts["host"]
        if self.coordinator is not None:
            self.coordinator.met(sender, facts["host"])
        return {}

    def into(self, request: Frame) -> Sequence[memoryview] | None:
        """See Service."""
        sender = request.sender
        if request.kind is not Kind.EXCHANGE or self.answered.get(sender) == request.request:
            return None
        if sender not in self.memory:
            self.memory[sender] = torch.empty_like(self.exchange.x)
        return [bytes_of(self.memory[sender])]

    def answer(self, request: Frame) -> Answer | None:
        """See Service. An average whose answer was lost is answered again, and not done again."""
        sender, told = request.sender, request.metadata
        if request.kind is not Kind.EXCHANGE:
            facts = self.coordinator.answer(sender, told) if self.coordinator is not None else None
            return None if facts is None else Answer(metadata=facts)
        if self.answered.get(sender) != request.request:
            who = f"rank {sender} (on {self.hosts[sender]})"
            check(who, "an average", told, {"segment": WHOLE, "average": WHOLE})
            if sender not in self.memory:
                raise nonsense(who, "an average", "without weights")
            if not self.exchange.answer(sender, told["segment"], told["average"], self.memory[sender]):
                return None
            self.answered[sender] = request.request
        return Answer(payloads=[bytes_of(self.memory[sender])])

    def left(self, sender: int, why: str, *, silent: bool = False) -> None:
        """See Service. Rank 0 hears of each rank that has died, and tells the others."""
        if self.coordinator is not None:
            self.coordinator.left(sender, silent=silent)


class Hand(Turns):
    """A rank that is given portions of work, and updates its weights itself.

    Args:
        plan: of the run.
        exchange: of this rank.
        first: a client of rank 0, which gives out the work.
        service, server: of this rank.
        rate_of: learning rate of a step.
        first_step: number of complete steps when the command begins.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: PairExchange,
        first: Client,
        service: Neighbour,
        server: Server,
        rate_of: Callable[[int], float],
        first_step: int,
    ) -> None:
        super().__init__(first_step)
        self.plan, self.exchange, self.first, self.server = plan, exchange, first, server
        self.service, self.rate_of = service, rate_of
        self.report: dict[str, Any] | None = None  # of a portion that is computed

    def turns(self, number: int) -> Iterator[None]:
        """See Turns."""
        if self.known.ends:  # all ranks have met
            if self.service.coordinator is not None:
                self.service.coordinator.begin(number, self.plan.schedule.agrees_next(number))
            self.exchange.begin(number)
            self.server.changed()
        while self.known.done <= number and not self.known.stops:
            if self.portion is None:
                self._ask()
            else:
                self.step, self.exchange.part = self.portion.step, self.portion.part
                yield

    def rate(self, rate: float) -> float:
        """See Turns."""
        return self.rate_of(self.step)

    def finished(self, sums: torch.Tensor, losses: int) -> None:
        """See Turns: the sums are this rank's own."""
        loss, stop, square = sums.tolist()
        assert self.portion is not None
        self.report = {
            "portion": [self.portion.step, self.portion.part],
            **{"loss": loss, "losses": losses, "square": square, "stop": bool(stop)},
            **{"skipped": not math.isfinite(loss + square), "staleness": self.exchange.staleness},
        }
        self.portion = None

    def _ask(self) -> None:
        """Say what is computed, and get the next portion; where none is left, wait for the end of the segment."""
        coordinator = self.service.coordinator
        if self.server.failure is not None and not (coordinator and coordinator.over):
            raise self.server.failure
        facts: dict[str, Any] = {"known": self.known.done}
        if self.report is not None:
            facts["report"] = self.report
        with waiting():
            told = self._told(facts)
        self.report = None
        self.known = Known(told["done"], told["ends"], told["ends"] and told["stopped"])
        self.sums += told["sums"]
        self.portion = Portion(*told["portion"]) if "portion" in told else None

    def _told(self, facts: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 answers. Raises RunFailed: the run is over. Rank 0 says so when all the others know it."""
        told = self.first.request(Kind.ASK, metadata=facts).metadata
        if "over" in told:
            if self.service.coordinator is not None:
                self.service.coordinator.wait_until_told()
            raise RunFailed(told["over"])
        return told

    def look(self) -> None:
        """While this rank waits for a neighbour: raise RunFailed if a rank has died."""
        self._told({"looks": True})

    def meet(self) -> torch.Tensor | None:
        """See Turns and `PairExchange.meet`; None: the segment is not over."""
        return self.exchange.meet(self.known.done) if self.known.ends else None

    def buffers(self) -> Iterator[torch.Tensor]:
        """See Turns: of the averages that neighbours begin."""
        yield from list(self.service.memory.values())

    def close(self) -> None:
        """See Turns."""
        self.server.close()
        for client in (self.first, *self.exchange.clients.values()):
            client.close()


def introduced(
    plan: Plan, world: World, exchange: PairExchange, rate_of: Callable[[int], float], first_step: int
) -> Hand:
    """Listen on the interface of the route to the other ranks, tell them where, and wait until all listen."""
    rank, timeout_s = world.place.rank, world.timeout.total_seconds()
    listener, ranks = listen(world.meeting.address), range(plan.mesh.world_size)
    noticed_s = max(OF_TIMEOUT * timeout_s, timeout_s - NOTICE_S)
    away = Away(noticed_s, goes_on=False) if world.pages is None else None
    service = Neighbour(exchange, Coordinator(len(ranks), first_step, timeout_s, away) if rank == 0 else None)
    server = Server(listener, world.meeting.key, service, rank, ranks)
    if away is not None:
        away.connected = lambda: server.connected
    world.store.set(f"replica{rank}", json.dumps(listener.getsockname()[:2]))
    needed = [0, *(exchange.pairs.partners(rank) if exchange.is_active else ())]
    keys = [f"replica{other}" for other in needed]
    world.store.wait(keys, timedelta(seconds=timeout_s))
    clients, facts = list[Client](), {"host": socket.gethostname()}
    for other, where in zip(needed, world.store.multi_get(keys)):
        host, port = json.loads(where)
        patience_s = PATIENCE * timeout_s if clients else timeout_s
        clients.append(Client((host, port), world.meeting.key, rank, f"rank {other}", facts, patience_s))
    if world.pages is None:
        clients[0].keep()
    exchange.clients = dict(zip(needed[1:], clients[1:]))
    hand = Hand(plan, exchange, clients[0], service, server, rate_of, first_step)
    exchange.look = hand.look
    return hand
