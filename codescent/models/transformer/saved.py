"""In: the sizes of a Transformer, a forward pass. Out: what each depth keeps for backward, and for deferred products.
Does not import torch. operators/saved_tensors.py says it for operators, models/saved_blocks.py for shared layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from codescent.models import saved_blocks
from codescent.operators import saved_attention, saved_tensors
from codescent.operators.saved_attention import AttentionSizes
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import CPU, CUDA, RECOMPUTES, SavedTensor
from codescent.plan.divided import Dim

if TYPE_CHECKING:
    from codescent.models.transformer.declare import TransformerShape

DROPOUT_SITES = 6
"""Dropout sites of a block: probabilities and output of self-attention; the same two of cross-attention; between the
two matrices of the feed-forward, and its output."""


def saved(shape: TransformerShape, forward: ForwardPass) -> Iterator[SavedTensor]:
    """What each depth keeps for backward."""
    width, last, layers = shape.hidden_dim, shape.num_encoder_layers, shape.num_layers
    target = forward.positions - shape.source_len
    matrices = {
        "tied": (("tok", forward.positions),),
        "untied": (("source_tok", shape.source_len), ("target_tok", target)),
        "none": (),
    }[shape.embedding]
    yield from saved_blocks.embedding(forward, width, *matrices, dropout=shape.dropout if matrices else 0.0)
    encoder = Stream(forward, (1, last + 1), shape.source_len, width, sliced=True)
    decoder = Stream(forward, (last + 1, layers + 1), target, width, begins=last + 1, sliced=True)
    yield from _saved_of_layer(shape, encoder, None)
    yield _saved_beside(shape, encoder, target)
    yield from saved_tensors.layer_norm(replace(encoder, depths=(last, last + 1)), "norm_end", entered=False)
    yield from _saved_of_layer(shape, decoder, encoder)
    yield from _saved_of_source(replace(encoder, depths=decoder.depths), last)
    if shape.norm == "first" and not shape.dropout:
        yield from _gradients_beside(encoder, decoder)
    yield from _saved_once(shape, replace(encoder, depths=(1, layers + 1)), decoder)
    end = replace(decoder, depths=(layers + 1, layers + 2), under=RECOMPUTES)
    yield from saved_tensors.layer_norm(end, "norm", entered=True)
    if shape.embedding == "none":
        yield end.rows("difference", dtype=forward.wide)
    else:
        tied = shape.embedding == "tied"
        yield from saved_blocks.loss(end, shape, "tok" if tied else "head", tied=tied)


def _saved_of_layer(shape: TransformerShape, stream: Stream, source: Stream | None) -> Iterator[SavedTensor]:
    """Of a layer of the encoder, or of the decoder, which reads the encoder's output `source`."""
    first, padded, decodes = shape.norm == "first", stream.forward.padded, source is not None
    sequence = "target" if decodes else "source"
    causal = decodes and shape.causal
    yield from saved_tensors.layer_norm(stream, "norm_1", entered=first)
    padding = sequence if padded and not causal else ""
    yield from saved_blocks.self_attention(stream, shape, causal=causal, padding=padding, entered=not first)
    if source is not None:
        yield from saved_tensors.layer_norm(stream, "norm_2", entered=False)
        yield from _saved_of_cross_attention(shape, stream, source)
    yield from saved_tensors.layer_norm(stream, "norm_3" if decodes else "norm_2", entered=False)
    yield from _saved_of_feed_forward(shape, stream)
    yield from saved_tensors.block_inputs(stream, 0, 0)


def _saved_of_cross_attention(shape: TransformerShape, stream: Stream, source: Stream) -> Iterator[SavedTensor]:
    width, padding = shape.hidden_dim, "source" if stream.forward.padded else ""
    heads = AttentionSizes(shape.num_heads, shape.num_heads, shape.head_dim, source.positions)
    yield saved_tensors.read(stream, "cross.q")
    yield from saved_tensors.product(stream, "cross.q", width)
    yield from saved_tensors.product(replace(source, depths=stream.depths), "cross.kv", 2 * width)
    yield saved_tensors.row_gradient(stream, "cross.out")
    if shape.dropout:
        yield from saved_attention.attention_with_dropout(stream, "cross", heads, source, causal=False)
        yield stream.columns("cross.out input", width, layer="cross.out", product="cross.out")
        yield from saved_tensors.dropped(stream, "cross")
    else:
        yield from saved_attention.attention_product(stream, "cross", heads, causal=False, masked=bool(padding))
        yield from saved_attention.fused_attention(stream, "cross", heads, source, padding)
        yield from saved_attention.output(stream, "cross.out", heads, causal=False)


