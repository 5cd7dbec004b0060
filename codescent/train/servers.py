"""In: a plan with parameter servers, this rank's world. Out: a server that listens, or a worker that is connected.
Does not apply pushes (serve.py does) and does not send them (strategies/worker.py does)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan import Plan
from codescent.strategies import Copy
from codescent.strategies.round_worker import RoundWorker
from codescent.strategies.worker import Worker
from codescent.train.away import Away
from codescent.train.crew import deaths
from codescent.train.follow import follow
from codescent.train.initial import write_initial_values_
from codescent.train.optimize import Optimizer, Weight
from codescent.train.serve import Serving
from codescent.train.serve_rounds import OuterOptimizer, RoundServing
from codescent.train.world import World
from codescent.transport import Client, Server, listen

Rates = Callable[[int], float]
"""The learning rate of a step (from 0)."""


def served_weights(plan: Plan, index: int, *, replaced: bool) -> list[Weight]:
    """The pieces of server `index`, with initial values. `replaced`: a checkpoint will overwrite them."""
    found, boxes = [], []
    for piece in plan.pieces[index]:
        tensor = plan.trained[piece.index]
        parameter = tensor.parameter
        rows = torch.empty((piece.stop - piece.first, *parameter.shape[1:]), dtype=TORCH_DTYPE[tensor.optimizer_dtype])
        offsets = (piece.first, *(0 for _ in parameter.shape[1:]))
        found.append(Weight(parameter.name, rows, rows, parameter.decay, parameter.shape, offsets))
        slices = (slice(piece.first, piece.stop), *(slice(0, size) for size in parameter.shape[1:]))
        boxes.append((parameter, rows, slices))
    write_initial_values_(plan.seed, plan.model.weights, boxes, replaced=replaced)
    return found


def listening(
    plan: Plan, world: World, optimizer: Optimizer, first_step: int, stop_requested: Callable[[], bool]
) -> Serving:
    """A server of its part. It listens on the interface of the route to the other ranks, and tells them where."""
    rank = world.place.rank
    index = plan.servers.index(rank)
    facts = (world.servers, first_step, stop_requested)
    if isinstance(optimizer, OuterOptimizer):
        serving: Serving = RoundServing(plan, index, optimizer, *facts)
    else:
        serving = Serving(plan, index, optimizer, *facts)
    serving.patience.timeout_s, serving.tells = world.timeout.total_seconds(), world.pages is None
    listener = listen(world.meeting.address)
    if index == 0:
        _watch_workers(serving, plan, world)
    senders = range(plan.mesh.world_size + len(plan.servers))  # server k follows the first one as number workers + k
    serving.server = Server(listener, world.meeting.key, serving, rank, senders)
    if serving.away is not None:
        serving.away.connected = lambda: () if serving.server is None else serving.server.connected
    world.store.set(f"server{index}", json.dumps(listener.getsockname()[:2]))
    if index:
        follow(serving, _clients(plan, world, plan.mesh.world_size + index, 1)[0])
    return serving


def _watch_workers(serving: Serving, plan: Plan, world: World) -> None:
    """The first server hears who has died: of the launcher, if it has started all ranks, else by their connections."""
    if world.pages is None:
        serving.away = Away(world.timeout.total_seconds(), goes_on=plan.layout.can_lose_workers)
        serving.crew.deaths = serving.away.deaths
    elif plan.layout.can_lose_workers:
        serving.crew.deaths = partial(deaths, world.pages, plan.mesh.world_size)


def connected(plan: Plan, world: World, copies: Sequence[Copy], first_step: int, rate_of: Rates) -> Worker:
    """A worker with a client for each server. Waits until all servers listen."""
    clients = _clients(plan, world, world.place.rank, len(plan.servers))
    if world.pages is None:
        clients[0].keep()
    if plan.layout.served_rounds:
        return RoundWorker(plan, world.place.rank, copies, clients, first_step, rate_of)
    return Worker(plan, world.place.rank, [copy.weights for copy in copies], clients, first_step)


def _clients(plan: Plan, world: World, sender: int, count: int) -> list[Client]:
    """Clients of the first `count` servers. Waits until they listen."""
    keys, timeout_s = [f"server{index}" for index in range(count)], world.timeout.total_seconds()
    world.store.wait(keys, timedelta(seconds=timeout_s))
    clients, facts = [], {"host": socket.gethostname()}
    for index, where in enumerate(world.store.multi_get(keys)):
        host, port = json.loads(where)
        name = f"server {index} (rank {plan.servers[index]})"
        clients.append(Client((host, port), world.meeting.key, sender, name, facts, timeout_s))
    return clients
