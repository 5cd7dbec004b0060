"""In: clients of the servers, the weights of this rank. Out: PUSH and PULL in rounds: changes of weights are sent.
Does not compute a step (train/execute.py does) and does not update servers (train/serve_rounds.py does)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from codescent.base.stopwatch import waiting
from codescent.plan import Plan
from codescent.strategies.strategy import Copy, Gradients
from codescent.strategies.worker import Worker, gather
from codescent.transport import Client


class RoundWorker(Worker):
    """A rank that takes steps with its own optimizer, and sends what they have changed.

    A push has the weights that were pulled minus those after the last step. The state of the inner optimizer stays on
    the worker, as in DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    Args:
        plan: of the run.
        rank: of this process.
        copies: of each trained tensor, in the plan's order.
        clients: of each server, in the order of `plan.servers`.
        first_step: number of complete steps when the command begins.
        rate_of: learning rate of a step.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        copies: Sequence[Copy],
        clients: Sequence[Client],
        first_step: int,
        rate_of: Callable[[int], float],
    ) -> None:
        super().__init__(plan, rank, [copy.weights for copy in copies], clients, first_step)
        self.copies, self.rate_of = list(copies), rate_of
        device = copies[0].master.device
        self.steps = torch.zeros(4, dtype=torch.float64, device=device)  # loss, losses, squared norm, skipped
        self.in_round = 0  # of the present turn: its place in the round
        self.losses = 0  # of this push, also those of skipped steps
        self.begun_s = 0.0

    def turns(self, number: int) -> Iterator[None]:
        """A turn for each step of the rounds that this rank takes until step `number` (from 0) is complete.

        The program of the last step of a round pushes and pulls.
        """
        while self.known.done <= number and not self.known.stops:
            if self.portion is None:
                self.pull()
                continue
            self._begin()
            begin, last = self.portion.step + self.first, self.first + self.count - 1
            for offset in range(self.first, last + 1):
                self.step = begin + offset - self.first
                self.in_round = self.period - 1 if offset == last else min(offset, self.period - 2)
                yield

    def listed(self, number: int) -> int:
        """See Turns."""
        return self.in_round

    def rate(self, rate: float) -> float:
        """See Turns."""
        return self.rate_of(self.step)

    def _begin(self) -> None:
        self.steps.zero_()
        self.losses, self.begun_s = 0, time.perf_counter()

    def stepped(self, sums: torch.Tensor, losses: int) -> None:
        """Count a step: its sums [SCALARS], and its number of losses. A step that is not finite is skipped."""
        finite = (sums.sum() * 0.0).eq(0.0)
        values = torch.stack((sums[0], torch.full_like(sums[0], losses), sums[-1], torch.zeros_like(sums[0])))
        skipped = torch.zeros_like(values)
        skipped[3].fill_(1.0)
        self.steps += torch.where(finite, values, skipped)
        self.losses += losses

    @torch.no_grad()
    def push(self, gradients: Gradients, loss: torch.Tensor, losses: int, *, stop: bool) -> None:
        """See Turns. Each server gets its part of the change; the gradients are in it already."""
        assert self.portion is not None
        total, counted, square, skips = self.steps.tolist()
        facts = {"loss": total, "losses": counted, "square": square / max(1, self.count - int(skips)), "skips": skips}
        facts |= {"first": self.first, "count": self.count, "tokens": self.losses}
        facts |= {"seconds": time.perf_counter() - self.begun_s}
        masters = [copy.master for copy in self.copies]
        for part, fetched, pieces in zip(self.sent, self.fetched, self.plan.pieces, strict=True):
            gather(part, masters, pieces)
            torch.sub(fetched.to(part.dtype), part, out=part)
        norms = torch.stack([torch.linalg.vector_norm(part) for part in self.sent])
        facts["finite"] = bool(norms.isfinite().all())
        with waiting():
            self._send(facts, stop=stop)

    def _scatter(self) -> None:
        super()._scatter()
        for copy in self.copies:
            if copy.master is not copy.weights:
                copy.master.copy_(copy.weights)
