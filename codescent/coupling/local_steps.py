"""In: replicas that take steps by themselves, an exchange of their weights. Out: their coupling, and its verbs.
Does not average (averaging.py and mixing.py do) and does not decide when (the plan does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from codescent.checkpoint.box import Box
from codescent.coupling.coupling import Coupling, StepSums
from codescent.coupling.exchange import WeightExchange
from codescent.coupling.services import Services, WeightUpdater
from codescent.plan import AXES, Instruction, Plan, Verb


class OwnSteps(Coupling):
    """A replica that updates its weights with its own gradients, after the opening steps."""

    why_unheld = "each replica has weights or state of its own, and those of a lost one are nowhere else"

    @property
    def is_alone(self) -> bool:
        """Whether the replica takes the present step by itself."""
        return self.at.number >= self.plan.schedule.opening_steps

    def divisor(self) -> int:
        """See Coupling."""
        return self.at.portion.own_losses if self.is_alone else self.at.portion.losses

    def agree(self, square: torch.Tensor) -> torch.Tensor:
        """See Coupling: over the ranks of this replica. In the opening steps each replica counts the norm of the same
        gradients."""
        if not self.is_alone:
            return super().agree(square / self.plan.mesh.dp_replicate)
        return self._with_own(square, self.plan.together)


class LocalSteps(OwnSteps):
    """Replicas that take steps by themselves, and then exchange their weights: local SGD, gossip.

    Args:
        plan, optimizer, services: see Coupling.
        exchange: what they send each other.
    """

    def __init__(self, plan: Plan, optimizer: WeightUpdater, services: Services, exchange: WeightExchange) -> None:
        super().__init__(plan, optimizer, services)
        self.exchange = exchange
        self.replica = plan.replica(services.rank)
        coordinates = plan.mesh.coordinates(services.rank)
        self.leads = not any(coordinates[axis] for axis in AXES if axis not in plan.apart)  # of its replica
        self.skips = torch.zeros((), dtype=torch.float64, device=services.device)  # of this replica, in this round
        self.verbs = {Verb.AVERAGE: self._average, Verb.MERGE: self._merge, Verb.EXCHANGE: self._exchange}

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """See Coupling."""
        self.exchange.sum_gradients(gradients)

    def agree(self, square: torch.Tensor) -> torch.Tensor:
        """See OwnSteps. Counts the steps that this replica skips."""
        sums = super().agree(square)
        if self.is_alone:
            self.skips += (sums.sum() * 0.0).ne(0.0)
        return sums

    def stepped(self) -> None:
        """See Coupling."""
        self.exchange.stepped(self.at.number, self.at.portion.own_losses, self.at.portion.losses)

    def result(self, number: int) -> StepSums:
        """See Coupling. Between sync points a replica knows its own losses."""
        agreed = not self.is_alone or self.plan.schedule.agrees_after(number + 1)
        portion = self.at.portion
        losses = portion.losses if agreed else portion.own_losses
        return StepSums(self.at.sums, losses, number + 1, measured=len(self.at.measured))

    def needs_result(self, step: int) -> bool:
        """See Coupling. At a sync point a stop or a skip may be known."""
        return super().needs_result(step) or self.plan.schedule.agrees_after(step)

    def _average(self, instruction: Instruction) -> None:
        assert instruction.fragment is not None
        self.exchange.average(instruction.fragment)

    def _merge(self, instruction: Instruction) -> None:
        """After the last fragment of a round all ranks agree."""
        assert instruction.fragment is not None
        self.exchange.merge(instruction.fragment)
        if instruction.last:
            self._agree_on_round()

    def _exchange(self, instruction: Instruction) -> None:
        self.exchange.average(0)
        self.exchange.merge(0)
        if self.plan.schedule.agrees_after(self.at.number + 1):
            self._agree_on_round()

    def _agree_on_round(self) -> None:
        """Sum over all ranks: loss of this step, requests to stop, skipped steps, distance."""
        sums = self.at.sums
        skips = self.skips if self.leads else torch.zeros_like(self.skips)
        own = self.at.own()
        own[0] += sums.sum() * 0.0  # not finite if this replica has skipped its last step
        more = torch.stack((skips, *self.exchange.distance().to(own.device)))
        values = self.services.ranks.sum_over(torch.cat((own, more)), self.everyone)
        self.at.sums = torch.cat((values[: len(own)], sums[-1:], values[len(own) :]))
        self.skips.zero_()

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """See Coupling. What differs between replicas begins with the name of its replica. "model.NAME" is the mean."""
        means, found = self.exchange.means(), dict[str, torch.Tensor | Box]()
        for weight, name, value in self.optimizer.named_state():
            is_common = means is None and name.startswith("model.")
            found[name if is_common else f"replica{self.replica}.{name}"] = weight.named(value)
        for weight, mean in zip(self.optimizer.weights, means or ()):
            found[f"model.{weight.name}"] = weight.named(mean)
        return found

    def means(self) -> Sequence[torch.Tensor] | None:
        """See Coupling."""
        return self.exchange.means()

    def state(self) -> Mapping[str, torch.Tensor]:
        """See Coupling."""
        return self.exchange.state()

    def buffers(self) -> Iterator[torch.Tensor]:
        """See Coupling."""
        yield from self.exchange.buffers()

    def close(self) -> None:
        """See Coupling."""
        self.exchange.close()
