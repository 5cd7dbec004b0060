"""In: weights, gradients, a learning rate. Out: weights updated by a torch optimizer, gradient norm, optimizer state.
Does not sum gradients over ranks (strategies do). Clips by the global norm; skips a step that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from codescent.base.device import offered, wide_dtype
from codescent.checkpoint.box import Box
from codescent.config.update_rules import own_rule
from codescent.train import rule_trial
from codescent.train.ema import Ema
from codescent.train.host_copy import HostCopy
from codescent.train.muon import MatrixRound, Muon
from codescent.train.norm import gradient_square
from codescent.train.plain_steps import making, step_of

if TYPE_CHECKING:
    from codescent.config.sections import Optimizer as OptimizerConfig


UNIT_NUMEL = 4 * 2**20
"""On a CPU, parameters are updated in units of at most about this many elements. That is enough work for every core.
The fp32 copies of a unit's bf16 gradients fit in cache."""

DEVICE_UNIT_NUMEL = 256 * 2**20
"""The same off the CPU, where each unit costs the host a dozen launches. fp32 copies of a unit take at most 1 GiB."""

ON_DEVICE = ("adamw", "adam", "sgd")
"""Kinds whose fused kernels read from device tensors by how much to clip, and whether to skip the step."""


FACTOR = "rate_factor"
"""Key of a group of weights whose learning rate is multiplied (`Weight.rate_factor`)."""


Accepts = Callable[[torch.Tensor], bool]
"""Whether a step with these sums over all ranks, finite, is taken (`Coupling.agree`). Every rank decides alike."""

EPS = 1e-6
"""Added to the norm by torch.nn.utils.clip_grads_with_norm_, when it clips."""


def _alone(square: torch.Tensor) -> torch.Tensor:
    """A rank that holds the whole model needs no sum."""
    return square[None]


