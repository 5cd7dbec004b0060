"""In: a module, its optimizer, a strategy. Out: both changed so that the user's own loop trains on all the ranks.
Does not run the loop, and knows nothing of what the module computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from codescent.base.agreement import together
from codescent.base.errors import UserError
from codescent.own.average import DTYPE_NAMES, AveragedGradients
from codescent.own.blocks import check_blocks, choose_blocks, only_holds
from codescent.own.buffers import AveragedBuffers
from codescent.own.divide import divide_, hand_over
from codescent.own.session import Ranks, everywhere, joined
from codescent.strategies.fully_shard import free_gathered, set_last_backward
from codescent.train.optimize import gradient_norm

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""Strategy name to ZeRO stage; 0 is plain data parallelism."""

WHOLE = ("Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam")
"""torch's optimizers that do more than arithmetic on each element: on divided parameters they raise, or are wrong."""


_known: WeakKeyDictionary[nn.Module, tuple[str, AveragedGradients]] = WeakKeyDictionary()
"""Strategy and whole gradients of each distributed module."""


def distribute(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str = "ddp",
    *,
    replicas: int = 1,
    blocks: Sequence[nn.Module] | None = None,
    bucket_bytes: int = 16 * 2**20,
) -> None:
    """Let the module and its optimizer, both changed in place, be trained by all the ranks. The loop stays as it is.

        ranks = codescent.init()
        model = MyModel().to(ranks.device)
        optimizer = torch.optim.AdamW(model.parameters())
        codescent.distribute(model, optimizer)

    From here on each rank's `loss.backward()` leaves the mean of all ranks' gradients. Where the loss is a mean over
    this rank's samples, and every rank has as many (see `codescent.sampler`), it is the gradient of the mean over all.
    All ranks begin with rank 0's weights and buffers.

    strategy:
        "ddp": every rank holds all; gradients travel while backward runs.
        "zero1", "zero2", "zero3": parameters, gradients and the optimizer's state are divided over the ranks; "zero3"
        gathers the weights of one block at a time, the others all of them from forward to the end of backward. "zero1"
        and "zero2" differ inside `codescent.accumulate` alone. Call the module as `module(...)`; its parameters and
        their gradients are DTensors.

    What else happens in your loop:
        Gradient accumulation: several backward passes add up, as ever; inside `codescent.accumulate` more cheaply.
        A parameter that no rank's loss used keeps the gradient None. With "ddp" some ranks may use it (zero on the
        others). With the other strategies all ranks or none: else they wait for each other until the timeout.
        Recomputing (torch.utils.checkpoint): with use_reentrant=False. Of the other kind each part is a backward pass
        by itself that sends all: right where the ranks do alike, and slow; refused, in backward, where such a part
        shares a parameter with another.
        A backward pass that ended in an error is forgotten when the module is called again.
        Frozen parameters (requires_grad=False) stay as they are: choose before. Learning-rate schedulers may be made
        before or after. `optimizer.zero_grad()` works both ways. Several dtypes may be mixed.
        Buffers that forward passes change (batch norm's statistics) are averaged over the ranks after each
        `optimizer.step()`; batch norm normalises by the samples of one rank.
        Dropout draws from torch's generator: for other masks on every rank, seed it by `ranks.rank` once the module is
        made. Clipping: `codescent.clip_`, under every strategy.

    Args:
        module: any module, its parameters on `ranks.device`.
        optimizer: of the module's parameters, or of some. With "zero1" to "zero3" one that updates each element by
            itself: torch's all do but Adafactor, LBFGS, Muon, Rprop and SparseAdam, which are refused.
        replicas: with "zero1" to "zero3", how many copies of the model there are, each divided over world_size /
            replicas ranks ("hybrid" sharding: gathering stays among neighbours).
        blocks: the parts that "zero3" gathers one at a time; [] for none. None: children of one class in a list, such
            as the layers of torch.nn.Transformer.
        bucket_bytes: with "ddp", about how much travels at once.

    Raises:
        UserError: on every rank: each problem of the strategy, the optimizer, the module, with what would be right.
    """
    ranks = joined("distribute")
    chosen: list[nn.Module] = []

    def look() -> list[str]:
        _refuse(module, optimizer, strategy, replicas, ranks)
        chosen.extend(choose_blocks(module) if blocks is None else check_blocks(module, blocks))
        tensors = chain(module.named_parameters(), module.named_buffers())
        alike = (f"{name} {list(t.shape)} {t.dtype} {'trained' if t.requires_grad else 'fixed'}" for name, t in tensors)
        return [f"{strategy} {replicas}", *alike]

    _refuse_differences(together(UserError, look))
    everywhere(*chain(module.parameters(), module.buffers()))
    whole = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parts: list[nn.Parameter] = []
    if stage := STAGES[strategy]:
        before = dict(module.named_parameters(remove_duplicate=False))
        whole = [p for p in divide_(module, chosen, stage, ranks.mesh(replicas)) if p.requires_grad]
        after = dict(module.named_parameters(remove_duplicate=False))
        hand_over(optimizer, {old: after[name] for name, old in before.items()})
        parts = [p for p in module.parameters() if p.requires_grad and isinstance(p, DTensor)]
    averaged = AveragedGradients(module, whole, parts, bucket_bytes)
    ranks.closing.add(averaged)
    finalize(module, averaged.close).atexit = False  # hooks on parameters keep these alive, unseen by the collector
    _known[module] = (strategy, averaged)
    _after_each_step(module, optimizer)


@contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Inside, more backward passes follow before the optimizer's step: nothing is sent that can wait.

        for number, (inputs, targets) in enumerate(parts):
            with codescent.accumulate(model) if number < len(parts) - 1 else contextlib.nullcontext():
                (criterion(model(inputs), targets) / len(parts)).backward()
        optimizer.step()

    The last pass is outside, and completes the gradients. On every rank alike. "ddp" and "zero1" add whole gradients
    and send them once; "zero2" and "zero3" send those of each pass and add parts, which takes less memory.
    """
    if module not in _known:
        raise UserError(f"codescent.accumulate: {type(module).__name__}: call codescent.distribute first")
    _set_last(module, False)
    try:
        yield
    finally:
        _set_last(module, True)


def _set_last(module: nn.Module, last: bool) -> None:
    """Say whether the next backward pass completes the gradients."""
    strategy, averaged = _known[module]
    if stage := STAGES[strategy]:
        set_last_backward(module, stage, last=last)
    averaged.set_last(last)


@torch.no_grad()
def clip_(module: nn.Module, max_norm: float) -> float:
    """Scale the module's gradients so that their norm, all together, is at most `max_norm`. Returns it as it was.

    torch.nn.utils.clip_grad_norm_ under every strategy, also for a mixture of divided and whole parameters. Collective.
    A norm that is not finite makes every gradient NaN or zero, as there.
    """
    free_gathered(module)  # left so by a forward pass that no backward followed
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    square = torch.tensor(_square(parts), dtype=torch.float64)
    mesh = next((gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)), None)
    if mesh is not None:
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group("dp_shard"))
    norm = float((square + _square(whole)).sqrt())
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1:
        torch._foreach_mul_([*parts, *whole], scale)
    return norm


def _square(gradients: Sequence[torch.Tensor]) -> float:
    """The square of their norm, each dtype summed by itself."""
    kinds = dict.fromkeys(gradient.dtype for gradient in gradients)
    norms = [gradient_norm([gradient for gradient in gradients if gradient.dtype == kind]) for kind in kinds]
    return float(sum(norm * norm for norm in norms))


def _after_each_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights that a forward pass without backward left gathered are old ones now; buffers become one for all."""
    buffers = AveragedBuffers(module)
    del module  # not kept alive by its optimizer's hook

    def act(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if (updated := buffers.module()) is not None:
            free_gathered(updated)
            buffers.average()

    optimizer.register_step_post_hook(act)


def _refuse(module: nn.Module, optimizer: torch.optim.Optimizer, strategy: str, replicas: int, ranks: Ranks) -> None:
    """Raise every problem that this rank sees by itself."""
    problems = []
    if strategy not in STAGES:
        near = get_close_matches(strategy, STAGES, 1)
        meant = f' (did you mean "{near[0]}"?)' if near else ""
        hybrid = '; hybrid sharding (HSDP) is "zero3" with replicas=' if "h" in strategy.lower() else ""
        problems.append(f'strategy "{strategy}": must be one of {", ".join(STAGES)}{meant}{hybrid}')
    if replicas < 1 or ranks.world_size % max(1, replicas):
        problems.append(f"replicas = {replicas}: must divide the {ranks.world_size} rank(s)")
    elif replicas > 1 and not STAGES.get(strategy, 1):
        problems.append(f'replicas = {replicas}: with "ddp" every rank is a replica: leave it out')
    if module in _known:
        problems.append(f"{type(module).__name__}: is distributed already, by {_known[module][0]}")
    if STAGES.get(strategy) and only_holds(module):
        problems.append(
            f'strategy "{strategy}": {type(module).__name__} has no forward, and the module is to be called: give one '
            'whose forward calls these, or take "ddp"'
        )
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in WHOLE]
    if kinds and STAGES.get(strategy):
        problems.append(f'strategy "{strategy}": {kinds[0]} computes with whole parameters: take "ddp", or AdamW')
    names = {parameter: name for name, parameter in module.named_parameters()}
    if strangers := [p for group in optimizer.param_groups for p in group["params"] if p not in names]:
        shapes = ", ".join(str(list(p.shape)) for p in strangers[:3])
        problems.append(
            f"the optimizer has {len(strangers)} parameter(s) that are not this module's (of shape {shapes}): make it "
            f"of module.parameters()"
        )
    tensors = list(chain(module.named_parameters(), module.named_buffers()))
    for name, tensor in tensors:
        if tensor.device != ranks.device:
            meta = "has no values yet (meta device)" if tensor.is_meta else f"is on {tensor.device}"
            problems.append(f"{name} {meta}: call module.to(ranks.device), which is {ranks.device}, before")
            break
    problems += [
        f"{name}: elements of it share memory (expand, as_strided): make it with .clone(), or .contiguous()"
        for name, tensor in tensors
        if _overlaps(tensor)
    ]
    if odd := [name for p, name in names.items() if p.requires_grad and p.dtype not in DTYPE_NAMES]:
        known = ", ".join(str(kind) for kind in DTYPE_NAMES)
        problems.append(f"{odd[0]} is of {module.get_parameter(odd[0]).dtype}: what is trained must be of {known}")
    if sparse := [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]:
        problems.append(f"{sparse[0]}: sparse gradients are not averaged: make it with sparse=False")
    if problems:
        raise UserError(*(f"codescent.distribute: {problem}" for problem in problems))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether a place in memory may be that of two elements: no stride steps over what the smaller ones reach."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def _refuse_differences(descriptions: Sequence[Sequence[str]]) -> None:
    """The same UserError on every rank, where two ranks do not have the same module."""
    for rank, other in enumerate(descriptions):
        for mine, theirs in zip([*descriptions[0], "nothing more"], [*other, "nothing more"], strict=False):
            if mine != theirs:
                raise UserError(
                    f"codescent.distribute: the ranks' modules differ: rank 0 has {mine}, rank {rank} has {theirs}: "
                    "every rank has to make the same"
                )
