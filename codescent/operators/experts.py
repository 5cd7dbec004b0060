"""In: activations, the matrices of experts. Out: for each token the weighted outputs of the experts that a router has
chosen, with gradients.
Does not choose (routing.py does). Does not send rows to the ranks of their experts: a strategy sets `exchange`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.base.device import wide_dtype
from codescent.operators import grouped, products
from codescent.operators.activations import Activation
from codescent.operators.routing import (
    RouterTraits,
    Routing,
    Slots,
    attached,
    choices_of_samples,
    choose,
    combined,
    dispatched,
    every_slot,
    few_slots,
    losses,
    with_loads,
)
from codescent.plan.objective import CROSS_ENTROPY

# Shapes: B samples, T positions, N = B * T tokens, D hidden_dim, E experts (of this rank, in its matrices), K experts
# of a token, R rows of all experts, F channels inside of an expert; 2: the gate, and the values that it multiplies.

Exchange = Callable[[Tensor, Tensor], tuple[Tensor, list[int], Callable[[Tensor], Tensor]]]
"""Rows of all experts, how many rows each has -> rows of this rank's experts, how many each of these has, and the
function that brings their outputs back, in the order of the first rows."""


class Router(nn.Module):
    """Scores of the experts: x W^T, and what it has chosen since `taken` was called last.

    Attributes:
        traits: how it chooses.
        objective: coefficients of its auxiliary losses.
        loss_scale: factor on their gradients, that of the run's loss.
        losses_per_sample: of the run's loss, on this rank, if it counts samples or answers and not their tokens; None:
            it counts tokens. Then losses of routers are means over tokens all the same.
        share: this rank's share of their gradients, if several ranks compute the same tokens.
    """

    SUMS = 4

    def __init__(self, inputs: int, traits: RouterTraits, bias: bool = False) -> None:
        super().__init__()
        self.traits = traits
        self.weight = nn.Parameter(torch.empty(traits.experts, inputs))
        self.bias = nn.Parameter(torch.empty(traits.experts)) if bias else None
        self.objective, self.loss_scale, self.share = CROSS_ENTROPY, 1.0, 1.0
        self.losses_per_sample: float | None = None
        self._seen: Tensor | None = None

    def forward(self, x_ND: Tensor, samples: int) -> Routing:
        """The choice for each token. In training its weights have the gradients of the auxiliary losses, too."""
        logits_NE = products.linear(x_ND, self.weight)
        choice = choose(logits_NE, self.traits, self.bias)
        if not (self.training and torch.is_grad_enabled()):
            return choice
        found = losses(logits_NE, choice, samples)
        sums = torch.stack([found.balance.detach(), found.z.detach()])
        auxiliary = self.objective.balance_loss * found.balance + self.objective.router_z_loss * found.z

        def note() -> None:
            self._note(choices_of_samples(choice.experts_NK, samples, self.traits.experts), sums, len(x_ND))

        of_tokens = 1.0 if self.losses_per_sample is None else self.losses_per_sample * samples / len(x_ND)
        weights_NK = attached(choice.weights_NK, auxiliary, self.loss_scale * self.share * of_tokens, note)
        if self.bias is not None:
            weights_NK = with_loads(weights_NK, self.bias, choice.experts_NK)
        return choice._replace(weights_NK=weights_NK)

    def _note(self, counts_BE: Tensor, sums: Tensor, tokens: int) -> None:
        slots = self.traits.slots(tokens // len(counts_BE)) or tokens
        dropped = (counts_BE - slots).clamp(min=0).sum()
        parts = counts_BE.sum(0), counts_BE.new_tensor([tokens]), sums, dropped[None]
        found = torch.cat([part.to(wide_dtype(sums.device)) for part in parts])
        self._seen = found if self._seen is None else self._seen.add_(found)

    def taken(self) -> Tensor:
        """Choices of each expert; then the number of tokens, the sums of the balance loss and of the z-loss over them,
        and how many choices were dropped: [E + 4]. Begins anew."""
        found, self._seen = self._seen, None
        if found is not None:
            return found
        device = self.weight.device
        return torch.zeros(self.traits.experts + self.SUMS, dtype=wide_dtype(device), device=device)


class ExpertMatrices(nn.Module):
    """The matrices of all experts as one weight [F, E, ...].

    dp_shard and tp divide channels, the first dim, and ep experts, the second one.

    Attributes:
        before: of the first matrices: function applied to what the layer reads; None: no function.
        after: of the second matrices: function applied to what the layer returns; None: no function.
        first_output: index of the first channel of this rank.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.before: Callable[[Tensor], Tensor] | None = None
        self.after: Callable[[Tensor], Tensor] | None = None
        self.first_output = 0


class FeedForwards(nn.Module):
    """The feed-forwards of all experts: down(activation(gate(x)) * up(x)) of each one.

    Attributes:
        exchange: see `Exchange`; None: this rank has all experts.
        recompute: whether backward computes activations again.
    """

    def __init__(self, width: int, inner: int, experts: int, activation: Activation) -> None:
        super().__init__()
        self.gate_up = ExpertMatrices(inner, experts, 2, width)
        self.down = ExpertMatrices(inner, experts, width)
        self.activation = activation
        self.exchange: Exchange | None = None
        self.recompute = False

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """The output of each row's expert: [R, D]. `counts_E`: how many rows each expert has."""
        matrices, options = (self.gate_up.weight, self.down.weight), (self.activation, self.recompute)
        if self.exchange is None:
            return feed_forwards(rows_RD, *matrices, counts_E.tolist(), *options)
        mine_RD, counts, back = self.exchange(rows_RD, counts_E)
        return back(feed_forwards(mine_RD, *matrices, counts, *options))


