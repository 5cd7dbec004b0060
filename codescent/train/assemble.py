"""In: a config, a plan, process groups, a dataset. Out: this rank's model chunks, optimizer, data loader and executor.
Does not run a step, write a file or name a strategy: it applies the list ORDER of `strategies`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from codescent import models
from codescent.base.agreement import together
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.checkpoint.box import Box
from codescent.data.loader import Loader, Sampler
from codescent.data.samples import AnyDataset
from codescent.models.part import Part
from codescent.plan import AXES, WIDE, Memory, Plan, TensorPlan, Verb
from codescent.strategies import ORDER, Copy, Exchange, Gradients, ThisRank, serving
from codescent.strategies.common_sums import copied
from codescent.strategies.ddp import BucketedGradients
from codescent.strategies.pair_exchange import PairExchange
from codescent.strategies.partial_gradients import CopiedGradients, PartialGradients
from codescent.train.execute import Executor
from codescent.train.initial import write_initial_values_
from codescent.train.muon import matrix_rounds
from codescent.train.neighbours import Hand, introduced
from codescent.train.optimize import Optimizer, Weight, copy, learning_rate
from codescent.train.serve import Serving
from codescent.train.serve_beside import serve_beside
from codescent.train.serve_rounds import OuterOptimizer
from codescent.train.servers import Rates, connected, listening, served_weights
from codescent.train.stop import StopRequest
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.config.sections import Config


@dataclass(frozen=True)
class Trainer:
    """The objects with which one rank trains."""

    executor: Executor
    parts: list[nn.Module]
    optimizer: Optimizer
    loader: Loader | None

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """The tensors of a checkpoint, by name. Collective where replicas have different weights.

        What differs between replicas has the name of its replica before it. "model.NAME" is then the mean.
        """
        executor, weights = self.executor, {weight.name: weight for weight in self.optimizer.weights}
        exchange, rank = executor.exchange, executor.world.place.rank
        if executor.plan.layout.served_rounds:
            found = self._of_rounds(executor.plan, rank)
        elif exchange is None:
            found = self.optimizer.tensors()
        else:
            found = self._of_replica(exchange, executor.plan.replica(rank))
        kept = {**executor.gradients.state(), **(exchange.state() if exchange else {})}
        kept |= executor.worker.state() if executor.worker else {}
        for name, value in kept.items():
            _, of_parameter, parameter = name.partition(".model.")
            if of_parameter:  # ranks that hold the same part of the parameter have the same values
                found[name] = weights[parameter].named(value)
            else:
                found[f"rank{rank}.{name}"] = value
        return found

    def _of_rounds(self, plan: Plan, rank: int) -> dict[str, torch.Tensor | Box]:
        """What a server has, and the state of a worker's own optimizer. Its weights are those of the servers."""
        served = None if self.executor.serving is None else self.executor.serving.part.optimizer
        found = {} if served is None else served.tensors()
        if not plan.only_serves(rank):
            for weight, name, value in self.optimizer.named_state():
                if not name.startswith("model."):
                    found[f"replica{plan.replica(rank)}.{name}"] = weight.named(value)
        return found

    def _of_replica(self, exchange: Exchange, replica: int) -> dict[str, torch.Tensor | Box]:
        """Weights and optimizer state of a replica that trains apart. Collective."""
        means, found = exchange.means(), dict[str, torch.Tensor | Box]()
        for weight, name, value in self.optimizer.named_state():
            is_common = means is None and name.startswith("model.")
            found[name if is_common else f"replica{replica}.{name}"] = weight.named(value)
        for weight, mean in zip(self.optimizer.weights, means or ()):
            found[f"model.{weight.name}"] = weight.named(mean)
        return found

    @contextmanager
    def with_means(self) -> Iterator[None]:
        """Put the mean of the replicas into the weights for a while, where they have different weights. Collective."""
        exchange = self.executor.exchange
        means = None if exchange is None else exchange.means()
        if means is None:
            yield
            return
        places = [weight.tensor for weight in self.optimizer.weights]
        before = [place.detach().clone() for place in places]
        with torch.no_grad():
            copy(places, means)
        try:
            yield
        finally:
            with torch.no_grad():
                copy(places, before)

    def close(self) -> None:
        """Stop reading ahead and drop the references to process groups."""
        if self.loader is not None:
            self.loader.close()
        self.executor.close()
        self.optimizer.close()


