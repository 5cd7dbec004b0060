"""In: the weights of a replica that trains apart. Out: their mean over replicas, or an outer optimizer's step.
Does not decide when (the plan does), and does not encode messages (wire.py does)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from codescent.coupling.outer import Outer
from codescent.coupling.services import TrainedWeight
from codescent.plan import TensorPlan
from codescent.plan.wire import Wire, kept_name
from codescent.strategies.collectives import all_reduce
from codescent.strategies.local_sgd import AXIS, LOSSES, by_holders, fragments_of
from codescent.strategies.strategy import ThisRank
from codescent.strategies.wire import Channel, WireSum


class Replicas:
    """What a rank needs to exchange weights with its like in other replicas, which train apart.

    `alike` has the indices of the tensors that travel together: see `by_holders`.

    Args:
        copies: of each trained tensor of this rank's stage, in the plan's order.
        this_rank: with a process group for dp_replicate.
    """

    def __init__(self, copies: Sequence[TrainedWeight], this_rank: ThisRank) -> None:
        plan = this_rank.plan
        self.copies, self.degree = list(copies), plan.mesh.degree(AXIS)
        self.group: Any = this_rank.groups[AXIS] if self.degree > 1 else None
        self.places = {tensor.parameter.name: index for index, tensor in enumerate(this_rank.trained)}
        self.alike = [self.indices(tensors) for tensors in by_holders(plan, this_rank.trained)]

    def indices(self, tensors: Sequence[TensorPlan]) -> list[int]:
        """Of some trained tensors, among `copies`."""
        return [self.places[tensor.parameter.name] for tensor in tensors]

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """See WeightExchange."""
        for message in self.alike if self.degree > 1 else ():
            sent = [gradients[index] for index in message]
            flat = torch.cat([gradient.reshape(-1) for gradient in sent])
            all_reduce(flat, group=self.group)
            for gradient, piece in zip(sent, torch.split(flat, [gradient.numel() for gradient in sent])):
                gradient.copy_(piece.view_as(gradient))


class Averaging(Replicas):
    """AVERAGE and MERGE on one rank, for its part of the weights of a replica.

    Replicas are weighted by the number of losses that they have computed since a fragment last left. Steps between
    AVERAGE and MERGE stay: x + (mean - x at AVERAGE) (Shen et al. 2019, "CoCoD-SGD", algorithm 1).

    Args:
        copies: of each trained tensor of this rank's stage, in the plan's order, with initial values.
        this_rank: with a process group for dp_replicate that nothing else uses within a round.
    """

    def __init__(self, copies: Sequence[TrainedWeight], this_rank: ThisRank) -> None:
        super().__init__(copies, this_rank)
        plan, layout = this_rank.plan, this_rank.plan.layout
        self.names, self.opening, self.wire_from = list(self.places), plan.schedule.opening_steps, layout.wire_from
        self.overlaps, self.agrees = layout.overlap_steps > 0, layout.agrees_at_ends
        fragments = fragments_of(plan, this_rank.coordinates["pp"])
        self.fragments = [self.indices(one) for one in fragments]
        self.messages = [[self.indices(tensors) for tensors in by_holders(plan, one)] for one in fragments]
        self.wire, self.dtype = Wire.parse(layout.wire), plan.trained[0].optimizer_dtype
        device = self.copies[0].master.device if self.copies else torch.device("cpu")
        self.channel = Channel(device)
        self.sums = self._sums(self.wire)
        self.whole = self._sums(Wire()) if self.wire_from and self.wire.lossy else []
        self.losses = torch.zeros(len(fragments), 2, dtype=torch.float64)  # of this replica, and of all; on the host
        self.number = 0
        self.flying: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]] = {}
        masters = [copy.master for copy in self.copies] if plan.layout.keeps_anchor else []
        rule = layout.outer_optimizer, layout.outer_learning_rate, layout.outer_momentum
        self.outer = Outer(masters, *rule) if masters else None
        self.squares = torch.zeros(2, dtype=torch.float64, device=device)

    def _sums(self, wire: Wire) -> list[list[WireSum]]:
        """By fragment the sums of its messages; none if there is one replica."""

        def one(message: Sequence[int]) -> WireSum:
            masters = [self.copies[index].master for index in message]
            shapes = [tuple(master.shape) for master in masters]
            return WireSum(wire, shapes, self.group, masters[0].device, self.dtype, self.channel)

        return [[one(message) for message in messages if self.degree > 1] for messages in self.messages]

    def stepped(self, number: int, own_losses: int, losses: int) -> None:
        """See WeightExchange. The opening steps are not averaged: the first round begins at their end."""
        self.number = number
        if number < self.opening:
            if number + 1 == self.opening and self.outer is not None:
                self.outer.begin([copy.master for copy in self.copies])
            return
        self.losses += torch.tensor((own_losses, losses))

    @torch.no_grad()
    def average(self, fragment: int) -> None:
        """See WeightExchange. What leaves is a copy: the weights may change until MERGE."""
        indices = self.fragments[fragment]
        own, every = self.losses[fragment].tolist()
        self.losses[fragment].zero_()
        share = own / every if every else 1 / self.degree  # a round without a loss: replicas count alike
        sums = (self.whole if self.number < self.wire_from and self.whole else self.sums)[fragment]
        sent = self._summands(fragment, sums)
        for index in indices:
            master = self.copies[index].master
            value = master if self.outer is None else self.outer.change(index, master)
            torch.mul(value, share, out=sent[index])
        handles = [one.start([sent[index] for index in message]) for one, message in zip(sums, self.messages[fragment])]
        then = [self.copies[index].master for index in indices]
        if self.overlaps:
            then = [master.clone() for master in then]
        self.flying[fragment] = then, [sent[index] for index in indices], handles

    def _summands(self, fragment: int, sums: Sequence[WireSum]) -> dict[int, torch.Tensor]:
        """By index, memory for what a fragment sends: that of the sums, so that nothing is copied there."""
        if not sums:  # one replica
            return {index: torch.empty_like(self.copies[index].master) for index in self.fragments[fragment]}
        return {
            index: part
            for one, message in zip(sums, self.messages[fragment])
            for index, part in zip(message, one.summands())
        }

    @torch.no_grad()
    def merge(self, fragment: int) -> None:
        """See WeightExchange."""
        then, sums, handles = self.flying.pop(fragment)
        for handle in handles:
            handle.wait()
        if not sums:
            return
        indices = self.fragments[fragment]
        self._count(indices, then, sums)
        means = sums if self.outer is None else self.outer.step(indices, sums)
        for index, before, mean in zip(indices, then, means):
            copy = self.copies[index]
            if self.overlaps:
                copy.master.add_(mean - before)
            else:
                copy.master.copy_(mean)
            if copy.tensor is not copy.master:
                copy.tensor.copy_(copy.master)

    def _count(self, indices: Sequence[int], then: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
        """Add the squared distance of this replica from the mean, and the mean's squared norm.

        Tensor by tensor: what is computed of one is read again while the processor's cache still has it.
        """
        norms = []
        for index, own, summed in zip(indices, then, sums):
            if self.copies[index].counted:
                mean = summed if self.outer is None else self.outer.mean(index, summed)
                norms.append(torch.stack([torch.linalg.vector_norm(one) for one in (own - mean, mean)]))
        if norms:
            self.squares += torch.linalg.vector_norm(torch.stack(norms), dim=0, dtype=torch.float64).square()

    def distance(self) -> torch.Tensor:
        """See WeightExchange. Begins to count the next round."""
        found = self.squares.clone()
        self.squares.zero_()
        return found

    @torch.no_grad()
    def means(self) -> Sequence[torch.Tensor] | None:
        """See WeightExchange. All replicas count alike."""
        if self.agrees or self.degree == 1:
            return None
        found = [copy.master / self.degree for copy in self.copies]
        for mean in found:
            all_reduce(mean, group=self.group)
        return found

    def state(self) -> Mapping[str, torch.Tensor]:
        """See WeightExchange."""
        found: dict[str, torch.Tensor] = dict(self.outer.state(self.names)) if self.outer is not None else {}
        if self.degree > 1 and not self.agrees:
            found[LOSSES] = self.losses
        for number, one in enumerate(itertools.chain(*self.sums)):
            found |= {kept_name(number, name): value for name, value in one.state().items()}
        return found

    def buffers(self) -> Iterator[torch.Tensor]:
        """See WeightExchange."""
        for then, sent, _ in self.flying.values():
            yield from (*sent, *(then if self.overlaps else ()))
        for one in itertools.chain(*self.sums, *self.whole):
            yield from one.buffers()

    def close(self) -> None:
        """See WeightExchange."""
        self.channel.close()
        for one in itertools.chain(*self.sums, *self.whole):
            one.close()
        self.group = None
