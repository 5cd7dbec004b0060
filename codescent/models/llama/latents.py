"""In: the sizes of a Llama, with or without latents (multi-head latent attention). Out: what is wrong with these;
parameters and FLOPs of attention, what it keeps and computes.
Does not import torch, and has nothing of other layers (declare.py has)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from codescent.models import block_operations, saved_blocks
from codescent.models.shape import WEIGHT_STD, attention, linear
from codescent.operators import operations, saved_attention, saved_tensors
from codescent.operators.saved_attention import AttentionSizes
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import RECOMPUTES, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.model import RopeScaling, pairs_seen, runs_of
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

if TYPE_CHECKING:
    from codescent.models.llama.declare import LlamaShape

LATENTS = ("kv_latent_dim", "q_latent_dim", "value_dim")
"""The fields of latents."""
_OTHERS = ("qk_norm", "qkv_bias", "fused", "mup_base_dim")
"""Sizes of an attention without latents, and of mu-P, which has no rule for them."""
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "recompute": (
        ("products",),
        'keeps the products of COLUMN matrices, and the latents between them are others; parallel.recompute = "full" '
        'computes blocks again, "selective" the probabilities',
    ),
}
"""See `Shape.refuses_values`."""
UNCOMPILED = "with model.kv_latent_dim: what compiled blocks would keep for backward is not known"
"""See `Shape.uncompiled`."""


def wrong(full: Mapping[str, Any], where: str) -> Iterator[str]:
    """Problems of the sizes of latents."""
    if not full.get("kv_latent_dim"):
        for name in LATENTS[1:]:
            if full.get(name):
                yield f"{where}.{name}: given without {where}.kv_latent_dim; give both, or neither"
        return
    heads, keys = full.get("num_heads", 1), full.get("num_kv_heads")
    if keys not in (None, heads):
        yield (
            f"{where}.num_kv_heads = {keys}: with {where}.kv_latent_dim each of the {heads} heads has its own keys and "
            "values; leave it out"
        )
    channels, turning = full.get("head_dim") or full.get("hidden_dim", 0) // max(1, heads), full.get("rotary_dim") or 0
    if not 0 < turning < channels:
        yield (
            f"{where}.rotary_dim: {turning or 'not given'}; with {where}.kv_latent_dim a part of the {channels} "
            f"channels of a key turns ({where}.head_dim); give a number below it"
        )
    if (full.get("value_dim") or 0) > channels:
        yield f"{where}.value_dim = {full['value_dim']}: a value has at most the channels of a key, {channels}"
    for name in _OTHERS:
        if full.get(name) not in (None, False, 0, "none"):
            yield f"{where}.{name}: not with {where}.kv_latent_dim; leave one of them out"


def score_gain(scaling: RopeScaling | None) -> float:
    """The factor of yarn on scores, as DeepSeek has it: (0.1 mscale_all_dim ln(factor) + 1)^2 (the released code)."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1.0:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def parameters(name: str, shape: LlamaShape, out_std: float, depth: int) -> Iterator[Parameter]:
    """The parameters of attention (see `operators.latent_attention`, and without latents `operators.attention`)."""
    if not shape.kv_latent_dim:
        yield from attention(name, shape, WEIGHT_STD, out_std, depth)
        return
    width, queries, latent = shape.hidden_dim, shape.q_latent_dim, shape.kv_latent_dim
    keys, still = shape.num_heads * shape.head_dim, shape.head_dim - shape.rotary_dim
    here: dict[str, Any] = {"depths": (depth,)}
    shared = latent + shape.rotary_dim
    both: dict[str, Any] = {"alternating": (queries, shared)} if queries else {}
    yield Parameter(f"{name}.down.weight", (queries + shared, width), Role.STREAM, WEIGHT_STD, **both, **here)
    if queries:
        yield Parameter(f"{name}.q_norm.weight", (queries,), Role.NORM, mean=1.0, **here)
    yield Parameter(f"{name}.kv_norm.weight", (latent,), Role.NORM, mean=1.0, **here)
    reads = (f"{name}.q_up", queries) if queries else (f"{name}.q", width)
    yield from linear(*reads, keys, Role.COLUMN, WEIGHT_STD, False, depth)
    up = shape.num_heads * (still + shape.value_dim)
    yield Parameter(f"{name}.kv_up.weight", (up, latent), Role.COLUMN, WEIGHT_STD, beside=shape.rotary_dim, **here)
    yield from linear(f"{name}.out", shape.num_heads * shape.value_dim, width, Role.ROW, out_std, False, depth)