def assemble(
    config: Config,
    plan: Plan,
    world: World,
    dataset: AnyDataset,
    first_step: int,
    stop: StopRequest,
    compiles: str | None = None,
) -> Trainer:
    """Build the chunks of the model on this rank, divide and initialise them; build optimizer, loader and executor.

    `compiles`: what torch.compile compiles, chosen by compiling.py: "none", "blocks" or "model"; None: what
    train.compile names, nothing if that is auto.

    Raises:
        UserError: initial weights that are not finite, a corpus too short for a batch, or a setting that needs hardware
            which this machine lacks.
    """
    if plan.only_serves(world.place.rank):
        return _assemble_server(config, plan, world, first_step, stop)
    this_rank = ThisRank(plan, world.place.rank, world.groups)
    parts = []
    for depths in plan.schedule.parts(world.stage):
        part = models.construct(plan.model, "meta", depths)
        cast(Part, part).objective = plan.objective
        if world.device.type != "cpu":  # so the logits of a larger pass, in validation, need no more memory
            cast(Part, part).head_chunk_tokens = _of_micro_batch(plan)
        _widen(part, plan.work.precision)
        for strategy in serving(plan):
            strategy.divide(part, this_rank)
        parts.append(_with_memory(part, this_rank.tensors[0], world.device))
    weights = _initialise(parts, this_rank, replaced=first_step > 0)
    gradients = _gradients(parts, this_rank)
    for part in parts:
        _compile(part, compiles or config.train.compile or "none", graphs=config.train.cuda_graphs)
    loader = _loader(parts, plan, world, dataset, first_step)
    if plan.layout.served:
        optimizer, server = _served_beside(config, plan, world, first_step, stop)
        if plan.layout.served_rounds:  # workers have optimizers of their own
            optimizer = Optimizer(weights, config.optimizer, (), world.device)
        copies = [Copy(weight.master, weight.tensor, weight.counted) for weight in weights]
        worker = connected(plan, world, copies, first_step, _rates(config, plan))
        if server is not None:
            serve_beside(server, _rates(config, plan), world.give_up, worker.close)
        executor = Executor(plan, world, parts, gradients, optimizer, loader, stop.is_requested, None, worker, server)
        return Trainer(executor, parts, optimizer, loader)
    optimizer = Optimizer(weights, config.optimizer, matrix_rounds(this_rank, world.device), world.device)
    exchange = _exchange(weights, this_rank)
    hand = _hand(config, plan, world, exchange, first_step)
    executor = Executor(plan, world, parts, gradients, optimizer, loader, stop.is_requested, exchange, hand)
    return Trainer(executor, parts, optimizer, loader)


def _served_beside(
    config: Config, plan: Plan, world: World, first_step: int, stop: StopRequest
) -> tuple[Optimizer, Serving | None]:
    """The optimizer of a worker: of the part that it serves, if workers are servers; else of nothing."""
    if world.place.rank not in plan.servers:
        return Optimizer([], config.optimizer, (), world.device), None
    weights = served_weights(plan, plan.servers.index(world.place.rank), replaced=first_step > 0)
    optimizer = _server_optimizer(config, plan, weights)
    return optimizer, listening(plan, world, optimizer, first_step, stop.is_requested)


def _rates(config: Config, plan: Plan) -> Rates:
    """The learning rate by step."""
    steps, workers = config.train.num_steps, plan.mesh.dp
    return lambda number: learning_rate(config.optimizer, steps, workers, number)


def _server_optimizer(config: Config, plan: Plan, weights: Sequence[Weight]) -> Optimizer:
    """What a server updates its weights with: gradients, or changes of rounds."""
    if plan.layout.served_rounds:
        return OuterOptimizer(weights, plan)
    return Optimizer(weights, config.optimizer, (), torch.device("cpu"))


