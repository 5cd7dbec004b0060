"""In: the weights of a replica that trains apart. Out: mixed with those of its neighbours, by sends and receives.
Does not decide when and with whom: the plan and gossip_graphs.py do. Does not encode messages (differences.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from codescent.base.ranges import Flight
from codescent.base.stopwatch import waiting
from codescent.plan import Collective
from codescent.plan.wire import Wire
from codescent.strategies.averaging import Replicas
from codescent.strategies.collectives import all_reduce
from codescent.strategies.differences import Differences
from codescent.strategies.gossip import AXIS, SKETCH, graph_of
from codescent.strategies.gossip_graphs import Row
from codescent.strategies.strategy import Copy, ThisRank

SKETCHED = 1 << 22
"""Elements that are projected at once, to bound the memory of their signs."""


class Mixing(Replicas):
    """EXCHANGE on one rank, for its part of the weights of a replica. AVERAGE begins it, MERGE ends it.

    Push-sum: replica i has numerators x_i and a weight w_i, and trains z_i = x_i / w_i. What training changes in z_i is
    added to x_i (Assran et al. 2019, algorithm 1). Sums over replicas of x_i and of w_i stay.

    Args:
        copies: of each trained tensor of this rank's stage, in the plan's order, with initial values, which are the
            same on all replicas.
        this_rank: with a process group for dp_replicate.
    """

    def __init__(self, copies: Sequence[Copy], this_rank: ThisRank) -> None:
        super().__init__(copies, this_rank)
        plan, layout = this_rank.plan, this_rank.plan.layout
        self.graph, self.every = graph_of(plan), layout.gossip_every
        self.index, self.number = this_rank.coordinates[AXIS], 0
        self.sizes = [copy.master.numel() for copy in self.copies]
        wire, self.wire_from = Wire.parse(layout.wire), layout.wire_from
        self.numerator: Tensor | None = None
        self.weight: Tensor | None = None
        self.differences: Differences | None = None
        if self.copies and layout.gossip == "push-sum":
            self.numerator = self._weights()
            self.weight = torch.ones(1, dtype=torch.float64, device=self.numerator.device)
        if self.copies and wire.lossy:
            self.differences = Differences(wire, self._weights())
        self.flying: _Flying | None = None

    def stepped(self, number: int, own_losses: int, losses: int) -> None:
        """See Exchange. Replicas count equally, however many losses they have computed."""
        self.number = number

    @torch.no_grad()
    def average(self, fragment: int) -> None:
        """See Exchange: send to the neighbours, begin to receive from them."""
        if not self.copies:
            return
        round_number = self.number // self.every
        row, targets = self.graph.matrix(round_number)[self.index], self.graph.targets(round_number, self.index)
        whole, differences = self._numerators(), None
        if self.differences is not None and self.number >= self.wire_from:
            differences = self.differences.encode(whole)
        flight = Flight(Collective.SEND, self.group)
        values, ops = self._ops(whole if differences is None else differences, row, targets, 0)
        weights: dict[int, Tensor] = {}
        if self.weight is not None:
            weights, more = self._ops(self.weight.clone(), row, targets, 1)
            ops += more
        works = dist.batch_isend_irecv(ops) if ops else []
        self.flying = _Flying(row, whole, differences is None, values, weights, works, flight)

    def _ops(
        self, message: Tensor, row: Row, targets: Sequence[int], tag: int
    ) -> tuple[dict[int, Tensor], list[dist.P2POp]]:
        """By replica of the row: what arrives from it. The sends and receives for it."""
        values = {source: message if source == self.index else torch.empty_like(message) for source in row}
        ops = [
            dist.P2POp(dist.irecv, memory, group=self.group, tag=tag, group_peer=source)
            for source, memory in values.items()
            if source != self.index
        ]
        ops += [dist.P2POp(dist.isend, message, group=self.group, tag=tag, group_peer=target) for target in targets]
        return values, ops

    @torch.no_grad()
    def merge(self, fragment: int) -> None:
        """See Exchange: wait for the neighbours' weights, and mix them."""
        if self.flying is None:
            return
        one, self.flying = self.flying, None
        with waiting():
            for work in one.works:
                work.wait()
        one.flight.waited()
        if self.differences is None or one.is_whole:
            mixed = _mixed(one.row, one.values)
            if self.differences is not None:
                self.differences.restart(one.whole, mixed)
        else:
            mixed = self.differences.mix(one.whole, self.index, one.row, one.values)
        if self.numerator is not None and self.weight is not None:
            self.numerator.copy_(mixed)
            self.weight.copy_(_mixed(one.row, one.weights))
            mixed = self.numerator / self.weight.to(mixed.dtype)
        for copy, piece in zip(self.copies, torch.split(mixed, self.sizes)):
            copy.master.copy_(piece.view_as(copy.master))
            if copy.weights is not copy.master:
                copy.weights.copy_(copy.master)

    def _weights(self) -> Tensor:
        """The weights of this rank as one vector, copied."""
        return torch.cat([copy.master.detach().reshape(-1) for copy in self.copies])

    def _numerators(self) -> Tensor:
        """What is mixed: the weights; with push-sum the numerators, with what training has changed since."""
        weights = self._weights()
        if self.numerator is None or self.weight is None:
            return weights
        return self.numerator + (weights - self.numerator / self.weight.to(weights.dtype))

    @torch.no_grad()
    def distance(self) -> Tensor:
        """See Exchange: estimated from random projections, which keep norms on average (Alon et al. 1996, 2.2)."""
        if not self.copies:
            return torch.zeros(2, dtype=torch.float64)
        own = torch.zeros(SKETCH, dtype=torch.float64, device=self.copies[0].master.device)
        for index, copy in enumerate(self.copies):
            if copy.counted:
                own += _projections(copy.master.reshape(-1), index)
        mean = own / self.degree
        all_reduce(mean, group=self.group)
        return torch.stack([(own - mean).square().sum(), mean.square().sum()])

    @torch.no_grad()
    def means(self) -> Sequence[Tensor]:
        """See Exchange. With push-sum the sum of the numerators over the number of replicas."""
        if not self.copies:
            return []
        pieces = torch.split(self._numerators().div_(self.degree), self.sizes)
        found = [piece.view_as(copy.master).clone() for copy, piece in zip(self.copies, pieces)]
        for mean in found:
            all_reduce(mean, group=self.group)
        return found

    def state(self) -> Mapping[str, Tensor]:
        """See Exchange."""
        found: dict[str, Tensor] = {}
        if self.numerator is not None and self.weight is not None:
            found |= {"gossip.numerator": self.numerator, "gossip.weight": self.weight}
        if self.differences is not None:
            found |= {"gossip.public": self.differences.public, "gossip.mixed": self.differences.mixed}
        return found

    def buffers(self) -> Iterator[Tensor]:
        """See Exchange. An exchange begins and ends within one instruction."""
        yield from ()

    def close(self) -> None:
        """See Exchange."""
        self.group = None