def flops_instead(shape: LlamaShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs per token of each layer, by which attention with latents has more than `flops_of_blocks` says."""
    if not shape.kv_latent_dim:
        return (0.0,) * shape.num_layers
    heads, queries = shape.num_heads, shape.q_latent_dim
    of_queries = queries * shape.hidden_dim + (queries or shape.hidden_dim) * heads * shape.head_dim
    of_keys = (shape.kv_latent_dim + shape.rotary_dim) * shape.hidden_dim
    up = shape.kv_latent_dim * heads * (shape.head_dim - shape.rotary_dim + shape.value_dim)
    out = heads * shape.value_dim * shape.hidden_dim
    without = 4 * shape.hidden_dim * heads * shape.head_dim  # matrices of queries, keys, values and output
    matrices = 2.0 * (of_queries + of_keys + up + out - without)
    fewer = 2.0 * heads * (shape.head_dim - shape.value_dim)  # of a pair, in the sum of values
    return tuple(matrices - fewer * pairs_seen(seq_len, window) / seq_len for window in shape.windows)


def _sizes(shape: LlamaShape, stream: Stream) -> AttentionSizes:
    values = shape.value_dim if shape.value_dim < shape.head_dim else 0
    return replace(saved_blocks.attention_sizes(shape, stream), values=values)


def saved(stream: Stream, shape: LlamaShape, *, entered: bool) -> Iterator[SavedTensor]:
    """What attention keeps. `entered`: it reads the residual stream as it comes in."""
    if not shape.kv_latent_dim:
        yield from saved_blocks.self_attention(stream, shape, causal=True, entered=entered)
        return
    sizes, wide = _sizes(shape, stream), stream.forward.wide
    every = replace(stream, depths=(1, shape.num_layers + 1))
    yield from saved_attention.documents(every, sizes, dropout=False)
    queries, latent = shape.q_latent_dim, shape.kv_latent_dim
    rows = queries + latent + shape.rotary_dim
    keys, still = shape.num_heads * shape.head_dim, shape.head_dim - shape.rotary_dim
    gathers = stream.forward.gathers  # then `q` reads others than `down`
    down = "attn.down" if queries or gathers else ""
    yield stream.rows("attn.down input", layer=down, product="attn.down", begins=stream.begins if entered else 0)
    yield stream.rows("attn.down gradient", rows, under=(), product="attn.down")
    yield stream.rows("attn latents", rows)
    yield stream.rows("attn norms of latents", 2 if queries else 1, dtype=wide)
    if queries:
        yield stream.inputs("attn.q_up input", queries, layer="attn.q_up", product="attn.q_up")
    elif gathers:
        yield stream.inputs("attn.q input", layer="attn.q", product="attn.q")
    yield from saved_tensors.product(stream, "attn.q_up" if queries else "attn.q", keys)
    yield stream.inputs("attn.kv_up input", latent + shape.rotary_dim, layer="attn.kv_up", product="attn.kv_up")
    yield from saved_tensors.product(stream, "attn.kv_up", shape.num_heads * (still + shape.value_dim))
    yield saved_tensors.row_gradient(stream, "attn.out")
    yield from saved_attention.causal_attention(stream, "attn", sizes)
    yield from saved_attention.output(stream, "attn.out", sizes, causal=True)


def operators(stream: Stream, shape: LlamaShape) -> Iterator[LayerOperator]:
    """What attention computes beside products with matrices, and the sum with the residual stream."""
    if not shape.kv_latent_dim:
        turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        yield operations.rotated(stream, "attn rotation", "attn.qkv", turned)
        yield from block_operations.self_attention(stream, shape, causal=True)
        return
    normed = shape.q_latent_dim + shape.kv_latent_dim
    yield operations.rows(replace(stream, width=normed), "attn norms", "attn.down", **operations.NORM)
    joined = 3 * shape.num_heads * shape.head_dim
    yield operations.rotated(stream, "attn rotation", "attn.kv_up", joined)
    yield from operations.attention(stream, "attn", "attn.kv_up", _sizes(shape, stream), causal=True, dropout=False)
    yield from operations.residual(stream, "attn", "attn.out", dropout=False)


def saved_angles(shape: LlamaShape, forward: ForwardPass) -> Iterator[SavedTensor]:
    """The rotary angles of a rank's positions: of each base one tensor of a chunk. Documents have others in each
    sample."""
    samples, of_samples = ((forward.samples,), (Dim.SAMPLE,)) if forward.documents else ((), ())
    channels = shape.rotary_dim if shape.kv_latent_dim else shape.head_dim
    angles, dims = (*samples, forward.positions, channels), (*of_samples, Dim.POSITION, Dim.WHOLE)
    last: dict[int, int] = {}  # by base: the last depth so far. A chunk that has it counts its angles already.
    for depths, local in runs_of(shape.bases):
        blocks = Stream(forward, depths, forward.positions, shape.hidden_dim)
        options: dict[str, Any] = {"dtype": forward.wide, "once": True, "under": RECOMPUTES}
        name = "rotary angles of windows" if local else "rotary angles"
        yield blocks.tensor(name, angles, dims, unless=last.get(local, 0), **options)
        last[local] = depths[1] - 1
