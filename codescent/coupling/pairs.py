"""In: a plan with asynchronous gossip, what the run gives. Out: a rank that is given work, connected to its neighbours.
Does not average (pair_exchange.py does) and does not choose the work (coordinate.py does)."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from codescent.base.errors import RunFailed
from codescent.base.stopwatch import waiting
from codescent.coupling.coordinate import Coordinator
from codescent.coupling.coupling import StepSums, WorkItem
from codescent.coupling.failure_detector import OF_TIMEOUT, FailureDetector
from codescent.coupling.local_steps import LocalSteps
from codescent.coupling.pair_exchange import PairExchange
from codescent.coupling.queued import Known, Queued
from codescent.coupling.services import Services, WeightUpdater
from codescent.coupling.told import HOST, WHOLE, check, nonsense
from codescent.plan import Plan
from codescent.record import gossip_order
from codescent.servers import Portion
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


class PairedReplicas(Queued, LocalSteps):
    """A rank that is given portions of work, updates its weights itself, and averages with neighbours meanwhile.

    What it knows of the run is Queued's; verbs, sums, checkpoints and memory are those of LocalSteps.

    Args:
        plan, optimizer, services: see Coupling.
        exchange: of this rank.
        first: a client of rank 0, which gives out the work.
        service, server: of this rank.
    """

    exchange: PairExchange

    def __init__(
        self,
        plan: Plan,
        optimizer: WeightUpdater,
        services: Services,
        exchange: PairExchange,
        first: Client,
        service: Neighbour,
        server: Server,
    ) -> None:
        LocalSteps.__init__(self, plan, optimizer, services, exchange)
        self.begin_work()
        self.first, self.server, self.service = first, server, service
        self.report: dict[str, Any] | None = None  # of a portion that is computed

    def work(self, number: int, rate: float) -> Iterator[WorkItem]:
        """See Coupling."""
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
                yield WorkItem(self.step, number, self.services.rate_of(self.step))
                self._finish()

    def _finish(self) -> None:
        """A portion is computed: the sums are this rank's own."""
        loss, stop, *_, square = self.at.sums.tolist()
        assert self.portion is not None
        self.report = {
            "portion": [self.portion.step, self.portion.part],
            **{"loss": loss, "losses": self.at.portion.own_losses, "square": square, "stop": bool(stop)},
            **{"skipped": not math.isfinite(loss + square), "staleness": self.exchange.staleness},
        }
        self.portion = None

    def result(self, number: int) -> StepSums:
        """See Coupling. Where the segment is over, all ranks meet: they have the distance of the replicas, too."""
        found = super().result(number)
        if not self.known.ends:
            return found
        return replace(found, values=torch.cat((found.values, self.exchange.meet(self.known.done).cpu())))

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

    def begin(self, run: Path, first_step: int) -> None:
        """See Coupling."""
        gossip_order.rewind(run, self.exchange.index, first_step)

    def write_order(self, run: Path) -> None:
        """See Coupling."""
        gossip_order.append(run, self.exchange.index, self.exchange.take_order())

    def buffers(self) -> Iterator[torch.Tensor]:
        """See Coupling: also of the averages that neighbours begin."""
        yield from super().buffers()
        yield from list(self.service.memory.values())

    def close(self) -> None:
        """See Coupling."""
        super().close()
        self.server.close()
        for client in (self.first, *self.exchange.clients.values()):
            client.close()


def introduced(plan: Plan, optimizer: WeightUpdater, services: Services, exchange: PairExchange) -> PairedReplicas:
    """Listen on the interface of the route to the other ranks, tell them where, and wait until all listen."""
    world, rank = services.ranks, services.rank
    timeout_s = world.timeout.total_seconds()
    listener, ranks = listen(world.meeting.address), range(plan.mesh.world_size)
    noticed_s = max(OF_TIMEOUT * timeout_s, timeout_s - NOTICE_S)
    detector = FailureDetector(noticed_s, goes_on=False) if world.pages is None else None
    coordinator = Coordinator(len(ranks), services.first_step, timeout_s, detector) if rank == 0 else None
    service = Neighbour(exchange, coordinator)
    server = Server(listener, world.meeting.key, service, rank, ranks)
    if detector is not None:
        detector.connected = lambda: server.connected
    world.store.set(services.key(f"replica{rank}"), json.dumps(listener.getsockname()[:2]))
    needed = [0, *(exchange.pairs.partners(rank) if exchange.is_active else ())]
    keys = [services.key(f"replica{other}") for other in needed]
    world.store.wait(keys, timedelta(seconds=timeout_s))
    clients, facts = list[Client](), {"host": socket.gethostname()}
    for other, where in zip(needed, world.store.multi_get(keys)):
        host, port = json.loads(where)
        patience_s = PATIENCE * timeout_s if clients else timeout_s
        clients.append(Client((host, port), world.meeting.key, rank, f"rank {other}", facts, patience_s))
    if world.pages is None:
        clients[0].keep()
    exchange.clients = dict(zip(needed[1:], clients[1:]))
    pairs = PairedReplicas(plan, optimizer, services, exchange, clients[0], service, server)
    exchange.look = pairs.look
    return pairs
