"""In: gradients of matrices, by rounds. Out: the matrices updated by Muon, and the momentum.
Does not choose the matrices and rounds (strategies/muon.py does), clip gradients or schedule the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.operators.products import widened
from codescent.plan import Parameter, TensorPlan
from codescent.strategies import ThisRank
from codescent.strategies.muon import rounds, wire_dtype
from codescent.strategies.whole_matrices import WholeMatrices

if TYPE_CHECKING:
    from codescent.config.sections import Optimizer as OptimizerConfig


@dataclass(frozen=True)
class MatrixRound:
    """A round of the plan, on this rank.

    Attributes:
        indices: of the round's tensors among the weights of this rank.
        tensors: their plans.
        first_rows: index, in the whole tensor, of the first row of this rank's shard. All dims but the last count rows.
        exchange: makes each tensor whole on one rank.
        device: where tensors are orthogonalised.
        dtype: the dtype of the products.
    """

    indices: tuple[int, ...]
    tensors: tuple[TensorPlan, ...]
    first_rows: tuple[int, ...]
    exchange: WholeMatrices
    device: torch.device
    dtype: torch.dtype


def matrix_rounds(this_rank: ThisRank, device: torch.device) -> list[MatrixRound]:
    """The rounds of this rank's pipeline stage; none if the run does not use Muon."""
    plan, found = this_rank.plan, []
    index = {tensor.parameter.name: number for number, tensor in enumerate(this_rank.trained)}
    for one in rounds(plan, this_rank.coordinates["pp"]):
        boxes = [tensor.optimizer.box(tensor.parameter.shape, plan.mesh, this_rank.rank) for tensor in one.tensors]
        inner = [math.prod(tensor.parameter.shape[1:-1]) for tensor in one.tensors]
        found.append(
            MatrixRound(
                indices=tuple(index[tensor.parameter.name] for tensor in one.tensors),
                tensors=one.tensors,
                first_rows=tuple(box[0][0] * rows for box, rows in zip(boxes, inner, strict=True)),
                exchange=WholeMatrices(one, this_rank),
                device=device,
                dtype=TORCH_DTYPE[wire_dtype(plan)],
            )
        )
    return found


class Muon(torch.optim.Muon):
    """torch.optim.Muon for shards of matrices, for several matrices in one tensor, and in a dtype of choice.

    The update of a matrix W is that of torch.optim.Muon. With gradient G, momentum B and m, learning rate r, weight
    decay d and `scale` c: B = m B + (1 - m) G; U = m B + (1 - m) G with nesterov, else B;
    W = (1 - r d) W - r c orthogonal(U). Matrices that share a tensor (queries, keys and values; gate and up) are
    orthogonalised one by one.

    Args:
        masters: the weights of this rank.
        matrix_rounds: which of them are updated together; at least one round.
        config: the section [optimizer].
    """

    def __init__(
        self, masters: Sequence[torch.Tensor], matrix_rounds: Sequence[MatrixRound], config: OptimizerConfig
    ) -> None:
        self.masters, self.config = masters, config
        # torch.optim.Muon takes tensors of two dims; gate and up together have three.
        self.rows = {index: masters[index].detach().flatten(0, -2) for one in matrix_rounds for index in one.indices}
        super().__init__(
            list(self.rows.values()),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr_fn,
        )
        for rows in self.rows.values():
            self.state[rows]["momentum_buffer"] = torch.zeros_like(rows)
        self.factors = {
            index: _factor(tensor.parameter, first, self.rows[index], config.muon_adjust_lr_fn)
            for one in matrix_rounds
            for index, tensor, first in zip(one.indices, one.tensors, one.first_rows, strict=True)
        }

    def state_of_masters(self) -> dict[int, dict[str, torch.Tensor]]:
        """By index of the weight: its state by name, in the weight's shape. The memory is that of the state."""
        return {
            index: {name: value.view(self.masters[index].shape) for name, value in self.state[rows].items()}
            for index, rows in self.rows.items()
        }

    @torch.no_grad()
    def update(self, one: MatrixRound) -> None:
        """Update the matrices of a round from their `.grad`. Collective over the ranks of the pipeline stage."""
        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        shards = []
        for index in one.indices:
            gradient = self.masters[index].grad
            assert gradient is not None
            gradient, buffer = gradient.flatten(0, -2), self.state[self.rows[index]]["momentum_buffer"]
            buffer.lerp_(gradient, 1 - momentum)
            wanted = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            shards.append(wanted.to(one.device, one.dtype).view(self.masters[index].shape))
        for index, found in zip(one.indices, one.exchange.apply(shards, self._orthogonal), strict=True):
            rows, factor = self.rows[index], self.factors[index]
            rows.mul_(1 - rate * group["weight_decay"])
            update = found.flatten(0, -2).to(rows.device)
            if isinstance(factor, float):
                rows.add_(update, alpha=-rate * factor)
            else:
                rows.addcmul_(update.to(rows.dtype), factor, value=-rate)

    def _orthogonal(self, tensor: TensorPlan, whole: torch.Tensor) -> torch.Tensor:
        """Each matrix of a whole tensor, orthogonalised."""
        group, alternating = self.param_groups[0], tensor.parameter.alternating
        found = torch.empty_like(whole)
        period = sum(alternating) or tensor.parameter.matrices[0][0]
        taken, made = (one.view(-1, period, one.shape[-1]) for one in (whole, found))
        parts = list(alternating) or [period]
        for matrix, place in zip(torch.split(taken, parts, 1), torch.split(made, parts, 1), strict=True):
            new = orthogonal(matrix.flatten(0, 1), group["ns_coefficients"], group["ns_steps"], group["eps"])
            place.copy_(new.view(place.shape))
        return found


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Nearly U V^T of a matrix U S V^T, by the Newton-Schulz iteration of torch.optim.Muon (Jordan et al. 2024).

    A step maps each singular value s to a s + b s^3 + c s^5. With the coefficients of torch.optim.Muon all but tiny
    ones end between 0.7 and 1.2. The products are computed in the dtype of `matrix`, or in fp32 on a processor without
    bf16 instructions.
    """
    a, b, c = coefficients
    wide = widened(matrix)
    x = wide.T if matrix.shape[0] > matrix.shape[1] else wide
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def scale(rows: int, columns: int, rule: str) -> float:
    """The factor of the learning rate for a matrix.

    original: sqrt(max(1, rows / columns)) (Jordan et al. 2024). match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that
    updates are as large as those of AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).
    """
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))


def _factor(parameter: Parameter, first: int, rows: torch.Tensor, rule: str) -> float | torch.Tensor:
    """The factor of a tensor, or one factor for each row of a shard [rows, 1], if its matrices have several."""
    scales = [scale(*matrix, rule) for matrix in parameter.matrices]
    if len(set(scales)) == 1:
        return scales[0]
    period = torch.tensor(scales, dtype=rows.dtype).repeat_interleave(torch.tensor(parameter.alternating))
    at = torch.arange(first, first + len(rows)) % len(period)
    return period[at][:, None].to(rows.device)
