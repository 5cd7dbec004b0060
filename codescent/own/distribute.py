"""In: a module, its optimizer, a strategy (ddp, zero1-3 or fsdp). Out: both, changed in place; the loop uses all ranks.
Does not run the loop, and does not depend on what the module computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from codescent.base.agreement import together
from codescent.base.counted import counted
from codescent.base.device import wide_dtype
from codescent.base.errors import UserError
from codescent.operators.products import sum_wide
from codescent.own import registry
from codescent.own.arguments import COUNT, FINITE, MODULE, MODULES, MOMENTUM, OPTIMIZER, POSITIVE, TEXT, number, public
from codescent.own.average import DTYPE_NAMES, AveragedGradients
from codescent.own.batches import Batches
from codescent.own.blocks import check_blocks, choose_blocks, only_holds
from codescent.own.buffers import AveragedBuffers
from codescent.own.divide import divide_, hand_over
from codescent.own.rounds import Options, Rounds
from codescent.own.session import Ranks, everywhere, joined
from codescent.plan.wire import Wire
from codescent.strategies.fully_shard import free_gathered, set_last_backward
from codescent.train.norm import gradient_square

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
"""Strategy name to ZeRO stage; 0 is plain data parallelism. "fsdp" is torch's name of stage 3."""

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam")
"""torch's optimizers that do not update each element independently: on sharded parameters they raise or are wrong."""

_KINDS = {
    "module": MODULE,
    "optimizer": OPTIMIZER,
    "strategy": TEXT,
    "replicas": COUNT,
    "blocks": MODULES.or_none(),
    "bucket_bytes": COUNT,
    "average_every": COUNT.or_none(),
    "outer_optimizer": TEXT,
    "outer_learning_rate": FINITE.or_none(),
    "outer_momentum": MOMENTUM.or_none(),
    "wire": TEXT,
}


