"""In: sizes of a layer. Out: the operators that it computes beside products with matrices (`LayerOperator`).
Does not import torch and does not know a model: models/NAME/declare.py puts these parts together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codescent.operators.saved_attention import AttentionSizes, by_mask, keeps_probabilities, pairs_in_blocks
from codescent.operators.saved_tensors import Stream
from codescent.plan.activations import CPU, CUDA, SMALL_BYTES
from codescent.plan.divided import Dim
from codescent.plan.operators import LayerOperator

# FLOPs of an element are those of the formulas: an exponential counts as one. What counts is what an operator moves.
OF_BLOCKS = ("full",)
"""With these, backward computes all of a block again."""
BUT_PRODUCTS = ("products", "full")
"""With these, backward computes again what follows from the products of COLUMN matrices."""
NORM: dict[str, Any] = {"flops": (8.0, 12.0), "moves": (2.0, 3.0), "again": BUT_PRODUCTS}
"""Forward reads and writes a tensor. Backward reads it and its gradient, and writes a gradient."""
SUM: dict[str, Any] = {"flops": (1.0, 1.0), "moves": (3.0, 3.0), "again": BUT_PRODUCTS}
"""Forward adds two tensors, and backward two gradients."""
DROPOUT: dict[str, Any] = {"flops": (2.0, 1.0), "moves": (2.0, 2.0), "again": BUT_PRODUCTS}
ACTIVATION: dict[str, Any] = {"flops": (10.0, 15.0), "moves": (2.0, 3.0), "again": BUT_PRODUCTS}
ROTATION: dict[str, Any] = {"flops": (3.0, 3.0), "moves": (2.0, 2.0), "again": OF_BLOCKS}
SOFTMAX: dict[str, Any] = {"flops": (5.0, 4.0), "moves": (4.0, 3.0), "again": BUT_PRODUCTS}
"""Scaled, masked, and divided by sums."""


def _operator(
    stream: Stream, name: str, layer: str, shape: tuple[int, ...], dims: tuple[Dim, ...], **more: Any
) -> LayerOperator:
    options = {"dtype": stream.forward.precision, "depths": stream.depths, **more}
    return LayerOperator(name, layer, shape, dims, **options)


def rows(stream: Stream, name: str, layer: str, **more: Any) -> LayerOperator:
    """Goes through the rows of the residual stream: [B, T, D]."""
    shape = (stream.forward.samples, stream.positions, stream.width)
    return _operator(stream, name, layer, shape, (Dim.SAMPLE, Dim.SEQUENCE, Dim.WHOLE), **more)


def columns(stream: Stream, name: str, layer: str, width: int, **more: Any) -> LayerOperator:
    """Goes through what a layer computes at each position, in parts by tp: [B, T, width]."""
    shape = (stream.forward.samples, stream.positions, width)
    return _operator(stream, name, layer, shape, (Dim.SAMPLE, Dim.POSITION, Dim.COLUMN), **more)


def norm(stream: Stream, name: str) -> LayerOperator:
    """The norm of each row."""
    return rows(stream, name, name, **NORM)


def scaled(stream: Stream, name: str, layer: str) -> LayerOperator:
    """Rows times a number, forward and back."""
    return rows(stream, name, layer, flops=(1.0, 1.0), moves=(2.0, 2.0), again=())


def added(stream: Stream, name: str, layer: str) -> LayerOperator:
    """A sum of rows."""
    return rows(stream, name, layer, **SUM)


def residual(stream: Stream, name: str, layer: str, *, dropout: bool) -> Iterator[LayerOperator]:
    """The sum with the residual stream. `dropout`: of the layer's output."""
    if dropout:
        yield dropped(stream, f"{name} dropout", layer)
    yield added(stream, f"{name} residual", layer)


def dropped(stream: Stream, name: str, layer: str) -> LayerOperator:
    """Dropout of rows."""
    return rows(stream, name, layer, **DROPOUT)


def embedded(stream: Stream, layer: str) -> LayerOperator:
    """The rows of an embedding: forward reads and writes each, backward adds its gradient to one of the matrix."""
    return rows(stream, layer, layer, flops=(0.0, 1.0), moves=(2.0, 3.0))


def activated(stream: Stream, name: str, layer: str, width: int, halves: int, *, joins: str) -> LayerOperator:
    """An activation and the matrix after it, `joins` (`activations.activated_linear_`).

    With two halves it reads two tensors, and writes two gradients. parallel.recompute = "selective" keeps no value.
    """
    more = halves - 1.0
    again = ("selective", *BUT_PRODUCTS)
    costs = ACTIVATION | {"moves": (2.0 + more, 3.0 + 2.0 * more), "again": again, "joins": joins}
    return columns(stream, name, layer, width, **costs)


