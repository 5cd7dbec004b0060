"""In: activations of one layer. Out: those of the next: attention to all positions, feed-forward, a norm after each.
Does not know tokens, losses or other layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.models.bert.declare import NORM_EPS, BertShape
from codescent.models.transformer.attention import SelfAttention
from codescent.operators.adapter import Adapter, add_, backward_, product
from codescent.operators.dropout import drop
from codescent.operators.linear import Later, Linear, apart, is_kept

# Shapes: B batch, T positions, N = B * T, D hidden_dim, F ffn_dim.
DROPOUT_SITES = 3  # in a block: attention probabilities, what attention adds, what the feed-forward adds


class ExactGeluThenLinear(Linear):
    """gelu(x) W^T + b, GELU by the error function.

    Attributes:
        recompute: make GELU again in the backward pass.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, device: str) -> None:
        super().__init__(inputs, outputs, bias, device)
        self.recompute = False

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            return product(F.gelu(x_BTI), self.weight, bias_O, self.adapter)
        inputs = (x_BTI, self.weight, bias_O, self.recompute, self.later, *self.adapter)
        y_BTO: Tensor = ExactGeluLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return y_BTO


class ExactGeluLinear(torch.autograd.Function):
    """See `ExactGeluThenLinear`. Kept as `gelu_linear_` keeps them: h, and where `is_kept` says yes gelu(h)."""

    @staticmethod
    def forward(
        ctx: Any,
        h_BTF: Tensor,
        weight_DF: Tensor,
        bias_D: Tensor | None,
        recompute: bool,
        later: Later | None,
        *adapter: Any,
    ) -> Tensor:
        """See `ExactGeluThenLinear`."""
        ctx.later, ctx.parameter, ctx.scale = later, weight_DF, adapter[-1]
        value_BTF = F.gelu(h_BTF)
        y_BTD = F.linear(value_BTF, weight_DF, bias_D)
        u_NR = add_(y_BTD.flatten(0, -2), value_BTF.flatten(0, -2), Adapter(*adapter))
        keeps = not recompute and (h_BTF.device.type != "cpu" or is_kept(h_BTF))
        read = ctx.needs_input_grad[1] or u_NR is not None
        ctx.save_for_backward(h_BTF, weight_DF, value_BTF if keeps and read else None, u_NR, *adapter[:-1])
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of h, weight, bias and adapter."""
        h_BTF, weight_DF, kept_BTF, u_NR, a_RF, b_DR = ctx.saved_tensors
        d_y_ND = d_y_BTD.flatten(0, -2)

        @torch.no_grad()  # it may be called later, outside of this pass
        def value_NF() -> Tensor:
            return (F.gelu(h_BTF) if kept_BTF is None else kept_BTF).flatten(0, -2)

        d_weight_DF = None
        if ctx.later is not None:
            ctx.later.append((ctx.parameter, lambda: d_y_ND.t() @ apart(value_NF())))
        elif ctx.needs_input_grad[1]:
            d_weight_DF = d_y_ND.t() @ apart(value_NF())
        d_value_NF = d_y_ND @ apart(weight_DF)
        d_a_RF, d_b_DR = None, None
        if u_NR is not None:
            d_a_RF, d_b_DR = backward_(d_y_ND, value_NF(), u_NR, Adapter(a_RF, b_DR, ctx.scale), d_value_NF)
        d_h_BTF = torch.ops.aten.gelu_backward(d_value_NF.view_as(h_BTF), h_BTF)
        d_bias_D = d_y_ND.sum(0) if ctx.needs_input_grad[2] else None
        return d_h_BTF, d_weight_DF, d_bias_D, None, None, d_a_RF, d_b_DR, None


class FeedForward(nn.Module):
    """Linear, GELU (exact), linear."""

    def __init__(self, shape: BertShape, device: str) -> None:
        super().__init__()
        self.up = Linear(shape.hidden_dim, shape.ffn_dim, shape.bias, device)
        self.down = ExactGeluThenLinear(shape.ffn_dim, shape.hidden_dim, shape.bias, device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream."""
        y_BTD: Tensor = self.down(self.up(x_BTD))
        return y_BTD


class BertBlock(nn.Module):
    """One layer: norm_1(x + attn(x)), then norm_2(x + mlp(x))."""

    def __init__(self, shape: BertShape, device: str) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attn = SelfAttention(shape, False, device)
        self.norm_1 = nn.LayerNorm(shape.hidden_dim, NORM_EPS, device=device)
        self.mlp = FeedForward(shape, device)
        self.norm_2 = nn.LayerNorm(shape.hidden_dim, NORM_EPS, device=device)

    def forward(
        self,
        x_BTD: Tensor,
        padding_BT: Tensor | None = None,
        keys_3B: Tensor | None = None,
        rows_T: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after this layer.

        Args:
            x_BTD: the residual stream.
            padding_BT: bool, True at positions that nobody sees; there may be more of them, at the end.
            keys_3B: dropout keys of this layer's DROPOUT_SITES; None drops nothing.
            rows_T: the positions that x is of; None: all.
        """
        if keys_3B is None:
            x_BTD = self.norm_1(x_BTD + self.attn(x_BTD, padding_BT))
            x_BTD = self.norm_2(x_BTD + self.mlp(x_BTD))
        else:
            y_BTD = drop(self.attn(x_BTD, padding_BT, keys_3B[0]), keys_3B[1], self.dropout, rows_T)
            x_BTD = self.norm_1(x_BTD + y_BTD)
            x_BTD = self.norm_2(x_BTD + drop(self.mlp(x_BTD), keys_3B[2], self.dropout, rows_T))
        return x_BTD