class Experts(nn.Module):
    """A feed-forward of experts, with a router (Shazeer et al. 2017, "Outrageously Large Neural Networks").

    `bias`: whether the router has one. `shared`: a feed-forward that computes every token; None: there is none.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        traits: RouterTraits,
        activation: Activation,
        bias: bool = False,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if shared is not None:
            self.shared = shared
        self.router = Router(width, traits, bias)
        self.experts = FeedForwards(width, inner, traits.experts, activation)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D]."""
        shared = getattr(self, "shared", None)
        shared_BTD = None if shared is None else shared(x_BTD)
        before, after = self.experts.gate_up.before, self.experts.down.after
        x_BTD = x_BTD if before is None else before(x_BTD)
        samples, positions, _ = x_BTD.shape
        x_ND = x_BTD.flatten(0, 1)
        choice = self.router(x_ND, samples)
        slots = self._slots(choice, samples, positions)
        rows_RD = self.experts(dispatched(x_ND, slots), slots.counts_E)
        y_BTD = combined(rows_RD, choice.weights_NK, slots).view_as(x_BTD)
        y_BTD = y_BTD if after is None else after(y_BTD)
        return y_BTD if shared_BTD is None else y_BTD + shared_BTD

    def _slots(self, choice: Routing, samples: int, positions: int) -> Slots:
        traits = self.router.traits
        if number := traits.slots(positions):
            return few_slots(choice.experts_NK, traits.experts, samples, number)
        return every_slot(choice.experts_NK, traits.experts)


def feed_forwards(
    x_RD: Tensor,
    gate_up_FE2D: Tensor,
    down_FED: Tensor,
    counts: Sequence[int],
    activation: Activation,
    recompute: bool = False,
) -> Tensor:
    """down(activation(gate(x)) * up(x)) of each expert, of its rows: [R, D].

    `counts`: rows of each expert, one expert behind the other. With `recompute` forward saves no activation.
    """
    y_RD: Tensor = _FeedForwards.apply(x_RD, gate_up_FE2D, down_FED, counts, activation, recompute)  # type: ignore[no-untyped-call]
    return y_RD


class _FeedForwards(torch.autograd.Function):
    """See `feed_forwards`. Forward saves the value and the slopes of the activations, or what they are made of."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_up_FE2D: Tensor,
        down_FED: Tensor,
        counts: Sequence[int],
        activation: Activation,
        recompute: bool,
    ) -> Tensor:
        h_2RF = x_RD.new_empty(2, len(x_RD), len(down_FED))
        for half, h_RF in enumerate(h_2RF):
            grouped.times(x_RD, gate_up_FE2D[:, :, half].permute(1, 2, 0), counts, h_RF)
        ctx.counts, ctx.activation = counts, activation
        ctx.keeps = any(ctx.needs_input_grad) and not recompute and activation.keeps(h_2RF)
        value_RF = activation.value(h_2RF, h_2RF if ctx.keeps else None)
        y_RD = grouped.times(value_RF, down_FED.transpose(0, 1), counts, torch.empty_like(x_RD))
        needs_value = ctx.keeps and ctx.needs_input_grad[2]
        # An alias: autograd assumes that what is saved is unchanged, but h may hold the slopes.
        ctx.save_for_backward(x_RD, gate_up_FE2D, down_FED, h_2RF.detach(), value_RF if needs_value else None)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, gate_up_FE2D, down_FED, slopes_2RF, saved_RF = ctx.saved_tensors
        value_RF: Any = saved_RF
        if not ctx.keeps:
            h_2RF, slopes_2RF = slopes_2RF, torch.empty_like(slopes_2RF)
            value_RF = ctx.activation.value(h_2RF, slopes_2RF)
        _, wants_gate_up, wants_down, *_ = ctx.needs_input_grad
        d_y_RD, counts = d_y_RD.contiguous(), ctx.counts
        d_value_RF = x_RD.new_empty(len(x_RD), len(down_FED))
        grouped.times(d_y_RD, down_FED.permute(1, 2, 0), counts, d_value_RF)
        d_down_FED = torch.empty_like(down_FED) if wants_down else None
        if d_down_FED is not None:
            grouped.transposed_times(value_RF, d_y_RD, counts, d_down_FED.transpose(0, 1))
        d_h_2RF = ctx.activation.gradient(slopes_2RF, d_value_RF)
        gates_EFD, ups_EFD = (gate_up_FE2D[:, :, half].transpose(0, 1) for half in range(2))
        d_x_RD = grouped.times(d_h_2RF[0], gates_EFD, counts, torch.empty_like(x_RD))
        grouped.add_times_(d_x_RD, d_h_2RF[1], ups_EFD, counts)
        d_gate_up_FE2D = torch.empty_like(gate_up_FE2D) if wants_gate_up else None
        if d_gate_up_FE2D is not None:
            for half in range(2):
                grouped.transposed_times(d_h_2RF[half], x_RD, counts, d_gate_up_FE2D[:, :, half].transpose(0, 1))
        return d_x_RD, d_gate_up_FE2D, d_down_FED, None, None, None
