"""In: a plan with parameter servers, the optimizer over one server's part. Out: its weights to send, and its updates.
Does not receive pushes and does not decide when to update (parameter_server.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.coupling.pushes import Push
from codescent.coupling.services import WeightUpdater
from codescent.plan import Plan


class ServerPart:
    """The weights of one server.

    Args:
        plan: of the run.
        index: of this server, among `plan.servers`.
        optimizer: over the pieces of this server.
    """

    def __init__(self, plan: Plan, index: int, optimizer: WeightUpdater) -> None:
        self.pieces, self.optimizer = plan.pieces[index], optimizer
        self.numel = sum(piece.numel for piece in self.pieces)
        self._narrow = TORCH_DTYPE[plan.work.precision]
        self._published: tuple[int, torch.Tensor] | None = None

    def weights(self, version: int) -> torch.Tensor:
        """The present weights [numel], of this version, in the dtype in which they travel."""
        if self._published is None or self._published[0] != version:
            flat, begin = torch.empty(self.numel, dtype=self._narrow), 0
            for piece, weight in zip(self.pieces, self.optimizer.weights, strict=True):
                flat[begin : begin + piece.numel].copy_(weight.master.reshape(-1))
                begin += piece.numel
            self._published = version, flat
        return self._published[1]

    @torch.no_grad()
    def update(
        self, pushes: Sequence[Push], rate: float, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """One step of the optimizer, with the sum of the pushes. They are added in the order of their portions, so that
        the sum does not depend on who was first.

        Args:
            pushes: whose gradients this server has; the first one's memory is used for the sum.
            rate: learning rate.
            agree: see `WeightUpdater.step`, whose result is returned.
        """
        first, *others = sorted(pushes, key=lambda push: (push.portion, push.worker))
        total = first.gradients
        for push in others:
            total += push.gradients
        views, begin = [], 0
        for piece, weight in zip(self.pieces, self.optimizer.weights, strict=True):
            views.append(total[begin : begin + piece.numel].view_as(weight.master))
            begin += piece.numel
        return self.optimizer.step(views, rate, agree)

    def buffers(self) -> Iterator[torch.Tensor]:
        """The memory that it holds beside weights and optimizer state."""
        if self._published is not None:
            yield self._published[1]
