"""In: a plan with parallel.average_every. Out: a method of the tests: replicas average their weights every n-th step.
Does not test anything: test_added_coupling.py does. One file, an entry of ORDER, an entry of COUPLINGS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from codescent import coupling, strategies
from codescent.coupling.exchange import WeightExchange
from codescent.coupling.local_steps import LocalSteps
from codescent.plan import DTYPE_BYTES, Collective, Instruction, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.plan.schedule import with_round
from codescent.strategies.strategy import Candidate, Strategy


class EveryNth(Strategy):
    """Replicas take `average_every` steps alone; then their weights are the mean of all."""

    def active(self, run: Candidate | Plan) -> bool:
        return run.layout.average_every > 0

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        return replace(tensor, apart=("dp_replicate",))

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        last = candidate.layout.average_every - 1
        verbs = (
            Instruction(Verb.AVERAGE, fragment=0, step=last),
            Instruction(Verb.MERGE, fragment=0, step=last, last=True),
        )
        return with_round(schedule, last + 1, verbs)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        every, dtype = plan.layout.average_every, plan.trained[0].optimizer_dtype
        size = sum(tensor.parameter.numel for tensor in plan.held_by(stage)) * DTYPE_BYTES[dtype]
        yield Traffic(
            Collective.ALL_REDUCE, "dp_replicate", size, dtype, Verb.AVERAGE, None, "weights", every=every, at=every - 1
        )

    def exact(self, plan: Plan) -> bool:
        return False


class Mean(WeightExchange):
    """The exchange: one all-reduce of all weights of a replica."""

    def __init__(self, weights: Sequence[torch.Tensor], group: torch.distributed.ProcessGroup) -> None:
        self.weights, self.group = list(weights), group
        self.squares = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def average(self, fragment: int) -> None:
        flat = torch.cat([weight.reshape(-1) for weight in self.weights])
        mean = flat / torch.distributed.get_world_size(self.group)
        torch.distributed.all_reduce(mean, group=self.group)
        self.squares += torch.stack([(flat - mean).square().sum(), mean.square().sum()])
        for weight, piece in zip(self.weights, torch.split(mean, [weight.numel() for weight in self.weights])):
            weight.copy_(piece.view_as(weight))

    def distance(self) -> torch.Tensor:
        found, self.squares = self.squares, torch.zeros_like(self.squares)
        return found

    def state(self) -> Mapping[str, torch.Tensor]:
        return {}

    def buffers(self) -> Iterator[torch.Tensor]:
        yield from ()


def register() -> None:
    def make(plan: Plan, weights: Sequence[coupling.TrainedWeight], services: coupling.Services) -> coupling.Coupling:
        mean = Mean([weight.master for weight in weights], services.this_rank.groups["dp_replicate"])
        return LocalSteps(plan, services.own_optimizer(weights), services, mean)

    strategies.ORDER = tuple(EveryNth() if type(one).__name__ == "LocalSGD" else one for one in strategies.ORDER)
    coupling.COUPLINGS[EveryNth] = make
