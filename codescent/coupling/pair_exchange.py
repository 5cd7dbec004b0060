"""In: the weights of a replica, clients of its neighbours. Out: weights averaged in pairs, beside the computation.
Does not decide with whom (gossip_graphs.py does) and opens no connection (pairs.py does)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from codescent.base.stopwatch import beside, waiting
from codescent.coupling.averaging import Replicas
from codescent.coupling.mixing import distance_of
from codescent.coupling.services import TrainedWeight
from codescent.servers.changes import AGREED, AVERAGED, MERGED, SENT, STEPPED, Changed
from codescent.strategies.collectives import all_reduce
from codescent.strategies.gossip_graphs import AXIS, pairs_of
from codescent.strategies.strategy import ThisRank
from codescent.transport import Client, Kind
from codescent.transport.tensors import bytes_of

LOOK_S = 1.0
"""Seconds between two looks whether a neighbour has died for which this replica waits."""


class PairExchange(Replicas):
    """AVERAGE and MERGE of asynchronous gossip, on a replica of one rank.

    x are the weights of this replica, in the host's memory. Averages and updates change x, one after the other, under a
    lock. Forward and backward read the weights of the last update (Lian et al. 2018, algorithm 1: the gradient is of
    older weights than those that it changes).

    An active replica i sends x_i. The passive j adds d = rate (x_i - x_j) / 2 to x_j at once, and answers d. Then i
    subtracts d. With rate 1, and no update of i on the way, both have (x_i + x_j) / 2. An update on the way stays: so
    the sum of both replicas never changes by an average, and i does not wait for the link.

    Args:
        copies: of each trained tensor, in the plan's order.
        this_rank: with a process group for dp_replicate.
    """

    def __init__(self, copies: Sequence[TrainedWeight], this_rank: ThisRank) -> None:
        super().__init__(copies, this_rank)
        plan = this_rank.plan
        self.pairs, self.index = pairs_of(plan), this_rank.coordinates[AXIS]
        self.is_active = self.pairs.is_active(self.index)
        self.every, self.rate = plan.layout.gossip_every, plan.layout.gossip_rate
        self.sizes = [copy.master.numel() for copy in self.copies]
        self.x = torch.empty(sum(self.sizes), dtype=self.copies[0].master.dtype)
        self.sent, self.came = (torch.empty_like(self.x) if self.is_active else self.x[:0] for _ in range(2))
        self.clients: Mapping[int, Client] = {}  # by passive neighbour
        self.look: Callable[[], object] = int  # raises RunFailed if a rank has died
        self.lock = threading.Lock()  # of x, and of what is said about it below
        self.updates = False  # MERGE has taken the lock
        self.changes = 0  # averages since the last update
        self.staleness = 0  # of the last update
        self.order: list[Changed] = []
        self.segment: int | None = None  # steps that were complete when the ranks last met; None: they are meeting
        self.steps = self.number = 0  # updates, averages begun; both since then
        self.part = -1  # of the step whose samples this replica has
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="codescent gossip", initializer=beside)
        self.flying: Future[None] | None = None

    @torch.no_grad()
    def begin(self, steps: int) -> None:
        """All ranks have met after `steps` steps: from now on neighbours may average with this replica."""
        with self.lock:
            self._put()
            self.changes, self.segment = 0, steps
            self.steps = self.number = 0

    @torch.no_grad()
    def merge(self, fragment: int) -> None:
        """See WeightExchange: take the weights as they are now. No average changes them until `stepped`."""
        self.lock.acquire()
        self.updates = True
        self.staleness = self.changes
        self._take()

    @torch.no_grad()
    def stepped(self, number: int, own_losses: int, losses: int) -> None:
        """See WeightExchange: neighbours see the update."""
        self._put()
        self.order.append(Changed(STEPPED, -1, self.staleness, number, self.part))
        self.changes = 0
        self.steps += 1
        self._release()

    @torch.no_grad()
    def average(self, fragment: int) -> None:
        """See WeightExchange. The average before has come back by then: so as many begin as the plan declares."""
        if not self.is_active or self.steps % self.every:
            return
        self._land()
        assert self.segment is not None
        partner = self.pairs.partner(self.index, self.segment, self.number)
        with self.lock:
            self.sent.copy_(self.x)
            self.order.append(Changed(SENT, partner, self.number, self.segment))
        self.flying = self.pool.submit(self._average, partner, self.number, self.segment)
        self.number += 1

    @torch.no_grad()
    def _average(self, partner: int, number: int, segment: int) -> None:
        """The side of the active replica, in a thread."""
        facts = {"segment": segment, "average": number}
        payloads, into = [bytes_of(self.sent)], [bytes_of(self.came)]
        self.clients[partner].request(Kind.EXCHANGE, metadata=facts, payloads=payloads, into=into)
        with self.lock:
            self.x.sub_(self.came)
            self.changes += 1
            self.order.append(Changed(MERGED, partner, number, segment))

    @torch.no_grad()
    def answer(self, sender: int, segment: int, number: int, weights: Tensor) -> bool:
        """The side of a passive replica, called by a thread of its server.

        Args:
            sender: the active replica.
            segment: steps that were complete when the sender's ranks last met.
            number: of the average.
            weights: of the sender; replaced by what it has to subtract from them.

        Returns:
            False: not yet, because this replica has not gone on after the ranks have met.
        """
        with self.lock:
            if self.segment != segment:
                return False
            change = weights.sub_(self.x).mul_(self.rate / 2)
            self.x.add_(change)
            self.changes += 1
            self.order.append(Changed(AVERAGED, sender, number, segment))
            return True

    def _land(self) -> None:
        """Wait for the average that is under way. Raises what its thread has raised, or `look`."""
        if self.flying is not None:
            with waiting():
                while not wait((self.flying,), LOOK_S).done:
                    self.look()
                self.flying.result()
            self.flying = None

    def meet(self, steps: int) -> Tensor:
        """All ranks meet after `steps` steps: averages end, and each rank has its replica's weights. Collective.

        Returns:
            Sums over replicas: the squared distance from their mean, and its squared norm; fp64, [2].
        """
        self._land()
        all_reduce(torch.zeros(1, dtype=torch.float64, device=self.device), group=self.group)  # so have all others
        with self.lock:
            self.segment = None
            with torch.no_grad():
                self._take()
            self.order.append(Changed(AGREED, -1, -1, steps))
        found = self.distance()
        all_reduce(found, group=self.group)
        return found

    @property
    def device(self) -> torch.device:
        """That of the weights."""
        return self.copies[0].master.device

    def _put(self) -> None:
        """Copy the optimizer's weights into x."""
        for copy, piece in zip(self.copies, torch.split(self.x, self.sizes)):
            piece.view_as(copy.master).copy_(copy.master)

    def _take(self) -> None:
        """Copy x into the weights, if an average has changed it."""
        if self.changes:
            for copy, piece in zip(self.copies, torch.split(self.x, self.sizes)):
                copy.master.copy_(piece.view_as(copy.master))
                if copy.tensor is not copy.master:
                    copy.tensor.copy_(copy.master)

    def distance(self) -> Tensor:
        """See WeightExchange: estimated from random projections. Collective."""
        return distance_of(self.copies, self.degree, self.group)

    @torch.no_grad()
    def means(self) -> Sequence[Tensor]:
        """See WeightExchange."""
        found = [copy.master / self.degree for copy in self.copies]
        for mean in found:
            all_reduce(mean, group=self.group)
        return found

    def take_order(self) -> list[Changed]:
        """What was done since the last call."""
        with self.lock:
            found, self.order = self.order, []
            return found

    def state(self) -> Mapping[str, Tensor]:
        """See WeightExchange. Where a run saves, x is the weights."""
        return {}

    def buffers(self) -> Iterator[Tensor]:
        """See WeightExchange."""
        yield from (self.x, self.sent, self.came)

    def _release(self) -> None:
        self.updates = False
        self.lock.release()

    def close(self) -> None:
        """See WeightExchange. After an update that has failed, threads that wait for its end go on."""
        if self.updates:
            self._release()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.group = None
