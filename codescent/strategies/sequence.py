"""In: activations, a tensor-parallel group. Out: activations, all-gathered, reduce-scattered or all-reduced.
The backward pass of each function communicates what the gradients need.
Does not compute any part of a layer: these functions are the communication of tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.strategies.collectives import all_gather_into, all_reduce, reduce_scatter_into

# Shapes: B samples, T positions, t = T / degree positions of this rank, D hidden_dim, n ranks of the group (degree).
#
# Two pairs of conjugate operators (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2): the
# forward of one is the backward of the other. `enter` and `leave` (f and f-bar; Shoeybi et al. 2019, "Megatron-LM",
# section 3) surround split matrices whose input and output are whole on every rank. With `gather_sequence` and
# `scatter_sum` (g and g-bar) activations outside the split matrices are split along the sequence. They send as many
# bytes.
#
# Each operator is ONE collective in the tensor's own dtype, of S = B * T * D * itemsize bytes (Traffic.payload_bytes):
#
#                      forward         backward
#     gather_sequence  ALL_GATHER      REDUCE_SCATTER
#     scatter_sum      REDUCE_SCATTER  ALL_GATHER
#     enter            -               ALL_REDUCE
#     leave            ALL_REDUCE      -
#     gather_alike     ALL_GATHER      -
#
# A group of one rank sends and copies nothing. If the input needs no gradient, backward does not run. So the input must
# need a gradient either on all ranks of the group, or on none.


def gather_sequence(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BTD: the positions of all ranks, in the order of the ranks. Backward sums the gradients and scatters them."""
    return _Conjugates.of(x_BtD, group, _gathered, _summed_part)


def gather_alike(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BTD: the positions of all ranks. Only if all ranks then compute the same: backward does not sum gradients."""
    return _Conjugates.of(x_BtD, group, _gathered, _own_part)


def scatter_sum(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BtD: this rank's positions of the sum of all ranks' x_BTD (T a multiple of the degree). Backward gathers."""
    return _Conjugates.of(x_BTD, group, _summed_part, _gathered)


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which is the same on every rank. Backward sums the gradients of all ranks."""
    return _Conjugates.of(x, group, _same, summed)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x. Backward passes the gradient on to each x unchanged."""
    return _Conjugates.of(x, group, summed, _gradient_as_it_is)


class SplitSamples:
    """The ranks of a group have different positions of the same samples (see `operators.preferences.WholeSamples`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()

    def total(self, sums_BK: Tensor) -> Tensor:
        """The sums over the positions of all ranks. Backward passes the gradient on to each rank's own sums."""
        return leave(sums_BK, self.group)


Act = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Conjugates(torch.autograd.Function):
    """One function in forward, its conjugate in backward."""

    @staticmethod
    def of(x: Tensor, group: dist.ProcessGroup, forward: Act, backward: Act) -> Tensor:
        """Apply `forward` to x, and `backward` to its gradient. In a group of one rank, return x itself."""
        if group.size() == 1:
            return x
        out: Tensor = _Conjugates.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Act, backward: Act) -> Tensor:
        """Apply `forward` to x."""
        ctx.group, ctx.conjugate = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        """Apply the conjugate to the gradient."""
        return ctx.conjugate(d_x, ctx.group), None, None, None


def _gathered(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather. The received tensor has the ranks as its first dim; with one sample (B = 1), no copy is needed."""
    x_BtD = x_BtD.contiguous()
    parts_nBtD = x_BtD.new_empty(group.size(), *x_BtD.shape)
    all_gather_into(parts_nBtD.flatten(0, 1), x_BtD, group=group)  # gloo needs the ranks in one outer dim
    return parts_nBtD.transpose(0, 1).flatten(1, 2)


def _summed_part(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter. It copies x only if the parts of the ranks are not contiguous (B > 1)."""
    parts_nBtD = x_BTD.view(len(x_BTD), group.size(), -1, *x_BTD.shape[2:]).transpose(0, 1).contiguous()
    part_BtD = torch.empty_like(parts_nBtD[0])
    reduce_scatter_into(part_BtD, parts_nBtD.flatten(0, 1), group=group)
    return _as_view(part_BtD)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce into a copy, because x may have other readers (autograd passes one gradient to all terms of a sum)."""
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return _as_view(total)


def _as_view(received: Tensor) -> Tensor:
    """What a collective wrote, as a view. Where compiled code returns it itself, torch 2.11 gives zero gradients."""
    return received.view_as(received)


def _own_part(d_x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return d_x_BTD.chunk(group.size(), dim=1)[group.rank()]


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x as a new tensor. Compiled code copies: torch 2.13 would return a view of the input without our backward."""
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)


def _gradient_as_it_is(d_x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return d_x