@public("codescent.distribute", collective=True, **_KINDS)
def distribute(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str = "ddp",
    *,
    replicas: int = 1,
    blocks: Sequence[nn.Module] | None = None,
    bucket_bytes: int = 16 * 2**20,
    average_every: int | None = None,
    outer_optimizer: str = "none",
    outer_learning_rate: float | None = None,
    outer_momentum: float | None = None,
    wire: str = "none",
) -> None:
    """Change a module and its optimizer, in place, so that all ranks train it. The loop stays as it is.

        ranks = codescent.init()
        model = MyModel().to(ranks.device)
        optimizer = torch.optim.AdamW(model.parameters())
        codescent.distribute(model, optimizer)

    After this call each rank's `loss.backward()` computes the mean of all ranks' gradients. If the loss is a mean over
    this rank's samples, and all ranks have equally many (see `codescent.sampler`), this is the gradient of the mean
    over all samples. All ranks begin with rank 0's weights and buffers.

    strategy:
        "ddp": every rank holds the whole model; gradients are all-reduced while backward runs.
        "zero1", "zero2", "zero3": parameters, gradients and optimizer state are sharded over the ranks. "zero3"
        gathers the weights of one block at a time. "zero1" and "zero2" gather all weights in forward, and free them
        after backward; they differ only inside `codescent.accumulate`. Call the module as `module(...)`; its
        parameters and their gradients are DTensors.
        "fsdp": another name of "zero3".

    What to know for your loop:
        Gradient accumulation: the gradients of several backward passes add up, as in torch. It is faster inside
        `codescent.accumulate`.
        Unused parameters: if the loss of no rank uses a parameter, its gradient stays None. With "ddp" some ranks may
        use it: the gradients of the others count as zero. With other strategies all ranks must use it or none;
        otherwise ranks wait for each other until the timeout.
        Recompute (torch.utils.checkpoint): set use_reentrant=False. With use_reentrant=True each recomputed segment is
        a backward pass of its own, which sends all gradients. This is slow, and correct only if all ranks recompute
        the same segments. If a segment shares a parameter with another one, backward raises UserError.
        Wrappers of torch: DistributedDataParallel around the module, before or after this call, raises UserError.
        Errors: the next call of the module discards a backward pass that ended in an error.
        Frozen parameters (requires_grad=False) stay frozen; other parameters may be frozen, and trained again, after
        this call. If a parameter is unfrozen, added or replaced after it, the next `optimizer.step()` raises UserError.
        A learning-rate scheduler may be created before or after this call. `optimizer.zero_grad()` works with
        set_to_none=True and False.
        Parameters may have different dtypes.
        On CUDA, products in bf16 and fp16 are summed in fp32 from this call on: it sets
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, and that of fp16, to False.
        Buffers that forward passes change (batch norm's statistics) are averaged over the ranks after each
        `optimizer.step()`. Batch norm normalises by the samples of one rank.
        Dropout uses torch's generator. For different masks on each rank, call torch.manual_seed(seed + ranks.rank)
        after this call. Clipping: use `codescent.clip_`, with every strategy.

    Args:
        module: any module with its parameters on `ranks.device`; with "ddp" alone on any of `ranks.devices`.
        optimizer: of all or some of the module's parameters. "zero1" to "zero3" need an optimizer that updates each
            element independently. torch's optimizers do, except Adafactor, LBFGS, Muon, Rprop and SparseAdam, which
            are refused.
        replicas: number of copies of the model, with "zero1" to "zero3". Each copy is sharded over world_size /
            replicas consecutive ranks ("hybrid" sharding).
        blocks: the submodules that "zero3" gathers one at a time; []: none. None: submodules of one class in a list,
            such as the layers of torch.nn.Transformer.
        bucket_bytes: with "ddp", approximate bytes of one all-reduce.
        average_every: with "ddp", for slow networks: each rank trains apart, without communication. After each
            `average_every`-th step of `optimizer` the weights are averaged over the ranks, in place, and so are the
            buffers ("local SGD"). Optimizer state is each rank's own. See `codescent docs own_module`.
        outer_optimizer: "none": the weights after a round are the mean. "sgd" or "nesterov": the mean change of a round
            is the gradient of an outer optimizer step ("DiLoCo").
        outer_learning_rate: of the outer optimizer; None: 0.7.
        outer_momentum: of the outer optimizer; None: 0.9.
        wire: with "ddp", the format in which gradients or, with `average_every`, weights travel: "none", "bf16",
            "int8", "int4", "sign", "powersgd:r" or "topk:share". Lossy ones have error feedback.

    Raises:
        UserError: on every rank: all problems of strategy, optimizer and module, each with a way to correct it.
    """
    ranks = joined("distribute")
    period = None if average_every is None else int(average_every)
    options = Options(period, outer_optimizer, number(outer_learning_rate), number(outer_momentum), wire)
    chosen: list[nn.Module] = []

    def look() -> tuple[dict[str, Any], list[str]]:
        _refuse(module, optimizer, strategy, replicas, ranks, options)
        chosen.extend(choose_blocks(module) if blocks is None else check_blocks(module, blocks))
        tensors = chain(module.named_parameters(), module.named_buffers())
        several = len(ranks.devices) > 1
        described = [
            f"{name} {list(t.shape)} {t.dtype} {'trained' if t.requires_grad else 'fixed'}"
            + (f" on device {ranks.devices.index(t.device)}" if several else "")
            for name, t in tensors
        ]
        asked = {"strategy": strategy, "optimizer": type(optimizer).__name__, "replicas": int(replicas)}
        asked |= options.described()
        return {**asked, "number of blocks": len(chosen), "bucket_bytes": int(bucket_bytes)}, described

    _refuse_differences(together(UserError, look))
    sum_wide()
    everywhere(*chain(module.parameters(), module.buffers()))
    whole = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = dict(module.named_parameters(remove_duplicate=False))
    parts: list[nn.Parameter] = []
    if stage := STAGES[strategy]:
        whole = [p for p in divide_(module, chosen, stage, ranks.mesh(replicas)) if p.requires_grad]
        after = dict(module.named_parameters(remove_duplicate=False))
        hand_over(optimizer, {old: after[name] for name, old in before.items()})
        parts = [p for p in module.parameters() if p.requires_grad and isinstance(p, DTensor)]
    rounds = None if average_every is None else Rounds(module, options)
    averaged = AveragedGradients(module, whole if rounds is None else [], parts, bucket_bytes, Wire.parse(wire))
    batches = Batches(module, optimizer, ranks.world.store, ranks.world.this_rank, averages=rounds is None)
    for one in (averaged, batches) if rounds is None else (averaged, batches, rounds):
        ranks.closing.add(one)
        # Hooks keep parameters alive in a way that the garbage collector cannot see: remove them with the module.
        finalize(module, one.close).atexit = False
    registry.add(module, strategy, averaged, before.values(), options, rounds)
    if rounds is None:
        _after_each_step(module, optimizer)
    else:
        optimizer.register_step_post_hook(lambda *_: rounds.stepped())


