"""In: weights, their summed gradients, a learning rate. Out: updated weights, the gradient norm, the optimizer's state.
Does not sum gradients over ranks (strategies do) and does not know at which step it is (`learning_rate` does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from codescent.checkpoint.box import Box
from codescent.train.host_copy import HostCopy

if TYPE_CHECKING:
    from codescent.config.sections import Optimizer as OptimizerConfig


UNIT_NUMEL = 4 * 2**20
"""Parameters are updated together in units of about this many elements: large enough to keep every core busy, small
enough that the fp32 copies of a unit's bf16 gradients stay in cache."""

NORM_CHUNK = 2**19
"""Elements cast to fp32 at a time for the norm of bf16 gradients: 2 MiB, which stays in cache."""


def learning_rate(config: OptimizerConfig, num_steps: int, num_workers: int, step: int) -> float:
    """Learning rate of the step with number `step` (from 0): linear warm-up, then the schedule, then its minimum.

    cosine: Loshchilov and Hutter 2017, "SGDR", eq. 5, one period. With `scale_learning_rate` the whole curve is
    multiplied by the number of data-parallel workers ("linear": Goyal et al. 2017, 2.1) or its square root ("sqrt":
    Krizhevsky 2014, "One weird trick", 3.2); "none" leaves it, since the global batch does not grow with the workers.
    """
    scale = {"none": 1.0, "linear": float(num_workers), "sqrt": math.sqrt(num_workers)}[config.scale_learning_rate]
    peak, lowest = config.learning_rate * scale, config.min_learning_rate * scale
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    decay_steps = num_steps if config.decay_steps is None else config.decay_steps
    if config.schedule == "constant":
        return peak
    if step >= decay_steps:
        return lowest
    progress = (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps)
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return lowest + remaining * (peak - lowest)


@dataclass(frozen=True)
class Weight:
    """A trainable tensor on this rank.

    `tensor` is what forward reads; `master` is what the optimizer updates: the same tensor, unless weights are bf16.
    Where it is sharded, `shape` is that of the whole and `offsets` are where this part begins. `counted`: of the ranks
    that hold the same part, this one counts it in the norm.
    """

    name: str
    tensor: torch.Tensor
    master: torch.Tensor
    decay: bool
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] | None = None
    counted: bool = True
    updated_on_host: bool = False

    def named(self, value: torch.Tensor) -> torch.Tensor | Box:
        """A tensor of the master's shape (the master, its moments) as a checkpoint knows it: a Box if divided."""
        if self.offsets is None or value.shape != self.master.shape:
            return value
        return Box(value, torch.Size(self.shape), self.offsets)


