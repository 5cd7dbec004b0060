"""In: the sizes of a layer. Out: what its parts compute beside products with matrices, which all kinds of model share.
Does not import torch and does not name a kind of model. operators/operations.py says what each operator computes."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.models.saved_blocks import attention_sizes
from codescent.models.shape import Shape
from codescent.operators import operations
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.operators import LayerOperator


def self_attention(stream: Stream, shape: Shape, *, causal: bool) -> Iterator[LayerOperator]:
    """What a layer "attn" computes, and the sum with the residual stream."""
    heads = attention_sizes(shape, stream)
    if shape.qk_norm != "none":
        normed = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        yield operations.normed_heads(stream, "attn norm", "attn.qkv", normed)
    yield from operations.attention(stream, "attn", "attn.qkv", heads, causal=causal, dropout=shape.dropout > 0)
    yield from operations.residual(stream, "attn", "attn.out", dropout=shape.dropout > 0)


def feed_forward(stream: Stream, shape: Shape, up: str, *, halves: int = 1) -> Iterator[LayerOperator]:
    """What a layer "mlp" computes, and the sum with the residual stream. `up`: the name of its first matrix."""
    yield operations.activated(stream, "mlp activation", f"mlp.{up}", shape.ffn_dim, halves, joins="mlp.down")
    yield from operations.residual(stream, "mlp", "mlp.down", dropout=shape.dropout > 0)


def for_head(stream: Stream, shape: Shape, layer: str) -> Iterator[LayerOperator]:
    """The factor of mu-P on the rows that the vocabulary matrix reads."""
    if shape.growth.width != 1.0:
        yield operations.scaled(stream, "head scale", layer)


def head(forward: ForwardPass, shape: Shape) -> Stream:
    """The residual stream as the head reads it."""
    end = shape.num_layers + 1
    return Stream(forward, (end, end + 1), forward.positions, shape.hidden_dim)