@public("codescent.accumulate", module=MODULE)
@contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Delay communication for backward passes inside this context: another backward pass follows before the step.

        for number, (inputs, targets) in enumerate(parts):
            with codescent.accumulate(model) if number < len(parts) - 1 else contextlib.nullcontext():
                (criterion(model(inputs), targets) / len(parts)).backward()
        optimizer.step()

    The last backward pass is outside of the context and completes the gradients. All ranks must do the same. "ddp" and
    "zero1" add up whole gradients and send them once. "zero2" and "zero3" reduce-scatter the gradients of each pass and
    add up shards, which takes less memory.

    Raises:
        UserError: the module is not distributed.
    """
    joined("accumulate")
    inner, known = registry.find(module, "accumulate")

    def set_last(last: bool) -> None:  # whether the next backward pass completes the gradients
        if stage := STAGES[known.strategy]:
            set_last_backward(inner, stage, last=last)
        known.averaged.set_last(last)

    set_last(False)
    try:
        yield
    finally:
        set_last(True)


@public("codescent.clip_", module=MODULE, max_norm=POSITIVE)
@torch.no_grad()
def clip_(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the module's gradients so that their global norm is at most `max_norm`. Collective.

    It does what torch.nn.utils.clip_grad_norm_ does, with every strategy, and for sharded and replicated parameters
    together. A norm that is not finite makes every gradient NaN or zero, as in torch. The host does not wait for the
    device.

    Returns:
        The norm before scaling, a tensor without dims on the module's device, in fp32, or fp64 for fp64 gradients.

    Args:
        module: a distributed module, or a part of one.
        max_norm: above 0. math.inf only measures.

    Raises:
        UserError: the module is not distributed, or `max_norm` is not above 0.
    """
    joined("clip_")
    free_gathered(module)  # a forward pass without backward leaves weights gathered
    registry.refuse_other(module, "clip_")
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    device = next((gradient.device for gradient in gradients), torch.device("cpu"))
    square = _square(parts, device)
    mesh = next((gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)), None)
    if mesh is not None:
        dist.all_reduce(square, group=mesh.get_group("dp_shard"))
    norm = (square + _square(whole, device)).sqrt()
    scale = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    for (kind, on), of_kind in _by_kind([*parts, *whole]).items():
        torch._foreach_mul_(of_kind, scale.to(on, torch.promote_types(kind, torch.float32)))
    return norm if any(gradient.dtype == torch.float64 for gradient in gradients) else norm.float()