@dataclass(frozen=True)
class Weight:
    """A trainable tensor on this rank.

    Attributes:
        name: of the parameter.
        tensor: the weights that forward reads.
        master: the weights that the optimizer updates: the same tensor as `tensor`, unless weights are bf16 or are
            updated in host memory.
        decay: whether weight decay applies.
        rate_factor: its learning rate is multiplied by it, and its weight decay divided.
        shape: of the whole parameter, if it is sharded.
        offsets: index of this shard's first element in each dim of the whole; None: not sharded.
        sign_rate: see `TensorPlan`; None: the optimizer updates it.
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
    rate_factor: float = 1.0
    sign_rate: float | None = None

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
        assert self.wide is not None
        copy(self.places, [gradients[index] for index in self.indices])
        return self.wide


class Optimizer:
    """One of torch's optimizers over fp32 (fp64) master weights, with global-norm clipping; or Muon and AdamW.

    With bf16 weights, each unit of gradients is cast to fp32 just before its update: fp32 gradients of all parameters
    never exist together. With master weights in host memory, each unit's gradients are copied to the host and its
    weights back to the device. The constructor allocates the optimizer state: a lack of memory shows before step 1.

    Args:
        weights: in the plan's order.
        config: the section [optimizer].
        matrices: rounds of the weights that Muon updates; empty unless optimizer.kind is "muon".
        device: of this rank, for the sums of a rank that trains nothing.
        ema: the moving average of the weights, which is saved as state; None: there is none.
        accepts: is asked of the sums of each finite step, on the host. False: the weights stay as they are.

    Attributes:
        not_finite: indices of the gradients that were not finite, summed over ranks, when the host has last skipped a
            step.
        decides_on_device: whether the host never waits for the norm: fused kernels clip and skip by themselves. Other
            kinds wait once in a step.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        config: OptimizerConfig,
        matrices: Sequence[MatrixRound] = (),
        device: torch.device | None = None,
        ema: Ema | None = None,
        accepts: Accepts | None = None,
    ) -> None:
        self.ema, self.accepts = ema, accepts
        self.not_finite: list[int] = []
        self.is_updating = False
        self.weights = list(weights)
        self.device = device
        self.config = config
        self.masters = [weight.master for weight in self.weights]
        self.off_cpu = any(master.device.type != "cpu" for master in self.masters)
        limits = all(offered(master.device).limits for master in self.masters)
        self.decides_on_device = self.off_cpu and limits and config.fused and config.kind in ON_DEVICE and not accepts
        self.narrow = any(weight.master is not weight.tensor for weight in self.weights)
        self.on_host = any(weight.updated_on_host for weight in self.weights)
        with making():
            self.muon = Muon(self.masters, matrices, config) if matrices else None
        if self.muon is not None:  # its matrices have the same factor
            _set_factor(self.muon.param_groups[0], self.weights[matrices[0].indices[0]].rate_factor)
        self.units = self._make_units(matrices)
        self.host_copy = HostCopy(self.weights, [unit.indices for unit in self.units]) if self.on_host else None
        others = [self.weights[index] for unit in self.units if unit.matrices is None for index in unit.indices]
        with making():
            self.torch = _torch_optimizer(_groups(others, config.weight_decay), config)
        self._step = step_of(self.torch)
        self._allocate_state()

    def _make_units(self, matrices: Sequence[MatrixRound]) -> list[Unit]:
        """A unit for each round of Muon; the other weights in their order."""
        of_muon = {index for one in matrices for index in one.indices}
        others = [index for index in range(len(self.masters)) if index not in of_muon]
        sizes = [master.numel() for master in self.masters]
        limit = DEVICE_UNIT_NUMEL if self.off_cpu else UNIT_NUMEL
        groups: list[tuple[Sequence[int], MatrixRound | None]] = [(one.indices, one) for one in matrices]
        if self.narrow:
            groups = [*((unit, None) for unit in _units(others, sizes, limit)), *groups]
        elif others or not matrices:
            groups = [(others, None), *groups]
        numels = [sum(sizes[index] for index in indices) for indices, _ in groups]
        casts = self.narrow and not self.on_host
        most = max((numel for numel in numels if numel <= limit), default=0) if casts else 0
        wide = self.masters[0].new_empty(most) if casts else None
        shapes = [master.shape for master in self.masters]
        return [
            Unit(
                indices,
                wide[:numel] if wide is not None and numel <= limit else None,
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
            places = unit.places or [torch.empty_like(self.masters[index]) for index in unit.indices]
            for index, place in zip(unit.indices, places, strict=True):
                self.masters[index].grad = place.zero_()
            self._step()
            for index in unit.indices:
                self.masters[index].grad = None
        for state in self.torch.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.torch.param_groups:
            group["lr"] = rate * group.get(FACTOR, 1.0)
        if self.muon is not None:
            group = self.muon.param_groups[0]
            group["lr"] = rate * self.config.peak_of_muon / self.config.learning_rate * group[FACTOR]

    @torch.no_grad()
    def step(
        self, gradients: Sequence[torch.Tensor], rate: float, agree: Callable[[torch.Tensor], torch.Tensor] = _alone
    ) -> torch.Tensor:
        """Clip by the global norm, and update master weights and weights. Returns what `agree` returns.

        Args:
            gradients: one per weight, summed over ranks. They are clipped in place if their dtype is that of the
                master weights.
            rate: the learning rate.
            agree: takes the square of the norm of the gradients that this rank counts, [], fp64. Returns sums over all
                ranks, the last of which is that of the squares. A sum that is not finite prevents the update.
        """
        square, is_cast = self._square(gradients)
        sums = agree(square)
        if not self.weights and self.accepts is None:  # nothing to clip or to skip: the host need not read the sums
            return sums
        factor = self._limits(sums) if self.decides_on_device else _factor(sums, self.config.max_grad_norm)
        if factor is None:
            self.not_finite = [index for index, one in enumerate(gradients) if not bool(one.isfinite().all())]
        elif (self.accepts is None or self.accepts(sums)) and self.weights:
            self._set_learning_rate(rate)
            self.is_updating = True  # after an error in between, the weights are those of no step
            self._update_all(gradients, factor, is_cast=is_cast)
            self.is_updating = False
        return sums

    def _square(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """The squared norm of the gradients that this rank counts; whether all of them were cast into `wide` for it."""
        first = self.units[0]
        counted = [gradient for weight, gradient in zip(self.weights, gradients, strict=True) if weight.counted]
        if not counted:
            device = gradients[0].device if gradients else self.device
            return torch.zeros((), dtype=wide_dtype(device or torch.device("cpu")), device=device), False
        if len(self.units) == 1 and first.wide is not None and len(counted) == len(gradients) and not self.off_cpu:
            return gradient_square([first.cast(gradients)]), True  # one cast serves the norm and the update
        return gradient_square(counted), False

    def _limits(self, sums: torch.Tensor) -> torch.Tensor | float:
        """Give the fused kernels their limits, as torch.amp.GradScaler does. Returns the factor that is left to apply.

        `found_inf` = 1: weights and state stay, bit by bit. Gradients are divided by `grad_scale`, which is fp32, so
        gradients in fp64 are multiplied by a factor.
        """
        most = self.config.max_grad_norm
        # 0 times what is not finite is NaN, which equals nothing. `isfinite` would launch five operators more.
        self.torch.found_inf = (sums.sum() * 0.0).ne(0.0).float()  # type: ignore[attr-defined]
        if not most:
            return 1.0
        scale = ((sums[-1].sqrt() + EPS) / most).clamp(min=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        if self.masters[0].dtype == torch.float64:
            return scale.reciprocal()
        self.torch.grad_scale = scale.float()  # type: ignore[attr-defined]
        return 1.0

    def _update_all(self, gradients: Sequence[torch.Tensor], factor: torch.Tensor | float, *, is_cast: bool) -> None:
        """Update master weights and weights. `is_cast`: the gradients of the only unit are in `wide` already."""
        if self.host_copy is not None:
            for unit, fetched in zip(self.units, self.host_copy.fetch(gradients), strict=True):
                self._update(unit, fetched, factor)
                self.host_copy.send(unit.indices)
            self.host_copy.finish()
            return
        for unit in self.units:
            if unit.wide is not None and not is_cast:
                unit.cast(gradients)
            places = unit.places or [gradients[index].to(self.masters[index].dtype) for index in unit.indices]
            self._update(unit, places, factor)
            apart = [index for index in unit.indices if self.masters[index] is not self.weights[index].tensor]
            copy([self.weights[index].tensor for index in apart], [self.masters[index] for index in apart])

    def _update(self, unit: Unit, gradients: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
        """Scale a unit's gradients, which have the master weights' dtype, and update its master weights."""
        masters = [self.masters[index] for index in unit.indices]
        signs = self._take_signs(unit, gradients)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        if gradients and (isinstance(factor, torch.Tensor) or factor != 1.0):
            torch._foreach_mul_([*gradients] if unit.wide is None else [unit.wide], factor)
        if unit.matrices is None or self.muon is None:
            self._step()
        else:
            self.muon.update(unit.matrices)
        for master in masters:
            master.grad = None
        for master, change in signs:
            master.sub_(change)

    def _take_signs(self, unit: Unit, gradients: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is subtracted from the weights that have a `sign_rate`. Their gradients become 0, so that the optimizer
        leaves them alone. A step that the device skips changes none."""
        found = []
        for index, gradient in zip(unit.indices, gradients, strict=True):
            rate = self.weights[index].sign_rate
            if rate is not None:
                change = gradient.sign().mul_(rate)
                if self.decides_on_device:
                    change.mul_(1.0 - self.torch.found_inf)  # type: ignore[attr-defined]
                found.append((self.masters[index], change.nan_to_num_(0.0)))
                gradient.zero_()
        return found

    def named_state(self) -> Iterator[tuple[Weight, str, torch.Tensor]]:
        """Yield (weight, name, tensor): master weights as "model.NAME", state as "optimizer.STATE.NAME"; averages."""
        of_muon = {} if self.muon is None else self.muon.state_of_masters()
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            yield weight, f"model.{weight.name}", master.detach()
            for state, value in of_muon.get(index, self.torch.state.get(master, {})).items():
                if isinstance(value, torch.Tensor):
                    yield weight, f"optimizer.{state}.{weight.name}", value
        if self.ema is not None:
            yield from self.ema.named()

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


def _groups(weights: Sequence[Weight], weight_decay: float) -> list[dict[str, Any]]:
    """The groups of torch's optimizer: weights with equal decay and equal factor of the learning rate."""
    found: dict[tuple[bool, float], list[torch.Tensor]] = {}
    for weight in sorted(weights, key=lambda one: not one.decay):
        found.setdefault((weight.decay, weight.rate_factor), []).append(weight.master)
    groups: list[dict[str, Any]] = []
    for (decay, factor), params in found.items():
        groups.append({"params": params, "weight_decay": weight_decay if decay else 0.0})
        if factor != 1.0:
            _set_factor(groups[-1], factor)
    return groups or [{"params": [], "weight_decay": weight_decay}]  # torch needs a group


def _set_factor(group: dict[str, Any], factor: float) -> None:
    """Multiply the learning rate of a group. A step shrinks its weights as much as those of others: the decay, by which
    torch multiplies the rate, is divided."""
    group[FACTOR] = factor
    group["weight_decay"] /= factor


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


def _torch_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
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
    rule = own_rule(config)
    assert rule is not None  # the section has no other values
    return rule_trial.make(rule, groups, config)


def _factor(sums: torch.Tensor, most: float) -> float | None:
    """The factor that clips the gradients to a norm of `most`; None: a sum is not finite. Waits for the device."""
    *others, square = sums.tolist()
    norm = math.sqrt(square)
    if not all(map(math.isfinite, (*others, norm))):
        return None
    # The factor of torch.nn.utils.clip_grads_with_norm_, which copies it to the device and waits for the copy.
    return most / (norm + EPS) if 0 < most < norm else 1.0


def copy(to: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor, with few launches off the CPU. On a CPU each copy is a call, as fast as many in one."""
    if to and to[0].device.type != "cpu":
        torch._foreach_copy_(list(to), list(tensors))
        return
    for place, tensor in zip(to, tensors, strict=True):
        place.copy_(tensor)