def _assemble_server(config: Config, plan: Plan, world: World, first_step: int, stop: StopRequest) -> Trainer:
    """The objects of a rank that is a parameter server and nothing else."""
    weights = served_weights(plan, plan.servers.index(world.place.rank), replaced=first_step > 0)
    if (folder := plan.model.weights) is not None:  # the workers have read all of it, and say what is wrong
        together(UserError, lambda: _refuse(folder, []))
    optimizer = _server_optimizer(config, plan, weights)
    serving = listening(plan, world, optimizer, first_step, stop.is_requested)
    dtype = TORCH_DTYPE[plan.work.precision]
    gradients = BucketedGradients([], [], dtype, dtype, None)
    executor = Executor(plan, world, [], gradients, optimizer, None, stop.is_requested, serving=serving)
    return Trainer(executor, [], optimizer, None)


def _exchange(weights: Sequence[Weight], this_rank: ThisRank) -> Exchange | None:
    """The object that exchanges weights between replicas that train apart."""
    copies = [Copy(weight.master, weight.tensor, weight.counted) for weight in weights]
    found = (strategy.exchange(copies, this_rank) for strategy in serving(this_rank.plan))
    return next(filter(None, found), None)


def _hand(config: Config, plan: Plan, world: World, exchange: Exchange | None, first_step: int) -> Hand | None:
    """What gives this rank its work, where replicas average beside the computation."""
    if not isinstance(exchange, PairExchange):
        return None
    steps, workers = config.train.num_steps, plan.mesh.dp
    return introduced(
        plan, world, exchange, lambda number: learning_rate(config.optimizer, steps, workers, number), first_step
    )


def _of_micro_batch(plan: Plan) -> int:
    """The tokens of `train.head_chunk_tokens`, and no more than a micro-batch has."""
    tokens = plan.work.microbatch_size * plan.work.positions(-1)
    return min(plan.model.head_chunk_tokens or tokens, tokens)


def _widen(part: nn.Module, precision: str) -> None:
    """Cast parameters on the meta device: trained ones to the optimizer's dtype, frozen ones to `precision`."""
    for parameter in part.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPE[WIDE[precision] if parameter.requires_grad else precision])


def _with_memory(part: nn.Module, like: TensorPlan, device: torch.device) -> nn.Module:
    """Allocate the parameters on the device, or in host memory if the plan gathers weights from there.

    Weights that are updated on the host are allocated in their own dtype: the device may lack room for fp32.
    `like` is the plan of any tensor of the part: all of them have the same memory.
    """
    if like.updated_on_host:
        part.to(TORCH_DTYPE[like.weight_dtype])
    for name in ("tokens_T", "rows_T"):  # position indices of a divided model: no parameters, so `to_empty` skips them
        if isinstance(positions_T := getattr(part, name), torch.Tensor):
            setattr(part, name, positions_T.to(device))
    return part.to_empty(device=device if like.gathered_from is Memory.DEVICE else "cpu")


def _initialise(parts: list[nn.Module], this_rank: ThisRank, *, replaced: bool) -> list[Weight]:
    """Write initial values into the master copies, then round them to the weights' dtype.

    A DTensor is its own master copy: fully_shard casts the gathered weights for forward. `_weight` allocates the
    master copies that are in host memory. With `replaced`, a checkpoint will overwrite all trained tensors.
    """
    parameters = {name: _local(tensor) for part in parts for name, tensor in part.named_parameters()}
    assert list(parameters) == [tensor.parameter.name for tensor in this_rank.tensors], (
        "the parameters are not those of the plan"
    )
    weights = {t.parameter.name: _weight(t, parameters[t.parameter.name], this_rank) for t in this_rank.trained}
    masters = {name: weight.master for name, weight in weights.items()}
    read = parameters | masters
    held = [(t.parameter, read[t.parameter.name], _slices(t, this_rank)) for t in this_rank.tensors]
    folder = this_rank.plan.model.weights
    wrong = write_initial_values_(this_rank.plan.seed, folder, held, replaced=replaced)
    if folder is not None:
        together(UserError, lambda: _refuse(folder, wrong))
    for weight in weights.values():
        if weight.updated_on_host:
            weight.tensor.copy_(weight.master)
    for part in parts:
        narrowed = not any(isinstance(tensor, DTensor) for tensor in part.parameters())
        if narrowed and not this_rank.tensors[0].updated_on_host:
            part.to(TORCH_DTYPE[this_rank.plan.work.precision])
            for name, tensor in part.named_parameters():
                if name not in masters:
                    continue
                if tensor.dtype == masters[name].dtype:
                    weights[name] = replace(weights[name], tensor=tensor, master=tensor)
                else:
                    weights[name] = replace(weights[name], tensor=tensor)
    return list(weights.values())


