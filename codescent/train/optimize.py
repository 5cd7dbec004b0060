"""In: weights, gradients, a learning rate. Out: weights updated by a torch optimizer, gradient norm, optimizer state.
Does not sum gradients over ranks (strategies do). Clips gradients by their global norm before each update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from codescent.checkpoint.box import Box
from codescent.train.host_copy import HostCopy
from codescent.train.muon import MatrixRound, Muon

if TYPE_CHECKING:
    from codescent.config.sections import Optimizer as OptimizerConfig


UNIT_NUMEL = 4 * 2**20
"""Parameters are updated in units of at most about this many elements: enough work for every core, but so few elements
that the fp32 copies of a unit's bf16 gradients fit in cache."""

NORM_CHUNK = 2**19
"""Elements cast to fp32 at a time for the norm of bf16 gradients: 2 MiB, which fits in cache."""


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

    Attributes:
        name: of the parameter.
        tensor: the weights that forward reads.
        master: the weights that the optimizer updates: the same tensor as `tensor`, unless weights are bf16 or are
            updated in host memory.
        decay: whether weight decay applies.
        shape: of the whole parameter, if it is sharded.
        offsets: index of this shard's first element in each dim of the whole; None: not sharded.
        counted: whether this rank counts the tensor in the gradient norm; one rank does for each shard.
        updated_on_host: whether `master` is in host memory.
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
        """Prepare a tensor (the master copy or its optimizer state) for a checkpoint: a Box if it is sharded."""
        if self.offsets is None or value.shape != self.master.shape:
            return value
        return Box(value, torch.Size(self.shape), self.offsets)


