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
from codescent.coupling.averaging import Replicas
from codescent.coupling.differences import Differences
from codescent.coupling.services import TrainedWeight
from codescent.plan import Collective
from codescent.plan.wire import Wire
from codescent.strategies.collectives import all_reduce
from codescent.strategies.gossip import SKETCH
from codescent.strategies.gossip_graphs import AXIS, Row, graph_of
from codescent.strategies.strategy import ThisRank

SKETCHED = 1 << 22
"""Elements that are projected at once, to bound the memory of their signs."""


class Mixing(Replicas):
    """EXCHANGE on one rank, for its part of the weights of a replica. AVERAGE begins it, MERGE ends it.

    Push-sum: replica i has a weight w_i. It trains z_i. An exchange mixes x_i = w_i z_i, and w_i. It changes neither
    the sum of all x_i nor that of all w_i. Assran et al. (2019, algorithm 1) keep x_i, and add to it what training
    changes in z_i. Then z_i moves 1 / w_i times as far, which is unstable with many steps between exchanges. See
    docs/gossip.md.

    Args:
        copies: of each trained tensor of this rank's stage, in the plan's order, with initial values, which are the
            same on all replicas.
        this_rank: with a process group for dp_replicate.
    """

    def __init__(self, copies: Sequence[TrainedWeight], this_rank: ThisRank) -> None:
        super().__init__(copies, this_rank)
        plan, layout = this_rank.plan, this_rank.plan.layout
        self.graph, self.every, self.wire_from = graph_of(plan), layout.gossip_every, layout.wire_from
        self.index, self.number = this_rank.coordinates[AXIS], 0
        self.parts = [_Part([self.copies[index] for index in indices]) for indices in self.alike]
        self.weight: Tensor | None = None
        if layout.gossip == "push-sum" and self.copies:
            self.weight = torch.ones(1, dtype=torch.float64, device=self.copies[0].master.device)
        wire = Wire.parse(layout.wire)
        for part in self.parts if wire.lossy else ():
            part.differences = Differences(wire, part.weights())
        self.flying: _Flying | None = None

    def stepped(self, number: int, own_losses: int, losses: int) -> None:
        """See WeightExchange. How many losses a replica has computed does not decide how much it counts."""
        self.number = number

    @torch.no_grad()
    def average(self, fragment: int) -> None:
        """See WeightExchange: send to the neighbours, begin to receive from them."""
        round_number = self.number // self.every
        row, targets = self.graph.matrix(round_number)[self.index], self.graph.targets(round_number, self.index)
        flight, is_whole, ops = Flight(Collective.SEND, self.group), self.number < self.wire_from, list[dist.P2POp]()
        wholes = [part.mixable(self.weight) for part in self.parts]
        messages = [
            whole if part.differences is None or is_whole else part.differences.encode(whole)
            for part, whole in zip(self.parts, wholes)
        ]
        values = [self._ops(message, row, targets, ops) for message in messages]
        weights = {} if self.weight is None else self._ops(self.weight.clone(), row, targets, ops)
        works = dist.batch_isend_irecv(ops) if ops else []
        self.flying = _Flying(row, wholes, is_whole, values, weights, works, flight)

    def _ops(self, message: Tensor, row: Row, targets: Sequence[int], ops: list[dist.P2POp]) -> dict[int, Tensor]:
        """Add sends and receives of a message to `ops`. Returns by replica of the row what arrives from it.

        Messages between two replicas arrive in the order of `ops`.
        """
        values = {source: message if source == self.index else torch.empty_like(message) for source in row}
        for source, memory in values.items():
            if source != self.index:
                ops.append(dist.P2POp(dist.irecv, memory, group=self.group, group_peer=source))
        ops += [dist.P2POp(dist.isend, message, group=self.group, group_peer=target) for target in targets]
        return values

    @torch.no_grad()
    def merge(self, fragment: int) -> None:
        """See WeightExchange: wait for the neighbours' weights, and mix them."""
        assert self.flying is not None
        one, self.flying = self.flying, None
        with waiting():
            for work in one.works:
                work.wait()
        one.flight.waited()
        if self.weight is not None:
            self.weight.copy_(_mixed(one.row, one.weights))
        for part, whole, values in zip(self.parts, one.wholes, one.values):
            if part.differences is None:
                part.put(_mixed(one.row, values), self.weight)
            elif one.is_whole:
                mixed = _mixed(one.row, values)
                part.differences.restart(whole, mixed)
                part.put(mixed, self.weight)
            else:
                part.put(part.differences.mix(whole, self.index, one.row, values), self.weight)

    @torch.no_grad()
    def distance(self) -> Tensor:
        """See WeightExchange: estimated from random projections, which keep norms on average (Alon et al. 1996)."""
        return distance_of(self.copies, self.degree, self.group, self.weight)

    @torch.no_grad()
    def means(self) -> Sequence[Tensor]:
        """See WeightExchange. With push-sum each replica counts by its weight."""
        found = dict[int, Tensor]()
        for part, indices in zip(self.parts, self.alike):
            mean = part.mixable(self.weight).div_(self.degree)
            all_reduce(mean, group=self.group)
            pieces = torch.split(mean, part.sizes)
            found |= {index: piece.view_as(self.copies[index].master) for index, piece in zip(indices, pieces)}
        return [found[index].clone() for index in range(len(self.copies))]  # one by one: a view would be saved whole

    def state(self) -> Mapping[str, Tensor]:
        """See WeightExchange."""
        found: dict[str, Tensor] = {} if self.weight is None else {"gossip.weight": self.weight}
        for number, part in enumerate(self.parts):
            if part.differences is not None:
                found[f"gossip.{number}.public"] = part.differences.public
                found[f"gossip.{number}.mixed"] = part.differences.mixed
        return found

    def buffers(self) -> Iterator[Tensor]:
        """See WeightExchange. An exchange begins and ends within one instruction."""
        yield from ()

    def close(self) -> None:
        """See WeightExchange."""
        self.group = None