def _saved_of_feed_forward(shape: TransformerShape, stream: Stream) -> Iterator[SavedTensor]:
    """ReLU keeps its result, which the next matrix reads; GELU keeps its input."""
    yield saved_tensors.read(stream, "mlp.up")
    yield from saved_tensors.product(stream, "mlp.up", shape.ffn_dim)
    yield saved_tensors.row_gradient(stream, "mlp.down")
    is_input = not shape.dropout and shape.activation == "relu"
    yield stream.columns("mlp activation", shape.ffn_dim, product="mlp.down" if is_input else "")
    if shape.dropout:
        yield stream.columns("mlp inner dropout mask", shape.ffn_dim, dtype="bool", on=CPU)
        yield stream.inputs("mlp inner dropout keys", 1, dtype="int64", on=CUDA)
    if not is_input:
        yield stream.columns("mlp.down input", shape.ffn_dim, layer="mlp.down", product="mlp.down")
    if shape.dropout:
        yield from saved_tensors.dropped(stream, "mlp")


def _saved_of_source(source: Stream, last: int) -> Iterator[SavedTensor]:
    """The encoder's output, as decoder layers read it. Those of a chunk with the last encoder layer keep it together.

    In a chunk without it, it is a part of what the stage received. There each layer copies it, unless a copy is not
    needed, as with one sample.
    """
    first, stop = source.depths
    views = source.forward.views and not source.forward.splits
    reads: dict[str, Any] = {"layer": "cross.kv", "product": "cross.kv"}
    later = replace(source, depths=(first + 1, stop))
    yield replace(source, depths=(first, first + 1)).inputs("cross.kv input", begins=int(views), **reads)
    if views:  # all of them are in what the stage received
        yield later.inputs("cross.kv input", begins=1, once=True, unless=first, **reads)
    else:
        yield later.inputs("cross.kv input", unless=last, **reads)
    again = replace(source, depths=(first, first + 1), under=saved_tensors.BLOCK_INPUTS)
    yield again.rows("encoder output", begins=1)


def _saved_beside(shape: TransformerShape, encoder: Stream, target: int) -> SavedTensor:
    """The target's rows in the memory of the source that the first layer keeps. A decoder layer keeps them anyway."""
    forward = encoder.forward
    views = shape.norm == "first" or (forward.views and not forward.splits)
    under = RECOMPUTES if views else saved_tensors.BLOCK_INPUTS
    first = replace(encoder, depths=(1, 2), positions=target, under=under)
    reads = "" if shape.norm == "first" or not views else "attn.qkv"
    return first.entered("target beside the source", unless=shape.num_encoder_layers + 1, product=reads)


def _gradients_beside(encoder: Stream, decoder: Stream) -> Iterator[SavedTensor]:
    """The rows of the other stream in the gradient that a stage receives. Of one sample the last layer's matrix keeps
    its own rows there, without a copy. The last encoder layer ends with a norm, so it has a gradient of its own."""
    if encoder.forward.samples > 1 or encoder.forward.splits:
        return
    first, stop = encoder.depths
    for positions, depths in ((decoder.positions, (first, stop - 1)), (encoder.positions, decoder.depths)):
        beside = replace(decoder, positions=positions, depths=depths)
        yield beside.rows("gradient beside", border="last", under=(), product="mlp.down")


def _saved_once(shape: TransformerShape, blocks: Stream, decoder: Stream) -> Iterator[SavedTensor]:
    """What the layers of a chunk keep together: keys of dropout, and which positions are rows or padding."""
    forward, under = blocks.forward, RECOMPUTES if shape.dropout else saved_tensors.BLOCK_INPUTS
    if shape.dropout:
        keys = (1 + DROPOUT_SITES * shape.num_layers, forward.samples)
        options: dict[str, Any] = {"dtype": "int64", "once": True, "under": saved_tensors.BLOCK_INPUTS}
        yield blocks.tensor("dropout keys", keys, (Dim.WHOLE, Dim.SAMPLE), **options)
    if forward.splits:  # counted from the first position of the target
        rows: dict[str, Any] = {"dtype": "int64", "once": True, "under": saved_tensors.BLOCK_INPUTS}
        yield decoder.tensor("rows of the target", (decoder.positions,), (Dim.SEQUENCE,), **rows)
    if forward.padded:
        yield saved_blocks.padding(blocks, shape.source_len, under)
        if not shape.causal:
            yield saved_blocks.padding(decoder, decoder.positions, under)
