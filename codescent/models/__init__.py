"""In: a kind of model (one of KINDS) and its sizes. Out: its shape, its declared parameters, its module.
Does not import torch until a module is constructed: planning and `--help` never wait for it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.models.bert import declare as bert_shape
from codescent.models.bert.declare import BertShape
from codescent.models.gpt2 import declare as gpt2_shape
from codescent.models.gpt2.declare import GPT2Shape
from codescent.models.llama import declare as llama_shape
from codescent.models.llama.declare import LlamaShape
from codescent.models.lora import declare as lora_shape
from codescent.models.shape import Size
from codescent.models.transformer import declare as transformer_shape
from codescent.models.transformer.declare import TransformerShape
from codescent.plan.model import Lora, ModelFacts
from codescent.plan.shard import Parameter

if TYPE_CHECKING:
    from torch import nn

Shape = GPT2Shape | LlamaShape | TransformerShape | BertShape

_SHAPES: dict[str, Any] = {
    "gpt2": gpt2_shape,
    "llama": llama_shape,
    "transformer": transformer_shape,
    "bert": bert_shape,
}
_MODULES = {
    "gpt2": ("codescent.models.gpt2.module", "GPT2"),
    "llama": ("codescent.models.llama.module", "Llama"),
    "transformer": ("codescent.models.transformer.module", "Transformer"),
    "bert": ("codescent.models.bert.module", "Bert"),
}
_KIND_OF_PRESET = {preset: kind for kind, module in _SHAPES.items() for preset in module.PRESETS}
KINDS = tuple(_SHAPES)
GENERATING = ("gpt2", "llama")
"""Kinds whose models continue a text (see models/generate)."""
UNCOMPILED: Mapping[str, str] = {
    "transformer": "has losses that are not finite when it is compiled for a CPU, and nobody has found out why yet",
    "bert": "has been compiled in one process alone so far, and divided over tp nobody has seen it come to an end",
}
"""Kinds that are not known to give the same losses when they are compiled, and why."""
SIZES = tuple(dict.fromkeys(size for module in _SHAPES.values() for size in module.SIZES))
"""Of all kinds together; a kind refuses those that it has not."""


def kind_of(kind: str | None, preset: str | None) -> str:
    """The kind that is meant: the one that is named, else the preset's (or of the preset most like it), else gpt2."""
    if kind is not None:
        return kind
    near = difflib.get_close_matches(preset or "", _KIND_OF_PRESET, n=1)
    return _KIND_OF_PRESET[near[0]] if near else KINDS[0]


def preset_positions(preset: str) -> int | None:
    """The longest sample of a preset, in tokens; None of one that there is not, or that has no longest."""
    kind = _KIND_OF_PRESET.get(preset)
    positions: int | None = None if kind is None else _SHAPES[kind].PRESETS[preset].get("seq_len")
    return positions


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


def shape_of_facts(facts: ModelFacts) -> Shape:
    """The shape that the facts of a plan were made of."""
    shape: Shape = _SHAPES[_known(facts.kind)].SHAPE(**facts.sizes)
    return shape


def parameters_of(kind: str, shape: Shape, lora: Lora | None = None) -> tuple[Parameter, ...]:
    """Every parameter as the model declares it, in forward order; with adapters, those of a layer behind its own."""
    declared: tuple[Parameter, ...] = _SHAPES[_known(kind)].parameters(shape)
    return lora_shape.adapted(declared, lora)


def forward_flops(kind: str, shape: Shape, seq_len: int, lora: Lora | None = None) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth (see `Parameter.depths`); of an adapter 2 per element."""
    flops: list[float] = list(_SHAPES[_known(kind)].forward_flops(shape, seq_len))
    for adapter in parameters_of(kind, shape, lora) if lora is not None else ():
        if lora_shape.is_adapter(adapter):
            flops[adapter.depths[0]] += 2.0 * adapter.numel
    return tuple(flops)


def streams_of(shape: Shape) -> tuple[int, ...]:
    """Lengths of the sequences that a sample is made of, one after the other; empty where it is one."""
    return shape.streams if isinstance(shape, TransformerShape) else ()


def encoder_layers(shape: Shape) -> int:
    """Layers, in front, that read the first of several sequences alone; 0: there is no such."""
    return shape.num_encoder_layers if isinstance(shape, TransformerShape) else 0


def reads_beside(shape: Shape) -> bool:
    """Whether layers at every depth read more of a sample than the activations of those before them."""
    return isinstance(shape, BertShape)


def head_share(shape: Shape) -> float:
    """Of a sample's positions, how many the head reads; about as many, where chance decides."""
    return shape.head_share if isinstance(shape, BertShape) else 1.0


def refused(shape: Shape) -> Mapping[str, str]:
    """Axes of the mesh that the model does not go with, and other keys of [parallel] that it does not where tp > 1;
    and why."""
    return shape.refuses if isinstance(shape, TransformerShape | BertShape) else {}


def construct(
    kind: str,
    shape: Shape,
    head_chunk_tokens: int = 1024,
    device: str = "meta",
    depths: range | None = None,
    lora: Lora | None = None,
) -> nn.Module:
    """The module, its parameters without values: none are drawn here, `initialize.initialize_` draws them.

    Args:
        kind: one of KINDS.
        shape: from `shape_of`.
        head_chunk_tokens: rows of logits that exist at a time while training; 0: all at once.
        device: where the parameters lie. On "meta" nothing is allocated; elsewhere they are uninitialised memory.
        depths: the part of the model; None: all of it.
        lora: its adapters; None: there are none, and every parameter is trained.
    """
    module_name, class_name = _MODULES[_known(kind)]
    module = importlib.import_module(module_name)
    built: nn.Module = getattr(module, class_name)(shape, head_chunk_tokens, device, depths)
    if lora is not None:
        from codescent.models.lora.module import adapt_  # noqa: PLC0415 - keeps torch out of planning

        adapt_(built, parameters_of(kind, shape, lora), lora.scale)
    return built