class Unit:
    """Parameters that are updated together.

    Args:
        indices: of the parameters.
        wide: memory for their gradients in the master copies' dtype, concatenated. None if gradients have that dtype
            already, or if the unit is large: memory for its gradients is then freed after the update.
        shapes: of the parameters.
        matrices: the round in which Muon updates them; None: the other optimizer updates them.
    """

    def __init__(
        self,
        indices: Sequence[int],
        wide: torch.Tensor | None,
        shapes: Sequence[torch.Size],
        matrices: MatrixRound | None,
    ) -> None:
        self.indices, self.wide, self.matrices = indices, wide, matrices
        pieces = () if wide is None else torch.split(wide, [shape.numel() for shape in shapes])
        self.places = [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    def cast(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cast this unit's gradients into `wide`; return `wide`."""
        for index, place in zip(self.indices, self.places, strict=True):
            place.copy_(gradients[index])
        assert self.wide is not None
        return self.wide


class Optimizer:
    """One of torch's optimizers over fp32 (fp64) master weights, with global-norm clipping; or Muon and AdamW.

    With bf16 weights, each unit of gradients is cast to fp32 just before its update: fp32 gradients of all parameters
    never exist together. With master weights in host memory, each unit's gradients are copied to the host and its
    weights back to the device. The constructor allocates the optimizer state: a lack of memory shows before step 1.

    Args:
        weights: in the plan's order.
        config: the section [optimizer].
        sum_parts: adds a CPU tensor, in place, over the ranks that hold other parts of the model; None: this rank
            holds the whole model.
        matrices: rounds of the weights that Muon updates; empty unless optimizer.kind is "muon".
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        config: OptimizerConfig,
        sum_parts: Callable[[torch.Tensor], object] | None = None,
        matrices: Sequence[MatrixRound] = (),
    ) -> None:
        self.weights = list(weights)
        self.config = config
        self.sum_parts = sum_parts
        self.masters = [weight.master for weight in self.weights]
        self.narrow = any(weight.master is not weight.tensor for weight in self.weights)
        self.on_host = any(weight.updated_on_host for weight in self.weights)
        self.muon = Muon(self.masters, matrices, config) if matrices else None
        self.units = self._make_units(matrices)
        self.host_copy = HostCopy(self.weights, [unit.indices for unit in self.units]) if self.on_host else None
        others = [self.weights[index] for unit in self.units if unit.matrices is None for index in unit.indices]
        decayed = [weight.master for weight in others if weight.decay]
        plain = [weight.master for weight in others if not weight.decay]
        groups: list[dict[str, object]] = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params or not others  # torch needs at least one group, even if it has nothing to update
        ]
        self.torch = _torch_optimizer(groups, config)
        self._allocate_state()

    def _make_units(self, matrices: Sequence[MatrixRound]) -> list[Unit]:
        """A unit for each round of Muon; the other weights in their order."""
        of_muon = {index for one in matrices for index in one.indices}
        others = [index for index in range(len(self.masters)) if index not in of_muon]
        sizes = [master.numel() for master in self.masters]
        groups: list[tuple[Sequence[int], MatrixRound | None]] = [(one.indices, one) for one in matrices]
        if self.narrow:
            groups = [*((unit, None) for unit in _units(others, sizes, UNIT_NUMEL)), *groups]
        elif others or not matrices:
            groups = [(others, None), *groups]
        numels = [sum(sizes[index] for index in indices) for indices, _ in groups]
        casts = self.narrow and not self.on_host
        most = max((numel for numel in numels if numel <= UNIT_NUMEL), default=0) if casts else 0
        wide = self.masters[0].new_empty(most) if casts else None
        shapes = [master.shape for master in self.masters]
        return [
            Unit(
                indices,
                wide[:numel] if wide is not None and numel <= UNIT_NUMEL else None,
                [shapes[index] for index in indices],
                one,
            )
            for (indices, one), numel in zip(groups, numels, strict=True)
        ]

    def _allocate_state(self) -> None:
        """Make torch create its state by a step with zero gradients and zero learning rate; then set it to zeros.

        Muon has made its own state.
        """
        self._set_learning_rate(0.0)
        for unit in (unit for unit in self.units if unit.matrices is None):
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
        if self.muon is not None:
            self.muon.param_groups[0]["lr"] = rate * self.config.peak_of_muon / self.config.learning_rate

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float, *, updates: bool = True) -> float:
        """Clip by the global norm, update master weights and weights, and return the norm before clipping.

        Args:
            gradients: one per weight, summed over ranks. They are clipped in place if their dtype is that of the
                master weights.
            rate: the learning rate.
            updates: False: compute the norm only. A norm that is not finite prevents the update, too.
        """
        first = self.units[0]
        once = False
        if self.sum_parts is not None:
            norm = self._norm_of_parts(gradients, self.sum_parts)
        elif once := len(self.units) == 1 and first.wide is not None:  # one cast serves the norm and the update
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
        """The gradient norm over all ranks. Each shard is counted by one of the ranks that hold it."""
        counted = [gradient for weight, gradient in zip(self.weights, gradients, strict=True) if weight.counted]
        norm = gradient_norm(counted) if counted else 0.0
        square = torch.tensor(norm * norm, dtype=torch.float64)  # `norm**2` would raise OverflowError
        sum_parts(square)
        total = float(square)
        return math.sqrt(total) if math.isfinite(total) else total

    def _update(self, unit: Unit, gradients: Sequence[torch.Tensor], norm: float) -> None:
        """Clip a unit's gradients, which have the master weights' dtype, and update its master weights."""
        masters = [self.masters[index] for index in unit.indices]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        most = self.config.max_grad_norm
        if gradients and 0 < most < norm:
            # The factor of torch.nn.utils.clip_grads_with_norm_, which copies it to the device and waits for the copy.
            torch._foreach_mul_([*gradients] if unit.wide is None else [unit.wide], most / (norm + 1e-6))
        if unit.matrices is None or self.muon is None:
            self.torch.step()
        else:
            self.muon.update(unit.matrices)
        for master in masters:
            master.grad = None

    def named_state(self) -> Iterator[tuple[Weight, str, torch.Tensor]]:
        """Yield (weight, name, tensor): master weights as "model.NAME", state as "optimizer.STATE.NAME"."""
        of_muon = {} if self.muon is None else self.muon.state_of_masters()
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            yield weight, f"model.{weight.name}", master.detach()
            for state, value in of_muon.get(index, self.torch.state.get(master, {})).items():
                if isinstance(value, torch.Tensor):
                    yield weight, f"optimizer.{state}.{weight.name}", value

    def buffers(self) -> Iterator[torch.Tensor]:
        """Memory that it keeps between steps, beside weights and state: for copies of gradients and weights."""
        yield from (unit.wide for unit in self.units if unit.wide is not None)
        if self.host_copy is not None:
            yield from self.host_copy.buffers()

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """The tensors of a checkpoint, by name (see `named_state`)."""
        return {name: weight.named(value) for weight, name, value in self.named_state()}

    def is_finite(self) -> bool:
        """Whether all tensors that this rank would save in a checkpoint are finite. Reads each tensor once."""
        local = (value.local if isinstance(value, Box) else value for value in self.tensors().values())
        # A finite sum has finite summands only. On a CPU a sum is 18 times faster than a test of each element.
        return all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in local)

    def close(self) -> None:
        """Drop the references to process groups."""
        for unit in self.units:
            if unit.matrices is not None:
                unit.matrices.exchange.close()

    @torch.no_grad()
    def loaded(self) -> None:
        """Copy master weights to weights. Call it after a checkpoint was loaded into `tensors`."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight.tensor:
                weight.tensor.copy_(master)


def _units(indices: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split indices into consecutive lists whose sizes sum to at most `most`; a larger size makes a list alone."""
    unit: list[int] = []
    for index in indices:
        if unit and sum(sizes[other] for other in unit) + sizes[index] > most:
            yield unit
            unit = []
        unit.append(index)
    if unit:
        yield unit


def _torch_optimizer(groups: list[dict[str, object]], config: OptimizerConfig) -> torch.optim.Optimizer:
    rate, betas, fused = config.learning_rate, (config.beta1, config.beta2), config.fused
    match config.kind:
        case "adamw" | "muon":
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
    """The Euclidean norm of all gradients, as one vector; bf16 gradients are summed in fp32."""
    if gradients[0].dtype != torch.bfloat16:
        return float(torch.nn.utils.get_total_norm(gradients))
    if gradients[0].device.type != "cpu":
        return float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm())
    # On a CPU, vector_norm of bf16 with fp32 sums is nine times slower than this cast of cache-sized pieces.
    squares = 0.0
    for gradient in gradients:
        for piece in torch.split(gradient.reshape(-1), NORM_CHUNK):
            wide = piece.float()
            squares += float(wide @ wide)
    return math.sqrt(squares)
