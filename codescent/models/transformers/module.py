"""In: tokens [B, T]; in training also targets. Out: the summed loss, or logits, of a language model of `transformers`.
Does not contain optimizer or parallelism: strategies shard its parameters and wrap its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.bert.module import rows_with_target
from codescent.models.part import Part, with_gradient
from codescent.models.transformers import library
from codescent.models.transformers.declare import TransformersShape
from codescent.models.transformers.observed import observe
from codescent.models.transformers.structure import hold_once_
from codescent.operators import products
from codescent.operators.head import head_loss
from codescent.operators.scaled_gradient import scaled_gradient
from codescent.operators.tables import Table
from codescent.plan.objective import Objective

# Shapes: B samples, T positions, N = B * T, M positions with a target, D hidden_dim, V vocab_size.
_NO_TARGET = -100


class Buffers(Table):
    """The buffers of a module, which are tables in that nothing but the config decides them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(lambda: torch.empty(0))
        self._buffers_of = module.buffers

    def tensors(self) -> Iterator[Tensor]:
        """See `Table`."""
        yield from self._buffers_of()


class Transformers(Part):
    """A model of `transformers` as a whole. Its blocks are in `blocks`, all else is in `net`.

    It is always in evaluation mode inside, so no layer drops activations by torch's generator. `training` says only
    which objective the loss is. Where the logits are the output of a linear layer, that layer computes nothing, and the
    loss reads its matrix: so there are never all logits.
    """

    shape: TransformersShape

    def __init__(self, shape: TransformersShape, *rest: Any, **options: Any) -> None:
        observe(shape.config, shape.head, shape.num_layers)  # once: it sees initial values, which a part does not write
        super().__init__(shape, *rest, **options)

    def _build(self) -> None:
        shape = self.shape
        seen = observe(shape.config, shape.head, shape.num_layers)
        net = library.build(shape.config, shape.head)
        hold_once_(net)
        parent, _, leaf = seen.layers.rpartition(".")
        owner = net.get_submodule(parent)
        layers = owner._modules.pop(leaf)
        assert isinstance(layers, nn.ModuleList)
        vars(owner)[leaf] = layers  # its forward pass finds the blocks there; their parameters have one name
        library.embedding_of(net).register_forward_hook(lambda _module, _inputs, x_BTD: with_gradient(x_BTD))
        head = library.head_of(net)
        self._head: tuple[nn.Linear, ...] = ()  # no submodule: `net` holds it
        if seen.direct and isinstance(head, nn.Linear):
            self._head, head.forward = (head,), _as_it_is  # type: ignore[method-assign,assignment]
        self.net = net
        self.tables = (Buffers(self),)
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(layers)})

    def train(self, mode: bool = True) -> Self:
        """Set `training` of this module alone: all others stay in evaluation mode."""
        super().train(False)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of every module; but buffers keep their values and formats, as in transformers, and move as they are.

        They are made from config.json, such as rotary frequencies in fp32. Memory for parameters has no values yet.
        """
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in list(self.named_buffers()):
            if before[name].device.type != "meta" and moved.device.type != "meta":
                owner, _, leaf = name.rpartition(".")
                self.get_submodule(owner)._buffers[leaf] = before[name].to(moved.device)
        return self

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        loss_scale: float = 1.0,
        segments_BT: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        """See `Part`. The loss is summed over the positions with a target, which is not negative.

        Args:
            inputs: tokens int64 [B, T].
            targets: int64 [B, T].
            loss_scale: factor on the gradients.
            segments_BT: all 0 in the tasks of this kind, as transformers assumes without them.
            lengths_B: tokens of each sample before the padding, which is at the end, where no earlier position sees it.

        Returns:
            A scalar, or logits [B, T, V].
        """
        self._place_buffers(inputs.device)
        found: Tensor = library.logits_of(self.net, inputs)
        head = self._head[0] if self._head else None
        if targets is None:
            return found if head is None else _product(found, head.weight, head.bias)
        rows_M, targets_M, too_many = self._rows(targets)
        x_MC = found.flatten(0, 1) if rows_M is None else found.flatten(0, 1).index_select(0, rows_M)
        skips = lengths_B is not None or too_many is not None
        if head is None:
            loss = loss_of_logits(x_MC, targets_M, loss_scale, self.current_objective)
        else:
            loss = head_loss(
                x_MC,
                head.weight,
                targets_M,
                self.head_chunk_tokens,
                loss_scale,
                bias_V=head.bias,
                skip_negative=skips,
                objective=self.current_objective,
            )
        return loss if too_many is None else loss.masked_fill(too_many, math.nan)

    def _rows(self, targets_BT: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The rows with a target, as `rows_with_target`; None: all, where every position may have one."""
        if self.shape.head == "mlm":
            return rows_with_target(targets_BT, self.losses_per_sample)
        return None, targets_BT.flatten(), None

    def _place_buffers(self, device: torch.device) -> None:
        """Move buffers to the device that computes, if the parameters are gathered from another one."""
        for name, buffer in list(self.named_buffers()):
            if buffer.device != device:
                owner, _, leaf = name.rpartition(".")
                self.get_submodule(owner)._buffers[leaf] = buffer.to(device)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _product(x_BTD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    logits_BTV = products.linear(x_BTD, weight_VD)
    return logits_BTV if bias_V is None else logits_BTV + bias_V


def loss_of_logits(logits_NV: Tensor, targets_N: Tensor, loss_scale: float, objective: Objective) -> Tensor:
    """The summed loss of logits that are no plain product, such as capped ones; gradients by autograd.

    `loss_scale` multiplies the gradients, not the value. A negative target has no loss.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    skipped_N = targets_N < 0
    loss = F.cross_entropy(
        wide_NV,
        targets_N.masked_fill(skipped_N, _NO_TARGET),
        reduction="sum",
        ignore_index=_NO_TARGET,
        label_smoothing=objective.label_smoothing,
    )
    if objective.z_loss:
        squares_N = torch.logsumexp(wide_NV, -1).square()
        loss = loss + objective.z_loss * squares_N.masked_fill(skipped_N, 0.0).sum()
    return scaled_gradient(loss, loss_scale)
