"""In: a config, a plan, this rank's world, an open dataset. Out: module, optimizer, loader and executor, ready to step.
Does not run a step, does not write a file, and names no strategy: it applies those of ORDER in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from codescent import models
from codescent.build import chosen, model_shape
from codescent.data.dataset import Dataset
from codescent.data.loader import Loader, Sampler
from codescent.models.initialize import initialize_
from codescent.plan import WIDE, Parameter, Plan, TensorPlan
from codescent.strategies import Gradients, Strategy
from codescent.strategies.buckets import TORCH_DTYPE
from codescent.train.execute import Executor
from codescent.train.optimize import Optimizer, Weight
from codescent.train.stop import StopRequest
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.config import Config


@dataclass(frozen=True)
class Trainer:
    """All that one rank needs to train."""

    executor: Executor
    module: nn.Module
    optimizer: Optimizer
    loader: Loader

    def close(self) -> None:
        """Stop reading ahead, let go of process groups."""
        self.loader.close()
        self.executor.gradients.close()


def assemble(config: Config, plan: Plan, world: World, dataset: Dataset, first_step: int, stop: StopRequest) -> Trainer:
    """Build, initialise, divide and connect the parts of this rank.

    Raises:
        UserError: the corpus is too short for a batch, or a lever that is asked for is not available.
    """
    shape = model_shape(config, dataset.vocab_size)
    parameters = models.parameters_of(config.model.kind, shape)
    module = models.construct(config.model.kind, shape, config.train.head_chunk_tokens, device="meta")
    module.to(TORCH_DTYPE[WIDE[config.train.precision]])
    strategies = chosen(config.parallel)
    for strategy in strategies:
        strategy.divide(module, world.groups, plan)
    module.to_empty(device=world.device)
    weights = _initialise(module, config, parameters, plan)
    gradients = _gradients(module, strategies, world, plan)
    _compile(module, config.train.compile)
    optimizer = Optimizer(weights, config.optimizer, world.sum_over)
    loader = _loader(config, plan, world, dataset, first_step)
    executor = Executor(
        plan, world.stage, module, gradients, optimizer, loader, world.device, config.run.seed, stop.wished
    )
    return Trainer(executor, module, optimizer, loader)


def _initialise(module: nn.Module, config: Config, parameters: tuple[Parameter, ...], plan: Plan) -> list[Weight]:
    """Initial values, and the master copies of bf16 weights, which keep the values that rounding takes from them.

    Where a strategy has made DTensors of the parameters, these are the masters: it makes what forward reads itself.
    """
    initialize_(module, config.run.seed, parameters)
    there = dict(module.named_parameters())
    masters = {name: tensor.data for name, tensor in there.items()}
    if not any(isinstance(tensor, DTensor) for tensor in there.values()):
        module.to(TORCH_DTYPE[config.train.precision])
    return [
        _weight(tensor, module.get_parameter(tensor.parameter.name), masters[tensor.parameter.name], plan)
        for tensor in plan.tensors
    ]


def _weight(planned: TensorPlan, tensor: torch.Tensor, master: torch.Tensor, plan: Plan) -> Weight:
    name, decay, axes = planned.parameter.name, planned.parameter.decay, planned.optimizer.axes(plan.mesh)
    if isinstance(master, DTensor):
        with torch.no_grad():
            local = master.to_local()
        return Weight(name, local, local, decay, axes, whole=master)
    same = tensor.dtype == master.dtype
    return Weight(name, tensor, tensor if same else master, decay, axes)


def _gradients(module: nn.Module, strategies: list[Strategy], world: World, plan: Plan) -> Gradients:
    """The one strategy that looks after gradients in this layout."""
    (owner,) = (g for strategy in strategies if (g := strategy.gradients(module, world.groups, plan)) is not None)
    return owner


def _compile(module: nn.Module, what: str) -> None:
    if what == "model":
        module.compile()
    elif what == "blocks":
        blocks = module.blocks
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            block.compile()


def _loader(config: Config, plan: Plan, world: World, dataset: Dataset, first_step: int) -> Loader:
    work = plan.work
    sampler = Sampler(config.run.seed, dataset.train.num_samples(work.seq_len), work.global_batch_size)
    share = work.microbatch_size * work.num_microbatches
    first = plan.mesh.dp_index(world.place.rank) * share
    positions = [
        (first + number * work.microbatch_size, first + (number + 1) * work.microbatch_size)
        for number in range(work.num_microbatches)
    ]
    return Loader(
        dataset.train,
        sampler,
        work.seq_len,
        positions,
        first_step,
        config.data.prefetch,
        pin_memory=world.device.type == "cuda",
    )
