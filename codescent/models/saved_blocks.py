"""In: the sizes of a layer. Out: what its parts keep for backward, which all kinds of model share (`SavedTensor`).
Does not import torch and does not name a kind of model. operators/saved_tensors.py says what each operator keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codescent.models.shape import Shape
from codescent.operators import saved_attention, saved_tensors
from codescent.operators.saved_attention import AttentionSizes
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import RECOMPUTES, SavedTensor
from codescent.plan.divided import Dim

DROPOUT_SITES = 3
"""Dropout sites of a `decoder.Block`: attention probabilities, output of attention, output of the feed-forward."""


def embedding(forward: ForwardPass, width: int, *matrices: tuple[str, int], dropout: float) -> Iterator[SavedTensor]:
    """What depth 0 keeps. `matrices`: each embedding of tokens with the positions that it reads."""
    stream = Stream(forward, (0, 1), forward.positions, width, under=RECOMPUTES)
    for name, positions in matrices:
        yield saved_tensors.embedded(replace(stream, positions=positions), name)
    if dropout:
        yield from saved_tensors.dropped(stream, "embedding")


def positions_of_documents(forward: ForwardPass, width: int) -> Iterator[SavedTensor]:
    """Of learned positions that begin again at each document: which row of the table each token reads."""
    if forward.documents:
        start = Stream(forward, (0, 1), forward.positions, width, under=RECOMPUTES)
        shape, dims = (forward.samples, forward.positions), (Dim.SAMPLE, Dim.SEQUENCE)
        yield start.tensor("positions", shape, dims, dtype="int64", layer="pos")


def attention_sizes(shape: Shape, stream: Stream) -> AttentionSizes:
    """Of the layers of a stream, which have the same window."""
    window = shape.windows[min(stream.depths[0], shape.num_layers) - 1]  # behind the blocks that of the last one
    sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return AttentionSizes(*sizes, stream.positions, window, shape.score_cap)


def self_attention(
    stream: Stream, shape: Shape, *, causal: bool, padding: str = "", entered: bool = False
) -> Iterator[SavedTensor]:
    """What a layer "attn" keeps. `entered`: it reads the residual stream as it comes in."""
    heads = attention_sizes(shape, stream)
    if causal:
        every = replace(stream, depths=(1, shape.num_layers + 1))
        yield from saved_attention.documents(every, heads, dropout=shape.dropout > 0)
    queries, projected = shape.num_heads * shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
    yield saved_tensors.read(stream, "attn.qkv", entered=entered)
    yield from saved_tensors.product(stream, "attn.qkv", projected * shape.head_dim)
    if shape.qk_norm != "none":
        yield from saved_attention.head_norm(stream, "attn", heads, over_all=shape.qk_norm == "all")
    yield saved_tensors.row_gradient(stream, "attn.out")
    if shape.dropout:
        yield from saved_attention.attention_with_dropout(stream, "attn", heads, stream, causal=causal)
        if stream.forward.samples == 1:  # keys and values are views, so the memory of the queries stays beside them
            yield stream.columns("attn queries beside keys", queries, core=True)
        yield stream.columns("attn.out input", queries, layer="attn.out", product="attn.out")
        yield from saved_tensors.dropped(stream, "attn")
        return
    masked, normed = bool(padding), shape.qk_norm != "none"
    yield from saved_attention.attention_product(stream, "attn", heads, causal=causal, masked=masked, normed=normed)
    if causal:
        yield from saved_attention.causal_attention(stream, "attn", heads)
    else:
        yield from saved_attention.fused_attention(stream, "attn", heads, stream, padding)
    yield from saved_attention.output(stream, "attn.out", heads, causal=causal)


def feed_forward(stream: Stream, shape: Shape, up: str, *, halves: int = 1, by_torch: int = 0) -> Iterator[SavedTensor]:
    """What a layer "mlp" keeps. `up`: the name of its first matrix, of one half or two. `by_torch`: see `activated`."""
    yield saved_tensors.read(stream, f"mlp.{up}")
    yield from saved_tensors.product(stream, f"mlp.{up}", halves * shape.ffn_dim)
    yield from saved_tensors.activated(stream, "mlp.down", shape.ffn_dim, halves, by_torch=by_torch)
    if shape.dropout:
        yield from saved_tensors.dropped(stream, "mlp", ends=True)


def block_inputs(stream: Stream, shape: Shape, sites: int) -> Iterator[SavedTensor]:
    """What blocks keep that are computed again. `sites`: dropout sites of a block."""
    keys = 1 + sites * shape.num_layers if shape.dropout else 0
    yield from saved_tensors.block_inputs(stream, stream.forward.samples, keys)


def head(forward: ForwardPass, shape: Shape, begins: int = 1) -> Stream:
    """The residual stream as the head reads it."""
    end, positions = shape.num_layers + 1, forward.positions
    return Stream(forward, (end, end + 1), positions, shape.hidden_dim, begins=begins, under=RECOMPUTES)


def loss(stream: Stream, shape: Shape, layer: str, *, tied: bool) -> Iterator[SavedTensor]:
    """What the head of a language model keeps after its norm. `layer`: the name of its matrix."""
    tokens = stream.forward.head_tokens if tied else 0
    rows = stream.inputs("head input gradient")
    yield from saved_tensors.head_gradients(stream, layer, shape.vocab_size, rows=rows, tied=tokens)


def padding(stream: Stream, positions: int, under: tuple[str, ...] = RECOMPUTES) -> SavedTensor:
    """Which positions are padding: bool, made once by each chunk."""
    shape, dims = (stream.forward.samples, positions), (Dim.SAMPLE, Dim.WHOLE)
    return stream.tensor("padding", shape, dims, dtype="bool", once=True, under=under)