class _Part:
    """Weights that travel in one message. `differences`: with a lossy wire."""

    def __init__(self, copies: Sequence[TrainedWeight]) -> None:
        self.copies = copies
        self.sizes = [copy.master.numel() for copy in copies]
        self.differences: Differences | None = None

    def weights(self) -> Tensor:
        """The weights of this rank as one vector, copied."""
        return torch.cat([copy.master.detach().reshape(-1) for copy in self.copies])

    def mixable(self, weight: Tensor | None) -> Tensor:
        """What is mixed, as a copy: the weights of this rank; with push-sum times the replica's `weight` [1], fp64."""
        weights = self.weights()
        return weights if weight is None else weights.mul_(weight.to(weights.dtype))

    def put(self, mixed: Tensor, weight: Tensor | None) -> None:
        """Replace the weights by what was mixed; with push-sum divided by the replica's new `weight`. Overwrites
        `mixed`."""
        if weight is not None:
            mixed.div_(weight.to(mixed.dtype))
        for copy, piece in zip(self.copies, torch.split(mixed, self.sizes)):
            copy.master.copy_(piece.view_as(copy.master))
            if copy.tensor is not copy.master:
                copy.tensor.copy_(copy.master)


@dataclass
class _Flying:
    """An exchange that has begun.

    Attributes:
        row: of the mixing matrix.
        wholes: by part: what this replica mixes.
        is_whole: whether it is sent so, whatever the wire; else differences to its public copy are.
        values: by part and replica of the row: its message.
        weights: push-sum: by replica of the row, its weight.
    """

    row: Row
    wholes: list[Tensor]
    is_whole: bool
    values: list[dict[int, Tensor]]
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


@torch.no_grad()
def distance_of(
    copies: Sequence[TrainedWeight], degree: int, group: dist.ProcessGroup, weight: Tensor | None = None
) -> Tensor:
    """See WeightExchange.distance: estimated from random projections of the weights of `degree` replicas. Collective.

    `weight`: by which this replica counts in the mean, fp64 [1]; None: 1.
    """
    if not copies:
        return torch.zeros(2, dtype=torch.float64)
    own = torch.zeros(SKETCH, dtype=torch.float64, device=copies[0].master.device)
    for index, copy in enumerate(copies):
        if copy.counted:
            own += _projections(copy.master.reshape(-1), index)
    mean = (own if weight is None else own * weight) / degree
    all_reduce(mean, group=group)
    return torch.stack([(own - mean).square().sum(), mean.square().sum()])


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