class Unit:
    """Parameters that are updated together.

    `wide` is memory for their gradients in the dtype of the masters, one after the other; None where they have that
    dtype already, or where a single matrix is so large that its memory is better given back.
    """

    def __init__(self, indices: list[int], wide: torch.Tensor | None, shapes: Sequence[torch.Size] = ()) -> None:
        self.indices, self.wide = indices, wide
        pieces = () if wide is None else torch.split(wide, [shape.numel() for shape in shapes])
        self.places = [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    def cast(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cast this unit's gradients into `wide`, and return it."""
        for index, place in zip(self.indices, self.places, strict=True):
            place.copy_(gradients[index])
        assert self.wide is not None
        return self.wide


class Optimizer:
    """One of torch's optimizers over fp32 (fp64) master weights, with global-norm clipping.

    Where the weights are bf16, each unit of gradients is cast to fp32 just before its update: the full set of fp32
    gradients never exists. Where the masters are in host memory, each unit's gradients are copied there and its weights
    back. State is allocated at once, so that memory is known before the first step.

    `weights` are in the plan's order. `sum_parts` adds a tensor on the CPU, in place, over the ranks that hold other
    parts of the model; None: this rank holds all of it.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        config: OptimizerConfig,
        sum_parts: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.weights = list(weights)
        self.config = config
        self.sum_parts = sum_parts
        self.masters = [weight.master for weight in self.weights]
        self.narrow = any(weight.master is not weight.tensor for weight in self.weights)
        self.on_host = any(weight.updated_on_host for weight in self.weights)
        self.units = self._make_units()
        self.host_copy = HostCopy(self.weights, [unit.indices for unit in self.units]) if self.on_host else None
        decayed = [weight.master for weight in self.weights if weight.decay]
        plain = [weight.master for weight in self.weights if not weight.decay]
        groups: list[dict[str, object]] = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params or not self.masters  # torch wants a group, be it empty: a stage may have nothing to train
        ]
        self.torch = _torch_optimizer(groups, config)
        self._allocate_state()

    def _make_units(self) -> list[Unit]:
        sizes = [master.numel() for master in self.masters]
        if not self.narrow:
            return [Unit(list(range(len(sizes))), None)]
        groups = list(_units(sizes, UNIT_NUMEL))
        if self.on_host:
            return [Unit(indices, None) for indices in groups]
        numels = [sum(sizes[index] for index in indices) for indices in groups]
        wide = self.masters[0].new_empty(max((numel for numel in numels if numel <= UNIT_NUMEL), default=0))
        shapes = [master.shape for master in self.masters]
        return [
            Unit(indices, wide[:numel] if numel <= UNIT_NUMEL else None, [shapes[index] for index in indices])
            for indices, numel in zip(groups, numels, strict=True)
        ]

    def _allocate_state(self) -> None:
        """Make torch create its state, all zeros, by a step on zero gradients with a learning rate of zero."""
        self._set_learning_rate(0.0)
        for unit in self.units:
            for index in unit.indices:
                self.masters[index].grad = torch.zeros_like(self.masters[index])
            self.torch.step()
            for index in unit.indices:
                self.masters[index].grad = None
        for state in self.torch.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.torch.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float, *, updates: bool = True) -> float:
        """Clip by the global norm, update master weights and weights, and return the norm before clipping.

        Where the norm is not finite, or not `updates`, nothing is updated. `gradients`: one per weight, summed over the
        ranks; they are clipped in place where their dtype is that of the master weights. `rate`: the learning rate.
        """
        first = self.units[0]
        once = False
        if self.sum_parts is not None:
            norm = self._norm_of_parts(gradients, self.sum_parts)
        elif once := len(self.units) == 1 and first.wide is not None:  # cast for the norm, ready for the update
            norm = float(torch.linalg.vector_norm(first.cast(gradients)))
        else:
            norm = gradient_norm(gradients)
        if not (updates and math.isfinite(norm)):
            return norm
        self._set_learning_rate(rate)
        if self.host_copy is not None:
            for unit, fetched in zip(self.units, self.host_copy.fetch(gradients), strict=True):
                self._update(unit, fetched, norm)
                self.host_copy.send(unit.indices)
            self.host_copy.finish()
            return norm
        for unit in self.units:
            if unit.wide is not None and not once:
                unit.cast(gradients)
            places = unit.places or [gradients[index].to(self.masters[index].dtype) for index in unit.indices]
            self._update(unit, places, norm)
            for index in unit.indices:
                if self.masters[index] is not self.weights[index].tensor:
                    self.weights[index].tensor.copy_(self.masters[index])
        return norm

    def _norm_of_parts(self, gradients: Sequence[torch.Tensor], sum_parts: Callable[[torch.Tensor], object]) -> float:
        """The norm over all ranks; each part is counted by one of the ranks that hold it."""
        counted = [gradient for weight, gradient in zip(self.weights, gradients, strict=True) if weight.counted]
        norm = gradient_norm(counted) if counted else 0.0
        square = torch.tensor(norm * norm, dtype=torch.float64)  # `**` raises where the product is infinite
        sum_parts(square)
        total = float(square)
        return math.sqrt(total) if math.isfinite(total) else total

    def _update(self, unit: Unit, gradients: Sequence[torch.Tensor], norm: float) -> None:
        """Clip a unit's gradients, which have the dtype of the masters, and update these."""
        masters = [self.masters[index] for index in unit.indices]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        most = self.config.max_grad_norm
        if 0 < most < norm and unit.wide is not None:
            unit.wide.mul_(most / (norm + 1e-6))  # what clip_grads_with_norm_ does to each
        elif 0 < most < norm:
            torch.nn.utils.clip_grads_with_norm_(masters, most, torch.tensor(norm, dtype=torch.float64))
        self.torch.step()
        for master in masters:
            master.grad = None

    def held(self) -> Iterator[tuple[Weight, str, torch.Tensor]]:
        """Master weights and state: "model.NAME" and "optimizer.STATE.NAME", each with its weight."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            yield weight, f"model.{weight.name}", master.detach()
            for state, value in self.torch.state[master].items():
                if isinstance(value, torch.Tensor):
                    yield weight, f"optimizer.{state}.{weight.name}", value

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """Everything that a checkpoint holds, by name (see `held`)."""
        return {name: weight.named(value) for weight, name, value in self.held()}

    def is_finite(self) -> bool:
        """Whether everything that a checkpoint would hold of this rank is finite. One pass over memory."""
        held = (value.local if isinstance(value, Box) else value for value in self.tensors().values())
        # A finite sum has finite summands only, and is 18 times faster on a CPU than looking at each.
        return all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in held)

    @torch.no_grad()
    def loaded(self) -> None:
        """Call after `tensors` were overwritten by a checkpoint: brings the weights up to the master weights."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight.tensor:
                weight.tensor.copy_(master)


def _units(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Consecutive indices whose sizes add up to `most` at the most; a larger one is a unit of its own."""
    unit: list[int] = []
    for index, size in enumerate(sizes):
        if unit and sum(sizes[other] for other in unit) + size > most:
            yield unit
            unit = []
        unit.append(index)
    if unit:
        yield unit


def _torch_optimizer(groups: list[dict[str, object]], config: OptimizerConfig) -> torch.optim.Optimizer:
    rate, betas, fused = config.learning_rate, (config.beta1, config.beta2), config.fused
    match config.kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=config.eps, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=betas, eps=config.eps, fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, fused=fused)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate, eps=config.eps)
        case "adadelta":
            return torch.optim.Adadelta(groups, lr=rate, rho=config.beta2, eps=config.eps)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=rate, alpha=config.beta2, momentum=config.momentum, eps=config.eps)


def gradient_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Euclidean norm of all the gradients together, summed in at least fp32 whatever their dtype."""
    if gradients[0].dtype != torch.bfloat16:
        return float(torch.nn.utils.get_total_norm(gradients))
    if gradients[0].device.type != "cpu":
        return float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm())
    # On the CPU a norm of bf16 that sums in fp32 is nine times slower than casting cache-sized pieces.
    squares = 0.0
    for gradient in gradients:
        for piece in torch.split(gradient.reshape(-1), NORM_CHUNK):
            wide = piece.float()
            squares += float(wide @ wide)
    return math.sqrt(squares)
