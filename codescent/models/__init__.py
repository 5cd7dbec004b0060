"""In: a kind of model ("gpt2") and its sizes. Out: its shape, its declared parameters, its module.
Does not import torch until a module is constructed: planning and `--help` never wait for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from codescent.errors import UserError
from codescent.models import gpt2_shape, transformer_shape
from codescent.models.gpt2_shape import GPT2Shape
from codescent.models.transformer_shape import TransformerShape
from codescent.plan.shard import Parameter

if TYPE_CHECKING:
    from torch import nn

Shape = GPT2Shape | TransformerShape

_SHAPES = {"gpt2": gpt2_shape, "transformer": transformer_shape}
_MODULES = {
    "gpt2": ("codescent.models.gpt2", "GPT2"),
    "transformer": ("codescent.models.transformer", "Transformer"),
}
KINDS = tuple(_SHAPES)
SIZES = gpt2_shape.SIZES


def _known(kind: str) -> str:
    if kind not in _SHAPES:
        raise UserError(f"model.kind: there is no model {kind!r}; models: {', '.join(KINDS)}")
    return kind


def shape_of(
    kind: str,
    sizes: Mapping[str, int | None],
    preset: str | None = None,
    *,
    bias: bool = True,
    dropout: float = 0.0,
    where: str = "model",
    **options: str | bool,
) -> Shape:
    """The shape that a preset, free sizes and the kind's own options give (see `resolve` of each kind's shapes).

    Raises:
        UserError: unknown kind or preset, missing or impossible sizes: every problem at once.
    """
    resolve = _SHAPES[_known(kind)].resolve
    shape: Shape = resolve(sizes, preset, bias=bias, dropout=dropout, where=where, **options)
    return shape


def parameters_of(kind: str, shape: Shape) -> tuple[Parameter, ...]:
    """Every parameter as the model declares it, in forward order."""
    declared: tuple[Parameter, ...] = _SHAPES[_known(kind)].parameters(shape)
    return declared


def forward_flops(kind: str, shape: Shape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth (see `Parameter.depths`)."""
    flops: tuple[float, ...] = _SHAPES[_known(kind)].forward_flops(shape, seq_len)
    return flops


def construct(
    kind: str, shape: Shape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
) -> nn.Module:
    """The module, its parameters without values: none are drawn here, `initialize.initialize_` draws them.

    Args:
        kind: one of KINDS.
        shape: from `shape_of`.
        head_chunk_tokens: rows of logits that exist at a time while training; 0: all at once.
        device: where the parameters lie. On "meta" nothing is allocated; elsewhere they are uninitialised memory.
        depths: the part of the model; None: all of it.
    """
    module_name, class_name = _MODULES[_known(kind)]
    module = importlib.import_module(module_name)
    built: nn.Module = getattr(module, class_name)(shape, head_chunk_tokens, device, depths)
    return built
