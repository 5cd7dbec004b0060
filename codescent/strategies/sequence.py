"""In: activations, and the ranks that share a layer. Out: the same gathered, divided or summed; gradients likewise.
Does not compute anything of a layer: these are the points of a tensor-parallel model at which its ranks communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.strategies.collectives import all_gather_into, reduce_scatter_into

# Shapes: B samples, T positions, t = T / degree positions of this rank, D hidden_dim, n ranks of the group (degree).
#
# Two pairs of conjugate operators (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2): what
# one does forward, the other does backward. `enter` and `leave` (f and f-bar; Shoeybi et al. 2019, "Megatron-LM",
# section 3) surround divided matrices whose input and output are whole on every rank. With `gather_sequence` and
# `scatter_sum` (g and g-bar) what lies between such parts is divided along the sequence, for as many bytes.
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
# Nothing is sent, nor copied, in a group of one rank. Where no gradient flows to the input, backward does not happen:
# whether it does must be the same on every rank of the group.


def gather_sequence(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BTD: every rank's positions, in the order of the ranks; backward sums the gradients and scatters them."""
    return _Conjugates.of(x_BtD, group, _gathered, _summed_part)


def gather_alike(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BTD: every rank's positions, of which each rank computes the same: backward takes this rank's part."""
    return _Conjugates.of(x_BtD, group, _gathered, _own_part)


def scatter_sum(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BtD: this rank's positions of the sum of every rank's x_BTD (T a multiple of the degree); backward gathers."""
    return _Conjugates.of(x_BTD, group, _summed_part, _gathered)


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, the same on every rank; backward sums the gradients of what each rank makes of it."""
    return _Conjugates.of(x, group, _same, _summed)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's x; its gradient is that of each x."""
    return _Conjugates.of(x, group, _summed, _gradient_as_it_is)


Act = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Conjugates(torch.autograd.Function):
    """A collective in forward, its conjugate in backward."""

    @staticmethod
    def of(x: Tensor, group: dist.ProcessGroup, forward: Act, backward: Act) -> Tensor:
        """x itself in a group of one rank."""
        if group.size() == 1:
            return x
        out: Tensor = _Conjugates.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Act, backward: Act) -> Tensor:
        """The act on x."""
        ctx.group, ctx.conjugate = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        """The conjugate on the gradient."""
        return ctx.conjugate(d_x, ctx.group), None, None, None


def _gathered(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Ranks arrive outermost; with one sample (B = 1) that is already the order of the positions: no copy."""
    x_BtD = x_BtD.contiguous()
    parts_nBtD = x_BtD.new_empty(group.size(), *x_BtD.shape)
    all_gather_into(parts_nBtD.flatten(0, 1), x_BtD, group=group)  # gloo wants rank after rank in one outer dim
    return parts_nBtD.transpose(0, 1).flatten(1, 2)


def _summed_part(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Copied only where the parts of the ranks do not lie one after the other (B > 1)."""
    parts_nBtD = x_BTD.view(len(x_BTD), group.size(), -1, *x_BTD.shape[2:]).transpose(0, 1).contiguous()
    part_BtD = torch.empty_like(parts_nBtD[0])
    reduce_scatter_into(part_BtD, parts_nBtD.flatten(0, 1), group=group)
    return part_BtD


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """In a copy: others may hold x (autograd hands one gradient to all the terms of a sum)."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own_part(d_x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return d_x_BTD.chunk(group.size(), dim=1)[group.rank()]


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """torch 2.13 returns a compiled graph's output that is a view of its input as just that: without our backward."""
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)


def _gradient_as_it_is(d_x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return d_x
