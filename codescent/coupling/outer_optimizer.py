"""In: the weights of a parameter server, changes of rounds. Out: the weights after a step of the outer optimizer.
Does not sum changes of several workers (round_server.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from codescent.checkpoint.box import Box
from codescent.coupling.delayed import Delayed
from codescent.coupling.services import TrainedWeight
from codescent.plan import Plan
from codescent.plan.served import momentum_every


class OuterOptimizer:
    """The weights of a server, and the state of its outer optimizer, which gets changes of rounds, not gradients."""

    def __init__(self, weights: Sequence[TrainedWeight], plan: Plan) -> None:
        layout = plan.layout
        self.weights = list(weights)
        rule = layout.outer_optimizer, layout.outer_learning_rate, layout.outer_momentum
        every = momentum_every(layout, plan.mesh.world_size)
        self.rule = Delayed([weight.master for weight in weights], *rule, every)

    def named_state(self) -> Iterator[tuple[TrainedWeight, str, torch.Tensor]]:
        """Yield (weight, name, tensor): weights as "model.NAME", state as "outer.STATE.model.NAME"."""
        for index, weight in enumerate(self.weights):
            yield weight, f"model.{weight.name}", weight.master
            for name, state in (("momentum", self.rule.momentum), ("sum", self.rule.sums)):
                if state:
                    yield weight, f"outer.{name}.model.{weight.name}", state[index]

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """The tensors of a checkpoint, by name."""
        found: dict[str, torch.Tensor | Box] = {name: weight.named(value) for weight, name, value in self.named_state()}
        return {**found, **({"outer.changes": self.rule.count} if self.rule.sums else {})}

    def buffers(self) -> Iterator[torch.Tensor]:
        """Memory that it keeps beside weights and state: none."""
        yield from ()

    def step(
        self, gradients: Sequence[torch.Tensor], rate: float, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """See WeightUpdater: changes of weights are its gradients. It has rates of its own, and skips nothing."""
        self.rule.step(gradients)
        return agree(torch.zeros((), dtype=torch.float64))

    def is_finite(self) -> bool:
        """See WeightUpdater."""
        return all(bool(value.isfinite().all()) for _, _, value in self.named_state())

    def loaded(self) -> None:
        """A checkpoint was loaded into `tensors`: nothing follows from it."""

    def close(self) -> None:
        """See WeightUpdater: it holds no process group."""