def _square(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The squared norm of gradients that may have several dtypes: [], in its widest dtype, without waiting for it."""
    total = torch.zeros((), dtype=wide_dtype(device), device=device)
    for of_kind in _by_kind(gradients).values():
        total += gradient_square(of_kind).to(device)
    return total


def _by_kind(gradients: Sequence[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], list[torch.Tensor]]:
    """Gradients of one dtype on one device, together: torch's foreach kernels take no others."""
    found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    return found


def _after_each_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After each optimizer step, free gathered weights, which are outdated now, and average buffers over ranks."""
    buffers = AveragedBuffers(module)
    del module  # so that the optimizer's hook does not keep the module alive

    def act(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if (updated := buffers.module()) is not None:
            free_gathered(updated)
            buffers.average()

    optimizer.register_step_post_hook(act)


def _refuse(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str,
    replicas: int,
    ranks: Ranks,
    options: Options,
) -> None:
    """Raise UserError with all problems that this rank can find without communication, and those of the options."""
    problems = list(options.problems(strategy if STAGES.get(strategy) else None))
    if wrapper := registry.wrapper_of(module):
        problems.append(f"{wrapper} sums gradients or divides the module itself: leave it out: do not create it")
    if strategy not in STAGES:
        near = get_close_matches(str(strategy).lower(), STAGES, 1)
        meant = f' (did you mean "{near[0]}"?)' if near else ""
        hybrid = '; hybrid sharding (HSDP) is "zero3" with replicas=' if "h" in str(strategy).lower() else ""
        problems.append(f'strategy "{strategy}": must be one of {", ".join(STAGES)}{meant}{hybrid}')
    if ranks.world_size % replicas:
        problems.append(f"replicas = {replicas}: must divide {counted(ranks.world_size, 'rank')}")
    elif replicas > 1 and not STAGES.get(strategy, 1):
        problems.append(f'replicas = {replicas}: with "ddp" every rank is a replica: leave it out')
    if before := registry.strategy_of(module):
        problems.append(f"{type(module).__name__}, or a part of it, is distributed already, by {before}")
    if STAGES.get(strategy) and hasattr(module, "_orig_mod"):
        problems.append(f'strategy "{strategy}": the module is compiled already: call torch.compile after distribute')
    elif STAGES.get(strategy) and only_holds(module):
        problems.append(
            f'strategy "{strategy}": {type(module).__name__} has no forward: give a module whose forward calls its '
            'submodules, or take "ddp"'
        )
    whole = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in NOT_ELEMENTWISE]
    if whole and STAGES.get(strategy):
        problems.append(f'strategy "{strategy}": {whole[0]} computes with whole parameters: take "ddp", or AdamW')
    names = {parameter: name for name, parameter in module.named_parameters()}
    if foreign := [p for group in optimizer.param_groups for p in group["params"] if p not in names]:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        problems.append(
            f"the optimizer has {counted(len(foreign), 'parameter')} outside of this module (of shape {shapes}): "
            "create it with module.parameters()"
        )
    tensors = list(chain(module.named_parameters(), module.named_buffers()))
    problems += (wrong := list(misplaced(tensors, ranks.devices)))
    elsewhere = not wrong and {tensor.device for _, tensor in tensors} - {ranks.device}
    if elsewhere and (needs := _of_one_device(strategy, options)):
        problems.append(
            f'{needs}: needs a module on {ranks.device}, the first device of its rank: take "ddp" alone, or move it'
        )
    problems += [
        f"{name}: some of its elements share memory (expand, as_strided): create it with .clone() or .contiguous()"
        for name, tensor in tensors
        if _overlaps(tensor)
    ]
    if odd := [name for p, name in names.items() if p.requires_grad and p.dtype not in DTYPE_NAMES]:
        known = ", ".join(str(kind) for kind in DTYPE_NAMES)
        problems.append(f"{odd[0]} is of {module.get_parameter(odd[0]).dtype}: trained parameters must be of {known}")
    if sparse := [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]:
        problems.append(f"{sparse[0]}: sparse gradients cannot be averaged: create it with sparse=False")
    if problems:
        raise UserError(*(f"codescent.distribute: {problem}" for problem in problems))


def misplaced(tensors: Sequence[tuple[str, torch.Tensor]], devices: Sequence[torch.device]) -> Iterator[str]:
    """The first tensor that is on none of a rank's devices."""
    name, tensor = next(((name, tensor) for name, tensor in tensors if tensor.device not in devices), ("", None))
    if tensor is None:
        return
    where = "has no values yet (meta device)" if tensor.is_meta else f"is on {tensor.device}"
    if len(devices) > 1:
        yield f"{name} {where}: must be on one of ranks.devices, which are {', '.join(map(str, devices))}"
        return
    several = any(one.type == tensor.device.type and one != tensor.device for one in devices)
    also = "; for a module on two devices call codescent.init(devices_per_rank=2)" if several else ""
    yield f"{name} {where}: first call module.to(ranks.device), which is {devices[0]}{also}"


def _of_one_device(strategy: str, options: Options) -> str:
    """What was asked for that no module on several devices can have; "": nothing."""
    if STAGES.get(strategy):
        return f'strategy "{strategy}"'
    return "average_every" if options.average_every is not None else "wire" if options.exchanges else ""


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: a stride is not larger than the extent of all smaller strides."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def _refuse_differences(found: Sequence[tuple[dict[str, Any], list[str]]]) -> None:
    """Raise the same UserError on every rank if two ranks give different arguments, or have different modules."""
    asked, described = found[0]
    for rank, (others, other) in enumerate(found):
        for name, value in others.items():
            if value != asked[name]:
                raise UserError(
                    f"codescent.distribute: rank 0 asks for {name} {asked[name]}, rank {rank} for {value}: every rank "
                    "must make the same call"
                )
        for mine, theirs in zip([*described, "nothing more"], [*other, "nothing more"], strict=False):
            if mine != theirs:
                raise UserError(
                    f"codescent.distribute: the ranks' modules differ: rank 0 has {mine}, rank {rank} has {theirs}: "
                    "every rank must create the same module"
                )