@dataclass
class _Flying:
    """An exchange that has begun.

    Attributes:
        row: of the mixing matrix.
        whole: what this replica mixes.
        is_whole: whether it was sent so; else differences to its public copy.
        values: by replica of the row: its message.
        weights: push-sum: its weight.
    """

    row: Row
    whole: Tensor
    is_whole: bool
    values: dict[int, Tensor]
    weights: dict[int, Tensor]
    works: list[Any]
    flight: Flight


def _mixed(row: Row, values: Mapping[int, Tensor]) -> Tensor:
    """The weighted sum, in the order of replicas: in a complete graph all of them get the same bits."""
    (first, weight), *others = row.items()
    mixed = values[first] * weight
    for source, weight in others:
        mixed.add_(values[source], alpha=weight)
    return mixed


def _projections(values: Tensor, seed: int) -> Tensor:
    """SKETCH sums of the elements with random signs, fp64 [SKETCH]. Element e is in sum e mod SKETCH."""
    signed = torch.Generator(values.device).manual_seed(seed)
    sums = torch.zeros(SKETCH, dtype=torch.float64, device=values.device)
    for piece in torch.split(values, SKETCHED):
        signs = torch.randint(0, 2, piece.shape, generator=signed, dtype=torch.int8, device=piece.device)
        flipped = torch.where(signs.bool(), piece, -piece)
        whole = len(flipped) // SKETCH * SKETCH
        sums += flipped[:whole].view(-1, SKETCH).sum(0, dtype=torch.float64)
        sums[: len(flipped) - whole] += flipped[whole:]
    return sums
