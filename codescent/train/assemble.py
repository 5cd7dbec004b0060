"""In: a config, a plan, this rank's world, an open dataset. Out: module, optimizer, loader and executor, ready to step.
Does not run a step, does not write a file, and names no strategy: it applies those of ORDER in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from codescent import models
from codescent.build import chosen, model_shape
from codescent.data.dataset import Dataset
from codescent.data.loader import Loader, Sampler
from codescent.models.initialize import initialize_
from codescent.plan import Parameter, Plan
from codescent.strategies import Applied, Strategy
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
    module = models.construct(config.model.kind, shape, config.train.head_chunk_tokens, device=str(world.device))
    weights = _initialise(module, config, parameters)
    applied = _apply(module, chosen(config.parallel), world, plan)
    _compile(applied.module, config.train.compile)
    optimizer = Optimizer(weights, config.optimizer)
    loader = _loader(config, plan, world, dataset, first_step)
    executor = Executor(plan, world.stage, applied, optimizer, loader, world.device, config.run.seed, stop.wished)
    return Trainer(executor, applied.module, optimizer, loader)


def _initialise(module: nn.Module, config: Config, parameters: tuple[Parameter, ...]) -> list[Weight]:
    """Initial values, and the master copies of bf16 weights, which keep the values that rounding takes from them."""
    dtype = TORCH_DTYPE[config.train.precision]
    module.to(torch.promote_types(dtype, torch.float32))
    initialize_(module, config.run.seed, parameters)
    masters = {name: tensor.data for name, tensor in module.named_parameters()}
    module.to(dtype)
    return [
        Weight(
            name=declared.name,
            tensor=(tensor := module.get_parameter(declared.name)),
            master=tensor if tensor.dtype == masters[declared.name].dtype else masters[declared.name],
            decay=declared.decay,
        )
        for declared in parameters
    ]


def _apply(module: nn.Module, strategies: list[Strategy], world: World, plan: Plan) -> Applied:
    """Every strategy in turn; the last one that looks after gradients has the gradients of the whole."""
    first, *others = strategies
    applied = first.apply(module, world.groups, plan)
    for strategy in others:
        applied = strategy.apply(applied.module, world.groups, plan)
    return applied


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
