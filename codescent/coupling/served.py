"""In: a plan with parameter servers, what the run gives. Out: the coupling of a worker, or of a rank that only serves.
Does not apply pushes (parameter_server.py does) and does not send them (worker.py does)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from codescent.coupling.coupling import Coupling, StepSums
from codescent.coupling.failure_detector import FailureDetector
from codescent.coupling.followers import follow
from codescent.coupling.membership import MembershipChange, deaths
from codescent.coupling.outer_optimizer import OuterOptimizer
from codescent.coupling.parameter_server import WeightServer
from codescent.coupling.queued import told
from codescent.coupling.regroup import regroup
from codescent.coupling.round_server import RoundServer
from codescent.coupling.round_worker import RoundWorker
from codescent.coupling.server_thread import serve_beside
from codescent.coupling.services import Services, TrainedWeight
from codescent.coupling.worker import Worker
from codescent.data.loader import Loader
from codescent.data.loader import Portion as Samples
from codescent.plan import Instruction, Plan, Verb
from codescent.transport import Client, Server, listen


class OnlyServes(Coupling):
    """A rank that is a parameter server and nothing else.

    Args:
        plan, services: see Coupling.
        server: of this rank.
    """

    knows_steps = False
    why_unheld = Worker.why_unheld

    def __init__(self, plan: Plan, services: Services, server: WeightServer) -> None:
        super().__init__(plan, server.part.optimizer, services)
        self.server = server
        self.verbs = {Verb.SERVE: self._serve}

    def read(self, loader: Loader | None) -> tuple[Samples, int] | None:
        """See Coupling."""
        return None

    def _serve(self, instruction: Instruction) -> None:
        self.server.serve(self.at.number, self.at.rate)

    def result(self, number: int) -> StepSums:
        """See Coupling."""
        server = self.server
        done = min(server.queue.done, number + self.plan.schedule.period)
        return told([server.queue.sums] if server.queue.sums else [], done, stops=server.has_ended)

    def meet(self, step: int) -> MembershipChange:
        """See Coupling."""
        return regroup(self.services.ranks, self.plan, self.server, step)

    def begin(self, run: Path, first_step: int) -> None:
        """See Coupling."""
        self.server.rewind(run, first_step)

    def write_order(self, run: Path) -> None:
        """See Coupling."""
        self.server.write_order(run)

    def buffers(self) -> Iterator[torch.Tensor]:
        """See Coupling."""
        yield from self.server.buffers()

    def close(self) -> None:
        """See Coupling."""
        self.server.close()


def served(plan: Plan, weights: Sequence[TrainedWeight], services: Services) -> Coupling:
    """The coupling of a rank of a plan with servers. Its server listens before a worker waits for servers.

    Args:
        plan: of the run.
        weights: the trained tensors of this rank, in the plan's order; none: it only serves.
        services: what the run gives.
    """
    server = _listening(plan, services) if services.rank in plan.servers else None
    if server is not None and services.rank not in plan.mesh:
        return OnlyServes(plan, services, server)
    clients = _clients(plan, services, services.rank, len(plan.servers))
    if services.ranks.pages is None:
        clients[0].keep()
    worker: Worker
    if plan.layout.served_rounds:
        worker = RoundWorker(plan, services.own_optimizer(weights), services, clients, server)
    else:
        optimizer = services.server_optimizer([]) if server is None else server.part.optimizer
        worker = Worker(plan, optimizer, services, [weight.tensor for weight in weights], clients, server)
    if server is not None:
        serve_beside(server, services.rate_of, services.ranks.give_up, worker.hang_up)
    return worker


def _listening(plan: Plan, services: Services) -> WeightServer:
    """A server of its part. It listens on the interface of the route to the other ranks, and tells them where."""
    ranks, rank = services.ranks, services.rank
    index = plan.servers.index(rank)
    facts = (ranks.servers, services.first_step, services.stop_requested)
    part = services.server_weights(index)
    if plan.layout.served_rounds:
        server: WeightServer = RoundServer(plan, index, OuterOptimizer(part, plan), *facts)
    else:
        server = WeightServer(plan, index, services.server_optimizer(part), *facts)
    server.stalls.timeout_s, server.tells = ranks.timeout.total_seconds(), ranks.pages is None
    listener = listen(ranks.meeting.address)
    if index == 0:
        _watch_workers(server, plan, services)
    senders = range(plan.mesh.world_size + len(plan.servers))  # server k follows the first one as number workers + k
    server.server = Server(listener, ranks.meeting.key, server, rank, senders)
    if server.detector is not None:
        server.detector.connected = lambda: () if server.server is None else server.server.connected
    ranks.store.set(services.key(f"server{index}"), json.dumps(listener.getsockname()[:2]))
    if index:
        follow(server, _clients(plan, services, plan.mesh.world_size + index, 1)[0])
    return server


def _watch_workers(server: WeightServer, plan: Plan, services: Services) -> None:
    """The first server hears who has died: of the launcher, if it has started all ranks, else by their connections."""
    pages = services.ranks.pages
    if pages is None:
        server.detector = FailureDetector(services.ranks.timeout.total_seconds(), goes_on=plan.layout.can_lose_workers)
        server.membership.deaths = server.detector.deaths
    elif plan.layout.can_lose_workers:
        server.membership.deaths = partial(deaths, pages, plan.mesh.world_size)


def _clients(plan: Plan, services: Services, sender: int, count: int) -> list[Client]:
    """Clients of the first `count` servers. Waits until they listen."""
    ranks = services.ranks
    keys, timeout_s = [services.key(f"server{index}") for index in range(count)], ranks.timeout.total_seconds()
    ranks.store.wait(keys, timedelta(seconds=timeout_s))
    clients, facts = [], {"host": socket.gethostname()}
    for index, where in enumerate(ranks.store.multi_get(keys)):
        host, port = json.loads(where)
        name = f"server {index} (rank {plan.servers[index]})"
        clients.append(Client((host, port), ranks.meeting.key, sender, name, facts, timeout_s))
    return clients