def rotated(stream: Stream, name: str, layer: str, width: int) -> LayerOperator:
    """The rotation of queries and keys, forward and back."""
    return columns(stream, name, layer, width, **ROTATION)


def normed_heads(stream: Stream, name: str, layer: str, width: int) -> LayerOperator:
    """The norm of queries and keys."""
    return columns(stream, name, layer, width, **NORM)


def attention(
    stream: Stream, name: str, layer: str, heads: AttentionSizes, *, causal: bool, dropout: bool
) -> Iterator[LayerOperator]:
    """Attention: queries times keys, softmax, probabilities times values; 2 FLOPs for each product of two numbers.

    Without dropout a kernel computes it as a whole. Its backward multiplies queries and keys again: 5 products for 2
    (Dao et al. 2022, "FlashAttention", appendix B.2). Where it is causal, it computes the pairs that are not masked.
    Separate documents have fewer pairs than a plan can know: it has those of samples that are one document.
    """
    if dropout:
        yield from _step_by_step(stream, name, layer, heads)
        return
    queries, forward = stream.positions, stream.forward
    whole, pairs = (queries + 1) / (2 * queries), pairs_in_blocks(queries, heads.window)
    on_cuda = pairs / queries**2 if heads.by_blocks else whole
    share = on_cuda if causal and not by_mask(stream, heads) else 1.0  # a mask: what it hides is computed, too
    yield from _products(stream, name, layer, heads, share, CUDA if causal else "", scores=OF_BLOCKS, anew=True)
    if causal:
        # A CPU computes blocks of queries. It keeps small probabilities, see `saved_attention.causal_attention`.
        size = forward.samples * heads.queries // forward.divides * pairs * 4
        keeps = keeps_probabilities(stream, heads) and (forward.precision != forward.wide or size <= SMALL_BYTES)
        again = ("selective", "products", "full") if keeps else OF_BLOCKS
        yield from _products(stream, name, layer, heads, pairs / queries**2, CPU, scores=again, anew=not keeps)


def _products(
    stream: Stream,
    name: str,
    layer: str,
    heads: AttentionSizes,
    share: float,
    on: str,
    *,
    scores: tuple[str, ...],
    anew: bool,
    values: tuple[str, ...] = OF_BLOCKS,
) -> Iterator[LayerOperator]:
    """Both products. `share` of the pairs is computed. `anew`: backward computes the scores again in any case."""
    dims = (Dim.SAMPLE, Dim.COLUMN, Dim.POSITION, Dim.WHOLE, Dim.WHOLE)
    of_values = heads.values if heads.values and on == CPU else heads.channels  # CUDA's kernels read what pads them
    for what, again, more, channels in (
        ("scores", scores, anew, heads.channels),
        ("values", values, False, of_values),
    ):
        shape = (stream.forward.samples, heads.queries, stream.positions, heads.keys, channels)
        flops = (2.0 * share, (6.0 if more else 4.0) * share)
        options: dict[str, Any] = {"shared": heads.queries // heads.groups, "again": again, "on": on}
        yield _operator(stream, f"{name} {what}", layer, shape, dims, flops=flops, moves=(1.0, 2.0), **options)


def _step_by_step(stream: Stream, name: str, layer: str, heads: AttentionSizes) -> Iterator[LayerOperator]:
    yield from _products(stream, name, layer, heads, 1.0, "", scores=BUT_PRODUCTS, anew=False, values=BUT_PRODUCTS)
    shape = (stream.forward.samples, heads.queries, stream.positions, heads.keys)
    dims = (Dim.SAMPLE, Dim.COLUMN, Dim.POSITION, Dim.WHOLE)
    for what, costs in (("softmax", SOFTMAX), ("dropout", DROPOUT)):
        yield _operator(stream, f"{name} {what}", layer, shape, dims, **costs)


def loss(stream: Stream, layer: str, vocab: int, *, capped: bool = False) -> LayerOperator:
    """The cross-entropy: forward reads the logits twice and overwrites them by their gradient. Of answers that are
    compared, backward overwrites the logits, which it has computed again.

    `capped`: it caps them before, writes slopes, and multiplies the gradient by them.
    """
    shape, more = (stream.forward.head_tokens, vocab), 6.0 if capped else 0.0
    costs = {"flops": (8.0 + more, 0.0), "moves": (3.0 + more, 0.0)}
    if stream.forward.objective.by_token:
        costs = {"flops": (4.0 + more, 4.0 + more), "moves": (2.0 + more, 2.0 + more)}
    return _operator(stream, "loss", layer, shape, (Dim.SAMPLE, Dim.COLUMN), **costs)
