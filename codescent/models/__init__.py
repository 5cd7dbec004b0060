"""In: a kind of model (one of KINDS), a preset, sizes. Out: the checked sizes (`shape_of`), the parameters
(`parameters_of`), the model's description in a plan (`facts_of`), the torch module (`construct`).
Does not import torch before `construct` builds a module, so planning and `--help` start fast."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from codescent.base.errors import UserError
from codescent.base.own_names import FORM, is_own_name
from codescent.models.bert.declare import KIND as BERT
from codescent.models.gpt2.declare import KIND as GPT2
from codescent.models.llama.declare import KIND as LLAMA
from codescent.models.lora.declare import adapted, adapted_operators, is_adapter
from codescent.models.mup import rate_factor as mup_rate_factor
from codescent.models.mup import scaled
from codescent.models.own import ModelKind, build_own, check_declared, check_flops, own_kind, refuse_sizes
from codescent.models.shape import Kind
from codescent.models.shape import Shape as Shape
from codescent.models.transformer.declare import KIND as TRANSFORMER
from codescent.models.transformers.declare import KIND as TRANSFORMERS
from codescent.operators.saved_tensors import ForwardPass
from codescent.plan.activations import SavedTensor
from codescent.plan.model import Lora, ModelFacts, Size
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, TensorPlan
from codescent.plan.work import Scalar

if TYPE_CHECKING:
    from torch import nn

_KINDS: dict[str, Kind] = {kind.name: kind for kind in (GPT2, LLAMA, TRANSFORMER, BERT, TRANSFORMERS)}
_KIND_OF_PRESET = {preset: kind.name for kind in _KINDS.values() for preset in kind.presets}
KINDS = tuple(_KINDS)
GENERATING = tuple(kind.name for kind in _KINDS.values() if kind.generates)
"""Kinds whose models can generate text (see codescent/inference)."""
ENCODING = tuple(kind.name for kind in _KINDS.values() if kind.encodes)
"""Kinds whose models give embeddings of texts."""
SEPARATING = tuple(kind.name for kind in _KINDS.values() if kind.separates)
"""Kinds whose models keep the documents of a sample apart (data.documents)."""
READ_CONFIG = tuple(kind.name for kind in _KINDS.values() if "config" in kind.sizes)
"""Kinds whose sizes are those of a config.json."""
OTHER_MODELS = (
    'any other language model of transformers trains with model.kind = "transformers" (codescent docs any_model), any '
    "other module in your own loop (codescent docs own_module)"
)
"""What a refusal of a model says, beside the models that there are."""
SIZES = tuple(dict.fromkeys(size for kind in _KINDS.values() for size in kind.sizes))
"""Names of the sizes of all kinds. A kind refuses a size that it does not have."""


def kind_of(kind: str | None, preset: str | None) -> str:
    """`kind` if given; else the kind of the preset, or the kind in its name, or that of a similar preset; else gpt2."""
    if kind is not None:
        return kind
    if preset in _KIND_OF_PRESET:
        return _KIND_OF_PRESET[preset]
    if (named := _named(preset)) is not None:
        return named
    near = difflib.get_close_matches(preset, _KIND_OF_PRESET, n=1) if preset else []
    return _KIND_OF_PRESET[near[0]] if near else KINDS[0]


def _named(preset: str | None) -> str | None:
    """The kind of model whose name is in the name of a preset, such as llama in Llama-2-7b; None: there is none."""
    return next((kind for kind in KINDS if kind in (preset or "").lower()), None)


def preset_positions(preset: str) -> int | None:
    """The longest sample of a preset, in tokens. None if the preset is unknown or has no `seq_len`."""
    kind = _KIND_OF_PRESET.get(preset)
    positions: int | None = None if kind is None else _KINDS[kind].presets[preset].get("seq_len")
    return positions


def generates(kind: str) -> bool:
    """Whether models of a kind can generate text (see codescent/inference)."""
    return _known(kind).generates


def uncompiled(kind: str, shape: Shape) -> str:
    """Why torch.compile is not verified for a model, in words behind its kind; "": it is."""
    return _known(kind).uncompiled or shape.uncompiled


def own_tasks(kind: str) -> tuple[str, ...]:
    """The tasks of this package for which a kind of the user can be trained. Of our kinds each task says it."""
    return own_kind(kind).tasks if is_own_name(kind) else ()


def _known(kind: str) -> Kind:
    if is_own_name(kind):
        own = own_kind(kind)
        refuse_sizes(own, SIZES)
        return own
    if kind not in _KINDS:
        raise UserError(
            f"model.kind: there is no model {kind!r}; models: {', '.join(KINDS)}, or {FORM}; {OTHER_MODELS}"
        )
    return _KINDS[kind]


def shape_of(
    kind: str,
    sizes: Mapping[str, Size | None],
    preset: str | None = None,
    *,
    bias: bool | None = None,
    dropout: float = 0.0,
    where: str = "model",
    tp: int = 1,
) -> Shape:
    """Check the sizes of a model and fill in the missing ones. A given size replaces the preset's size.

    Args:
        kind: one of KINDS.
        sizes: sizes by name. A size that is None or absent is the preset's, or else the kind's default.
        preset: name of a preset of this kind; None: every size without a default must be given.
        bias: whether linear layers and norms have a bias; None: the default of the kind.
        dropout: probability in [0, 1).
        where: config section that error messages name.
        tp: degree of tensor parallelism; error messages suggest only numbers of heads that it divides.

    Raises:
        UserError: unknown kind or preset, missing or impossible sizes: every problem at once.
    """
    known, other = _known(kind), _KIND_OF_PRESET.get(preset or "", kind)
    if kind != other:
        raise UserError(
            f'{where}.preset: {preset!r} is a preset of {where}.kind = "{other}", not of "{kind}"; its presets: '
            f"{', '.join(known.presets) or 'none'}"
        )
    is_foreign = preset is not None and preset not in _KIND_OF_PRESET and _named(preset) is None
    if is_foreign and not difflib.get_close_matches(preset or "", known.presets, n=1):
        presets = "; ".join(f"{one.name}: {', '.join(one.presets)}" for one in _KINDS.values())
        raise UserError(f"{where}.preset: there is no preset {preset!r}; presets of {presets}; {OTHER_MODELS}")
    return known.resolve(sizes, preset, bias, dropout, where, tp)


def parameters_of(kind: str, shape: Shape, lora: Lora | None = None) -> tuple[Parameter, ...]:
    """Every parameter, in forward order; the adapters of a layer follow its own parameters."""
    parameters = tuple(scaled(_known(kind).parameters(shape), shape.growth))
    if is_own_name(kind):
        check_declared(kind, shape, parameters)
    return adapted(parameters, lora)


def rate_factor(facts: ModelFacts, tensor: TensorPlan, update: Mapping[str, Scalar]) -> float:
    """By what the learning rate of a tensor is multiplied (see `mup.rate_factor`)."""
    return mup_rate_factor(tensor, shape_of_facts(facts).growth, update)


def forward_flops(kind: str, shape: Shape, seq_len: int, lora: Lora | None = None) -> tuple[float, ...]:
    """FLOPs of a forward pass per token, at each depth (see `Parameter.depths`). An adapter adds 2 per element."""
    flops = list(_known(kind).forward_flops(shape, seq_len))
    if is_own_name(kind):
        check_flops(kind, shape, flops)
    for adapter in parameters_of(kind, shape, lora) if lora is not None else ():
        if is_adapter(adapter):
            flops[adapter.depths[0]] += 2.0 * adapter.numel
    return tuple(flops)


def saved_of(facts: ModelFacts, forward: ForwardPass) -> tuple[SavedTensor, ...]:
    """What the model keeps for backward of one micro-batch, before strategies divide it."""
    return tuple(_known(facts.kind).kept(shape_of_facts(facts), forward, facts.lora))


def operators_of(facts: ModelFacts, forward: ForwardPass) -> tuple[LayerOperator, ...]:
    """What the model computes beside products with matrices, of one micro-batch, before strategies divide it."""
    kind, shape = _known(facts.kind), shape_of_facts(facts)
    found = tuple(kind.operators(shape, forward))
    return found if facts.lora is None else (*found, *adapted_operators(kind.saved(shape, forward), facts.lora))


def facts_of(
    kind: str,
    shape: Shape,
    seq_len: int | None = None,
    lora: Lora | None = None,
    head_chunk_tokens: int = 1024,
    weights: str | None = None,
) -> ModelFacts:
    """What a plan needs to know about a model (see `ModelFacts`). `seq_len` None: the model's longest sample."""
    return ModelFacts(
        kind=kind,
        num_layers=shape.num_layers,
        hidden_dim=shape.hidden_dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        mtp_layers=shape.mtp_layers,
        cached=shape.cached,
        vocab_size=shape.vocab_size,
        forward_flops=forward_flops(kind, shape, shape.seq_len if seq_len is None else seq_len, lora),
        dropout=shape.dropout,
        encoder_layers=shape.encoder_layers,
        causal_layers=shape.causal_layers,
        head_chunk_tokens=head_chunk_tokens,
        sizes=shape.facts(),
        lora=lora,
        weights=weights,
        window=shape.window,
        full_every=shape.full_every,
        score_cap=shape.score_cap,
        logit_cap=shape.logit_cap,
        num_experts=shape.num_experts,
        expert_rows=shape.expert_rows(shape.seq_len if seq_len is None else seq_len),
    )


def shape_of_facts(facts: ModelFacts) -> Shape:
    """The shape from which `facts_of` computed these facts."""
    return _known(facts.kind).shape.of(facts.sizes)


def construct(facts: ModelFacts, device: str = "meta", depths: range | None = None) -> nn.Module:
    """Build the module, or its part at `depths`. Its parameters have no values yet (see `initialize.initialize_`)."""
    kind, shape = _known(facts.kind), shape_of_facts(facts)
    if isinstance(kind, ModelKind):
        module = build_own(kind, shape, facts.head_chunk_tokens, device, depths)
    else:
        definitions = importlib.import_module(f"codescent.models.{kind.name}.module")
        module = getattr(definitions, kind.module)(shape, facts.head_chunk_tokens, device, depths)
    if facts.lora is not None:
        from codescent.models.lora.module import adapt_  # noqa: PLC0415 - keeps torch out of planning

        adapt_(module, parameters_of(kind.name, shape, facts.lora), facts.lora)
    return module
