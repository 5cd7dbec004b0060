"""In: a config, a plan, process groups, a dataset. Out: this rank's model chunks, optimizer, data loader and executor.
Does not run a step, write a file or name a strategy: it applies the list ORDER of `strategies`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from codescent import models
from codescent.base.agreement import together
from codescent.base.device import offered
from codescent.base.dtensors import is_dtensor
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.base.unfilled import Unfilled
from codescent.config.rate_schedules import learning_rate
from codescent.coupling import Services, reads_ahead
from codescent.coupling import of as coupling_of
from codescent.data.loader import Loader
from codescent.data.mixture import order_of
from codescent.data.order import Ahead, AheadOrder
from codescent.data.samples import AnyDataset
from codescent.huggingface.initial import write_initial_values_
from codescent.models.part import Part
from codescent.operators.compiled import leave_alone
from codescent.plan import AXES, WIDE, Memory, Plan, TensorPlan, Verb
from codescent.strategies import ThisRank, active
from codescent.strategies.gradients import gradients_of
from codescent.train.ema import Ema
from codescent.train.execute import Executor
from codescent.train.muon import matrix_rounds
from codescent.train.optimize import Accepts, Optimizer, Weight
from codescent.train.quantized import make_room_, quantize_
from codescent.train.server_weights import server_weights
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.config.sections import Config


def assemble(
    config: Config,
    plan: Plan,
    world: World,
    dataset: AnyDataset,
    first_step: int,
    stop: StopRequest,
    compiles: str | None = None,
    generation: int = 0,
    ahead: Ahead = (),
    accepts: Accepts | None = None,
    *,
    initial: bool = False,
) -> Trainer:
    """Build the chunks of the model on this rank, divide and initialise them; build optimizer, loader and executor.

    `compiles`: what torch.compile compiles, chosen by compiling.py: "none", "blocks" or "model"; None: what
    train.compile names, nothing if that is auto. `generation`: its number, see generation.py. `ahead`: batches that are
    left out. `accepts`: see `Optimizer`. `initial`: trained weights get their initial values, too, if a checkpoint will
    overwrite them, and nothing is read ahead before the first step: samples get numbers that these weights give.

    Raises:
        UserError: initial weights that are not finite, a corpus too short for a batch, or a setting that needs hardware
            which this machine lacks.
    """
    this_rank = ThisRank(plan, world.this_rank.rank, world.groups)
    computes = world.this_rank.rank in plan.mesh
    depths = plan.schedule.parts(world.stage) if computes else ()
    parts = [_part(plan, this_rank, of_part, world.device) for of_part in depths]
    weights = _initialise(parts, this_rank, replaced=first_step > 0 and not initial) if computes else []
    if plan.model.weights is not None and not computes:  # who computes has read all of it, and says what is wrong
        together(UserError, lambda: None)
    gradients = gradients_of(parts, this_rank)
    for part in parts:
        _compile(part, compiles or config.train.compile or "none", graphs=config.train.cuda_graphs)
    loader = _loader(parts, plan, world, dataset, first_step, ahead, initial) if computes else None
    ema = Ema(weights, config.train.ema, config.train.ema_every)
    services = _services(config, this_rank, world, first_step, stop, generation, ema, accepts)
    coupling = coupling_of(plan, weights, services)
    executor = Executor(plan, world, parts, gradients, coupling, loader, stop.is_requested, ema.updates)
    return Trainer(executor, parts, coupling, loader, ema)


def _part(plan: Plan, this_rank: ThisRank, depths: Any, device: torch.device) -> nn.Module:
    """The layers of a chunk, divided by the strategies, with memory on the device."""
    part = models.construct(plan.model, "meta", depths)
    cast(Part, part).objective = plan.objective
    if device.type != "cpu":  # so the logits of a larger pass, in validation, need no more memory
        cast(Part, part).head_chunk_tokens = _of_micro_batch(plan)
    _widen(part, plan.work.precision)
    for strategy in active(plan):
        strategy.divide(part, this_rank)
    make_room_(part, this_rank.tensors)
    return _with_memory(part, this_rank.tensors[0], device)


def _services(
    config: Config,
    this_rank: ThisRank,
    world: World,
    first_step: int,
    stop: StopRequest,
    generation: int,
    ema: Ema,
    accepts: Accepts | None,
) -> Services:
    """What the run gives the coupling of this rank."""
    plan, device, host = this_rank.plan, world.device, torch.device("cpu")
    steps, workers = config.train.num_steps, plan.scale_ranks
    return Services(
        world,
        this_rank,
        device,
        first_step,
        lambda number: learning_rate(config.optimizer, steps, workers, number),
        stop.is_requested,
        lambda weights: Optimizer(weights, config.optimizer, matrix_rounds(this_rank, device), device, ema, accepts),
        lambda weights: Optimizer(weights, config.optimizer, (), host),
        lambda index: server_weights(plan, index, replaced=first_step > 0),
        generation,
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
    with Unfilled():
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
    whole = [t for t in this_rank.tensors if not t.parameter.quantized]
    held = [(t.parameter, read[t.parameter.name], _slices(t, this_rank)) for t in whole]
    plan = this_rank.plan
    folders = plan.model.folders
    wrong = write_initial_values_(plan.seed, plan.model, plan.work.precision, held, replaced=replaced)
    wrong += quantize_(parts, this_rank)
    if folders:
        together(UserError, lambda: _refuse(" with ".join(folders), wrong))
    for weight in weights.values():
        if weight.updated_on_host:
            weight.tensor.copy_(weight.master)
    for part in parts:
        narrowed = not any(is_dtensor(tensor) for tensor in part.parameters())
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
        return tensor.to_local() if is_dtensor(tensor) else tensor.data


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
        parameter.name,
        held,
        master,
        parameter.decay,
        parameter.shape,
        offsets,
        counts and tensor.sign_rate is None,
        tensor.updated_on_host,
        tensor.rate_factor,
        tensor.sign_rate,
    )


def _compile(part: nn.Module, what: str, *, graphs: bool = False) -> None:
    """Compile a part or its blocks. `graphs`: replay blocks as CUDA graphs; each forward pass begins a replay of all,
    so the results of the pass before may be overwritten."""
    if what != "none":
        leave_alone()
    if what == "model":
        part.compile()
    elif what == "blocks":
        assert isinstance(part.blocks, nn.ModuleDict)
        for block in part.blocks.values():
            block.compile(**({"mode": "reduce-overhead"} if graphs else {}))
        if graphs:
            part.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]


def _loader(
    parts: list[nn.Module], plan: Plan, world: World, dataset: AnyDataset, first_step: int, ahead: Ahead, waits: bool
) -> Loader:
    """The loader of this rank's samples. The parts are told how many losses a sample has."""
    work, rank = plan.work, world.this_rank.rank
    source = dataset.source("train", work.seq_len, work.positions(-1))
    for part in parts:
        cast(Part, part).losses_per_sample = source.losses_per_sample
    sampler = order_of(source, plan.seed, work.global_batch_size)
    sampler = AheadOrder(sampler, ahead) if ahead else sampler
    loads = any(instruction.verb is Verb.LOAD for instruction in plan.schedule.programs[world.stage])
    mine = [plan.samples(rank, number) for number in range(work.num_microbatches if loads else 0)]
    replica = plan.samples_of_replica(rank)
    return Loader(
        source,
        sampler,
        work.seq_len * (1 if plan.model.vocab_size else plan.model.hidden_dim),
        [(samples.start, samples.stop) for samples in mine],
        first_step,
        work.prefetch if reads_ahead(plan) else 0,
        pin_memory=offered(world.device).pins,
        replica=(replica.start, replica.stop) if plan.apart else None,
        waits=waits,
    )
