"""In: clients of the servers, the weights of this rank. Out: PUSH and PULL in rounds: changes of weights are sent.
Does not compute a step (train/execute.py does) and does not update servers (round_server.py does)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from codescent.base.stopwatch import waiting
from codescent.checkpoint.box import Box
from codescent.coupling.coupling import WorkItem
from codescent.coupling.local_steps import OwnSteps
from codescent.coupling.parameter_server import WeightServer
from codescent.coupling.services import Services, WeightUpdater
from codescent.coupling.worker import Worker, gather
from codescent.plan import Instruction, Plan
from codescent.transport import Client


class RoundWorker(OwnSteps, Worker):
    """A rank that takes steps with its own optimizer, and sends what they have changed.

    How a step is divided and summed is OwnSteps'; work, pushes and pulls are Worker's.

    A push has the weights that were pulled minus those after the last step. The state of the inner optimizer stays on
    the worker, as in DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    Args:
        plan, services: see Coupling.
        optimizer: of this rank's own steps.
        clients: of each server, in the order of `plan.servers`.
        server: of this rank, if workers are servers.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: WeightUpdater,
        services: Services,
        clients: Sequence[Client],
        server: WeightServer | None = None,
    ) -> None:
        tensors = [weight.tensor for weight in optimizer.weights]
        super().__init__(plan, optimizer, services, tensors, clients, server)
        device = optimizer.weights[0].master.device
        self.steps = torch.zeros(4, dtype=torch.float64, device=device)  # loss, losses, squared norm, skipped
        self.losses = 0  # of this push, also those of skipped steps
        self.begun_s = 0.0

    def work(self, number: int, rate: float) -> Iterator[WorkItem]:
        """See Coupling. A work item for each step of the rounds that this rank takes until step `number` is complete.

        The program of the last step of a round pushes and pulls.
        """
        self._let_serve(number)
        while self.known.done <= number and not self.known.stops:
            if self.portion is None:
                self.pull()
                continue
            self._begin()
            begin, last = self.portion.step + self.first, self.first + self.count - 1
            for offset in range(self.first, last + 1):
                self.step = begin + offset - self.first
                in_round = self.period - 1 if offset == last else min(offset, self.period - 2)
                yield WorkItem(self.step, in_round, self.services.rate_of(self.step))

    def _begin(self) -> None:
        self.steps.zero_()
        self.losses, self.begun_s = 0, time.perf_counter()

    def stepped(self) -> None:
        """See Coupling. A step that is not finite is skipped."""
        sums, losses = self.at.sums, self.at.portion.own_losses
        finite = (sums.sum() * 0.0).eq(0.0)
        values = torch.stack((sums[0], torch.full_like(sums[0], losses), sums[-1], torch.zeros_like(sums[0])))
        skipped = torch.zeros_like(values)
        skipped[3].fill_(1.0)
        self.steps += torch.where(finite, values, skipped)
        self.losses += losses

    @torch.no_grad()
    def _push(self, instruction: Instruction) -> None:
        """The PUSH verb. Each server gets its part of the change; the gradients are in it already."""
        assert self.portion is not None
        total, counted, square, skips = self.steps.tolist()
        facts = {"loss": total, "losses": counted, "square": square / max(1, self.count - int(skips)), "skips": skips}
        facts |= {"first": self.first, "count": self.count, "tokens": self.losses}
        facts |= {"seconds": time.perf_counter() - self.begun_s}
        masters = [weight.master for weight in self.optimizer.weights]
        for part, fetched, pieces in zip(self.sent, self.fetched, self.plan.pieces, strict=True):
            gather(part, masters, pieces)
            torch.sub(fetched.to(part.dtype), part, out=part)
        norms = torch.stack([torch.linalg.vector_norm(part) for part in self.sent])
        facts["finite"] = bool(norms.isfinite().all())
        with waiting():
            self._send(facts, stop=self.at.stop_requested())

    def _scatter(self) -> None:
        super()._scatter()
        for weight in self.optimizer.weights:
            if weight.master is not weight.tensor:
                weight.master.copy_(weight.tensor)

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """See Coupling: what a server has, and the state of this worker's own optimizer. Its weights are theirs."""
        found = {} if self.server is None else self.server.part.optimizer.tensors()
        for weight, name, value in self.optimizer.named_state():
            if not name.startswith("model."):
                found[f"replica{self.plan.replica(self.services.rank)}.{name}"] = weight.named(value)
        return found

    def optimizers(self) -> Sequence[WeightUpdater]:
        """See Coupling."""
        return (self.optimizer, *(() if self.server is None else (self.server.part.optimizer,)))