def _refuse(folder: str, wrong: list[str]) -> None:
    if wrong:
        raise UserError(f"{folder}: holds numbers that are not finite (NaN or infinity), in {', '.join(wrong)}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, outside of autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _slices(tensor: TensorPlan, this_rank: ThisRank) -> tuple[slice, ...]:
    box = tensor.optimizer.box(tensor.parameter.shape, this_rank.plan.mesh, this_rank.rank)
    return tuple(slice(start, stop) for start, stop in box)


def _weight(tensor: TensorPlan, held: torch.Tensor, this_rank: ThisRank) -> Weight:
    """The description of one trainable tensor for optimizer and checkpoints.

    Several ranks may hold the same box of the tensor; only the first of them counts it in the gradient norm.
    """
    divided = tensor.optimizer.axes(this_rank.plan.mesh)
    starts = tuple(part.start for part in _slices(tensor, this_rank))
    counts = this_rank.plan.stages_of(tensor)[0] == this_rank.coordinates["pp"] and all(
        this_rank.coordinates[axis] == 0 for axis in AXES if axis not in ("pp", *divided, *tensor.apart)
    )
    parameter = tensor.parameter
    offsets = starts if divided else None
    master = held
    if tensor.updated_on_host:
        master = torch.empty(held.shape, dtype=TORCH_DTYPE[tensor.master_dtype], device="cpu")
    return Weight(
        parameter.name, held, master, parameter.decay, parameter.shape, offsets, counts, tensor.updated_on_host
    )


def _gradients(parts: list[nn.Module], this_rank: ThisRank) -> Gradients:
    """The object that sums gradients over ranks; it also sums partial gradients over the ranks of their axes."""
    owner: Gradients | None = None
    for strategy in ORDER:
        owner = strategy.gradients(parts, this_rank, owner)
    assert owner is not None, "no strategy sums the gradients"
    for axis in dict.fromkeys(axis for tensor in this_rank.trained for axis in tensor.partial):
        indices = [number for number, tensor in enumerate(this_rank.trained) if axis in tensor.partial]
        owner = PartialGradients(owner, indices, this_rank.groups[axis])
    if tensors := copied(this_rank.plan, this_rank.tensors):
        indices = [number for number, tensor in enumerate(this_rank.trained) if tensor in tensors]
        owner = CopiedGradients(owner, indices, this_rank.groups["tp"])
    return owner


def _compile(part: nn.Module, what: str, *, graphs: bool = False) -> None:
    """Compile a part or its blocks. `graphs`: replay blocks as CUDA graphs; each forward pass begins a replay of all,
    so the results of the pass before may be overwritten."""
    if what == "model":
        part.compile()
    elif what == "blocks":
        assert isinstance(part.blocks, nn.ModuleDict)
        for block in part.blocks.values():
            block.compile(**({"mode": "reduce-overhead"} if graphs else {}))
        if graphs:
            part.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]


def _loader(parts: list[nn.Module], plan: Plan, world: World, dataset: AnyDataset, first_step: int) -> Loader:
    """The loader of this rank's samples. The parts are told how many losses a sample has."""
    work, rank = plan.work, world.place.rank
    source = dataset.source("train", work.seq_len, work.positions(-1))
    for part in parts:
        cast(Part, part).losses_per_sample = source.losses_per_sample
    sampler = Sampler(plan.seed, source.num_samples, work.global_batch_size)
    loads = any(instruction.verb is Verb.LOAD for instruction in plan.schedule.programs[world.stage])
    mine = [plan.samples(rank, number) for number in range(work.num_microbatches if loads else 0)]
    replica = plan.samples_of_replica(rank)
    return Loader(
        source,
        sampler,
        work.seq_len * (1 if plan.model.vocab_size else plan.model.hidden_dim),
        [(samples.start, samples.stop) for samples in mine],
        first_step,
        0 if plan.layout.hands_out else work.prefetch,  # portions are given to it
        pin_memory=world.device.type == "cuda",
        replica=(replica.start, replica.stop) if plan.apart else None,
    )
