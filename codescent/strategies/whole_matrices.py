"""In: this rank's shards of a round's tensors. Out: the shards of what a function makes of each whole tensor.
Does not choose which rank computes which tensor (muon.py does) and does not know the function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from codescent.plan import TensorPlan
from codescent.strategies.collectives import all_to_all
from codescent.strategies.muon import Round
from codescent.strategies.strategy import ThisRank

Whole = Callable[[TensorPlan, torch.Tensor], torch.Tensor]
"""A function of a whole tensor. Its result has the same shape and dtype."""


class WholeMatrices:
    """The exchange of one round: each tensor is whole on one rank, which applies a function to it.

    Args:
        one: the round.
        this_rank: this rank.
    """

    def __init__(self, one: Round, this_rank: ThisRank) -> None:
        mesh, rank = this_rank.plan.mesh, this_rank.rank
        self.ranks, self.shard_ranks = mesh.group(one.ranks, rank), mesh.group(one.sharded, rank)
        owned = dict(zip(self.ranks, one.tensors))
        self.mine = owned.get(rank)
        self.number_of = {owner: number for number, owner in enumerate(owned)}
        self.boxes = {other: self._box(other, this_rank) for other in self.ranks} if self.mine is not None else {}
        self.group: dist.ProcessGroup | None = this_rank.groups[one.ranks] if len(self.ranks) > 1 else None
        self.shard_group: dist.ProcessGroup | None = (
            this_rank.groups[one.sharded] if len(self.shard_ranks) > 1 else None
        )

    def _box(self, rank: int, this_rank: ThisRank) -> tuple[slice, ...]:
        """The part that a rank holds of the tensor that this rank owns."""
        assert self.mine is not None
        box = self.mine.optimizer.box(self.mine.parameter.shape, this_rank.plan.mesh, rank)
        return tuple(slice(start, stop) for start, stop in box)

    def apply(self, shards: Sequence[torch.Tensor], function: Whole) -> list[torch.Tensor]:
        """Collective over the pipeline stage.

        Args:
            shards: this rank's shard of each tensor, on the device of the process groups.
            function: called once on a rank that owns a tensor of this round; not called on others.
        """
        whole = self._collect(shards)
        result = None if self.mine is None or whole is None else function(self.mine, whole)
        return self._return(result, shards)

    def close(self) -> None:
        """Drop the process groups, before they are destroyed."""
        self.group = self.shard_group = None

    def _collect(self, shards: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The whole tensor that this rank owns; None if it owns none."""
        numbers = [self.number_of.get(rank) for rank in self.shard_ranks]
        if self.shard_group is None:
            (number,) = numbers
            return None if number is None else shards[number]
        sent = [shards[0].new_empty(0) if number is None else shards[number].reshape(-1) for number in numbers]
        if self.mine is None:
            _all_to_all(sent, [0] * len(sent), self.shard_group)
            return None
        whole = shards[0].new_empty(self.mine.parameter.shape)
        parts = [whole[self.boxes[rank]] for rank in self.shard_ranks]
        received = _all_to_all(sent, [part.numel() for part in parts], self.shard_group)
        for part, piece in zip(parts, received, strict=True):
            part.copy_(piece.view(part.shape))
        return whole

    def _return(self, result: torch.Tensor | None, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's shard of each result."""
        if self.group is None:
            assert result is not None
            return [result]
        nothing = shards[0].new_empty(0)
        sent = [nothing if result is None else result[self.boxes[rank]].reshape(-1) for rank in self.ranks]
        numels = [shards[self.number_of[rank]].numel() if rank in self.number_of else 0 for rank in self.ranks]
        received = _all_to_all(sent, numels, self.group)  # the owners of the tensors are the first ranks
        return [piece.view(shard.shape) for piece, shard in zip(received, shards)]


def _all_to_all(
    sent: Sequence[torch.Tensor], numels: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Send a flat tensor to each rank of a group, and receive one of so many elements from each."""
    received = sent[0].new_empty(sum(numels))
    all_to_all(received, torch.cat(list(sent)), list(numels), [part.numel() for part in sent], group=group)
    return torch.split(received, list(numels))
