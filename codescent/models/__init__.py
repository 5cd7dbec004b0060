"""In: a kind of model (one of KINDS) and its sizes. Out: its shape, its declared parameters, its module.
Does not import torch until a module is constructed: planning and `--help` never wait for it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from codescent.errors import UserError
from codescent.models import gpt2_shape, llama_shape, transformer_shape
from codescent.models.gpt2_shape import GPT2Shape
from codescent.models.llama_shape import LlamaShape
from codescent.models.shape import Size
from codescent.models.transformer_shape import TransformerShape
from codescent.plan.shard import Parameter

if TYPE_CHECKING:
    from torch import nn

Shape = GPT2Shape | LlamaShape | TransformerShape

_SHAPES: dict[str, Any] = {"gpt2": gpt2_shape, "llama": llama_shape, "transformer": transformer_shape}
_MODULES = {
    "gpt2": ("codescent.models.gpt2", "GPT2"),
    "llama": ("codescent.models.llama", "Llama"),
    "transformer": ("codescent.models.transformer", "Transformer"),
}
_KIND_OF_PRESET = {preset: kind for kind, module in _SHAPES.items() for preset in module.PRESETS}
KINDS = tuple(_SHAPES)
GENERATING = ("gpt2", "llama")
"""Kinds whose models continue a text (see models/generate)."""
COMPILING = ("gpt2", "llama")
"""Kinds whose compiled modules give the losses of those that are not."""
TASKS: dict[str, tuple[str, ...]] = {"gpt2": ("lm",), "llama": ("lm",), "transformer": ("lm", "tensors", "seq2seq")}
"""What models of each kind can be trained for, the usual in front."""
SIZES = tuple(dict.fromkeys(size for module in _SHAPES.values() for size in module.SIZES))
"""Of all kinds together; a kind refuses those that it has not."""


def kind_of(kind: str | None, preset: str | None) -> str:
    """The kind that is meant: the one that is named, else the preset's (or of the preset most like it), else gpt2."""
    if kind is not None:
        return kind
    near = difflib.get_close_matches(preset or "", _KIND_OF_PRESET, n=1)
    return _KIND_OF_PRESET[near[0]] if near else KINDS[0]


def _known(kind: str) -> str:
    if kind not in _SHAPES:
        raise UserError(f"model.kind: there is no model {kind!r}; models: {', '.join(KINDS)}")
    return kind


def shape_of(
    kind: str,
    sizes: Mapping[str, Size | None],
    preset: str | None = None,
    *,
    bias: bool | None = None,
    dropout: float = 0.0,
    where: str = "model",
) -> Shape:
    """The shape that a preset and free sizes give (see `resolve` of each kind's shapes).

    Raises:
        UserError: unknown kind or preset, missing or impossible sizes: every problem at once.
    """
    other = _KIND_OF_PRESET.get(preset or "", kind)
    if _known(kind) != other:
        raise UserError(f'{where}.preset: {preset!r} is a preset of {where}.kind = "{other}", not of "{kind}"')
    shape: Shape = _SHAPES[kind].resolve(sizes, preset, bias=bias, dropout=dropout, where=where)
    return shape


def parameters_of(kind: str, shape: Shape) -> tuple[Parameter, ...]:
    """Every parameter as the model declares it, in forward order."""
    declared: tuple[Parameter, ...] = _SHAPES[_known(kind)].parameters(shape)
    return declared


def forward_flops(kind: str, shape: Shape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth (see `Parameter.depths`)."""
    flops: tuple[float, ...] = _SHAPES[_known(kind)].forward_flops(shape, seq_len)
    return flops


def streams_of(shape: Shape) -> tuple[int, ...]:
    """Lengths of the sequences that a sample is made of, one after the other; empty where it is one."""
    return shape.streams if isinstance(shape, TransformerShape) else ()


def encoder_layers(shape: Shape) -> int:
    """Layers, in front, that read the first of several sequences alone; 0: there is no such."""
    return shape.num_encoder_layers if isinstance(shape, TransformerShape) else 0


def refused(shape: Shape) -> Mapping[str, str]:
    """Axes of the mesh that the model does not go with, and other keys of [parallel] that it does not where tp > 1;
    and why."""
    return shape.refuses if isinstance(shape, TransformerShape) else {}


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
