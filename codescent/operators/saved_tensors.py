"""In: sizes of a layer. Out: the tensors that its operators keep for backward, on a CPU and on CUDA (`SavedTensor`).
Does not import torch and does not know a model: models/NAME/declare.py puts these parts together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from codescent.base.dtypes import WIDE
from codescent.plan.activations import CPU, CUDA, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.objective import CROSS_ENTROPY, Objective

BLOCK_QUERIES = 128
"""On a CPU, causal attention computes so many queries at a time."""
KEEP_HEAD_DIMS = 8
"""Up to seq_len = 8 * head_dim, causal attention on a CPU may keep its probabilities: they are no larger than the
activations of the feed-forward."""
SMALL_VOCAB = 2048
"""A head with fewer rows does not round them up on a CPU: its time depends on the number of operations."""
LSE_MULTIPLE = 32
"""The memory-efficient kernel for attention reads and writes the log-sum-exps of so many queries at a time."""
WORTH_A_COPY = 256
"""Off a CPU, a head that reads so many tokens rounds its rows up: the copy costs little beside the products."""

IN_BLOCKS = ("none", "selective")
"""What a block keeps that `products` and `full` make again."""
_UNLESS_RECOMPUTED = ("none",)
BLOCK_INPUTS = ("products", "full")
"""With these a block keeps its inputs, and is computed again."""
_PRODUCTS = ("products",)


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of one micro-batch in training.

    Attributes:
        samples, positions: of the micro-batch; positions of source and target together.
        head_tokens: tokens whose loss the head computes.
        chunk_tokens: tokens whose logits are in memory at a time; 0: all.
        padded: whether layers read which positions are padding.
        selects: whether a rank selects tokens of a sample (context parallelism).
        splits: whether a rank has some rows of the residual stream only (sequence parallelism, too).
        defers: whether gradients of weights are deferred: then a matrix keeps what it reads without a copy.
        divides: over how many ranks the heads are divided.
        whole: whether one part of the model has both the embedding and the head.
    """

    samples: int
    positions: int
    precision: str
    head_tokens: int
    chunk_tokens: int = 0
    padded: bool = False
    selects: bool = False
    splits: bool = False
    defers: bool = False
    divides: int = 1
    whole: bool = True
    objective: Objective = CROSS_ENTROPY

    @property
    def views(self) -> bool:
        """Whether a matrix that reads some positions of a tensor keeps the tensor, and no copy of these positions."""
        return self.samples == 1 or self.defers

    @property
    def wide(self) -> str:
        """Dtype of sums."""
        return WIDE[self.precision]


@dataclass(frozen=True)
class Stream:
    """The residual stream of some depths, which are alike.

    Attributes:
        depths: [first, end).
        positions: of a sample.
        width: channels.
        begins: the first depth that reads this stream.
        under: the values of parallel.recompute with which these depths keep what they compute.
        sliced: what a stage receives holds more than this stream: a layer that reads it as a matrix copies its part.
    """

    forward: ForwardPass
    depths: tuple[int, int]
    positions: int
    width: int
    begins: int = 1
    under: tuple[str, ...] = IN_BLOCKS
    sliced: bool = False

    def tensor(self, name: str, shape: tuple[int, ...], dims: tuple[Dim, ...], **more: Any) -> SavedTensor:
        """Any tensor that these depths keep."""
        options = {"dtype": self.forward.precision, "depths": self.depths, "under": self.under, **more}
        return SavedTensor(name, shape, dims, **options)

    def rows(self, name: str, width: int | None = None, **more: Any) -> SavedTensor:
        """Of each row of the residual stream so many channels: [B, T, width]; None: all channels."""
        shape = (self.forward.samples, self.positions, self.width if width is None else width)
        return self.tensor(name, shape, (Dim.SAMPLE, Dim.SEQUENCE, Dim.WHOLE), **more)

    def inputs(self, name: str, width: int | None = None, **more: Any) -> SavedTensor:
        """What a layer reads at each position, on every rank of tp: [B, T, width]."""
        shape = (self.forward.samples, self.positions, self.width if width is None else width)
        return self.tensor(name, shape, (Dim.SAMPLE, Dim.POSITION, Dim.WHOLE), **more)

    def columns(self, name: str, width: int, **more: Any) -> SavedTensor:
        """What a layer computes at each position, in parts by tp: [B, T, width]."""
        shape = (self.forward.samples, self.positions, width)
        return self.tensor(name, shape, (Dim.SAMPLE, Dim.POSITION, Dim.COLUMN), **more)

    def pairs(self, name: str, heads: int, keys: int, **more: Any) -> SavedTensor:
        """Of each head the pairs of a query and a key: [B, H, T, keys]."""
        shape = (self.forward.samples, heads, self.positions, keys)
        return self.tensor(name, shape, (Dim.SAMPLE, Dim.COLUMN, Dim.POSITION, Dim.WHOLE), **more)

    def entered(self, name: str, **more: Any) -> SavedTensor:
        """The residual stream as it comes into these depths."""
        return self.rows(name, begins=self.begins, **more)


def layer_norm(stream: Stream, name: str, *, entered: bool) -> Iterator[SavedTensor]:
    """Keeps its input, and mean and deviation of each row. `entered`: its input is the stream as it comes in."""
    yield stream.entered(f"{name} input") if entered else stream.rows(f"{name} input")
    yield from _both(
        stream.rows(f"{name} mean and deviation", 2), cpu=stream.forward.precision, cuda=stream.forward.wide
    )


def rms_norm(stream: Stream, name: str, *, entered: bool = True) -> Iterator[SavedTensor]:
    """Keeps its input and the norm of each row. A CPU keeps the input in the wide dtype, and each row divided by its
    norm. `entered`: its input is the stream as it comes in."""
    forward, read_as = stream.forward, stream.entered if entered else stream.rows
    if forward.wide == forward.precision:
        yield read_as(f"{name} input")
    else:
        yield stream.rows(f"{name} input", on=CPU, dtype=forward.wide)
        yield read_as(f"{name} input", on=CUDA)
    yield stream.rows(f"{name} norm of a row", 1, dtype=forward.wide)
    yield stream.rows(f"{name} divided", on=CPU, dtype=forward.wide, layer=name)


def _both(tensor: SavedTensor, *, cpu: str, cuda: str) -> Iterator[SavedTensor]:
    """A tensor whose dtype depends on the device."""
    if cpu == cuda:
        yield replace(tensor, dtype=cpu)
    else:
        yield replace(tensor, dtype=cpu, on=CPU)
        yield replace(tensor, dtype=cuda, on=CUDA)


def read(stream: Stream, layer: str, *, entered: bool = False) -> SavedTensor:
    """What a matrix of a block reads. `entered`: it is the stream as it comes in, or a part of what was received."""
    views = entered and (not stream.sliced or stream.forward.views)
    return stream.inputs(f"{layer} input", layer=layer, begins=stream.begins if views else 0, product=layer)


def row_gradient(stream: Stream, layer: str) -> SavedTensor:
    """The gradient of what a matrix adds to the stream. Like its input, it waits for the gradient of the matrix."""
    return stream.inputs(f"{layer} gradient", under=(), product=layer)


def dropped(stream: Stream, name: str, width: int | None = None) -> Iterator[SavedTensor]:
    """The mask of dropout of the residual stream; off a CPU the keys of its rows, from which it is made again."""
    yield stream.rows(f"{name} dropout mask", width, dtype="bool", on=CPU)
    yield stream.rows(f"{name} dropout keys", 1, dtype="int64", on=CUDA)


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention layer: query heads, key-value heads (groups), channels of a head, positions of the keys."""

    queries: int
    groups: int
    channels: int
    keys: int


def causal_attention(stream: Stream, name: str, heads: AttentionSizes) -> Iterator[SavedTensor]:
    """Causal self-attention without dropout. A CPU keeps the projections by head, and small probabilities."""
    qkv = f"{name}.qkv by head"
    projected = (heads.queries + 2 * heads.groups) * heads.channels
    yield stream.columns(qkv, projected, core=True)
    if heads.keys <= KEEP_HEAD_DIMS * heads.channels:
        shape = (stream.forward.samples, heads.queries, pairs_in_blocks(heads.keys))
        small = qkv if stream.forward.precision == stream.forward.wide else ""
        dims, more = (Dim.SAMPLE, Dim.COLUMN, Dim.WHOLE), {"on": CPU, "core": True, "small": small}
        yield stream.tensor(f"{name} probabilities", shape, dims, **more | {"under": _UNLESS_RECOMPUTED})
    yield from _log_sum_exp(stream, f"{name} log-sum-exp", heads, on=(CUDA,))
    if stream.forward.divides < heads.groups < heads.queries:  # the queries of one group need no copy
        yield stream.columns(f"{name} queries", heads.queries * heads.channels, on=CUDA, core=True)


def _log_sum_exp(
    stream: Stream, name: str, heads: AttentionSizes, on: tuple[str, ...], *, masked: bool = False, **more: Any
) -> Iterator[SavedTensor]:
    """A number of each query, in the wide dtype. The memory-efficient kernel of CUDA rounds the queries up."""
    options: dict[str, Any] = {"dtype": stream.forward.wide, "core": True, **more}
    for device in on:
        rounds = device == CUDA and is_memory_efficient(stream.forward.precision, masked=masked)
        queries = rounded_up(stream.positions) if rounds else stream.positions
        yield replace(stream, positions=queries).columns(name, heads.queries, on=device, **options)


def is_memory_efficient(precision: str, *, masked: bool = False) -> bool:
    """Whether CUDA computes attention by the memory-efficient kernel: flash attention has no fp32 and no mask."""
    return precision == "fp32" or masked


def rounded_up(queries: int) -> int:
    """For how many queries the memory-efficient kernel keeps a number."""
    return -(-queries // LSE_MULTIPLE) * LSE_MULTIPLE


def pairs_in_blocks(positions: int) -> int:
    """Pairs of a query and a key for which causal attention on a CPU computes probabilities, of one head."""
    whole, rest = divmod(positions, BLOCK_QUERIES)
    return BLOCK_QUERIES**2 * whole * (whole + 1) // 2 + rest * positions


def fused_attention(
    stream: Stream, name: str, heads: AttentionSizes, keys: Stream, padding: str = ""
) -> Iterator[SavedTensor]:
    """torch's scaled_dot_product_attention of all keys: what it reads, its log-sum-exp, and the mask in numbers.

    Its output is kept by the matrix after it, too. `padding`: the name of the sequence that has padding.
    """
    yield stream.columns(f"{name} queries", heads.queries * heads.channels, core=True)
    channels = 2 * heads.groups * heads.channels
    yield replace(keys.columns(f"{name} keys and values", channels, core=True), depths=stream.depths)
    yield from _log_sum_exp(stream, f"{name} log-sum-exp", heads, (CPU, CUDA), masked=bool(padding))
    if padding:
        shape = (stream.forward.samples, heads.keys)
        yield stream.tensor(f"{name} mask of {padding}", shape, (Dim.SAMPLE, Dim.WHOLE), core=True)


def attention_with_dropout(
    stream: Stream, name: str, heads: AttentionSizes, keys: Stream, *, causal: bool
) -> Iterator[SavedTensor]:
    """Attention operator by operator: queries, keys and values by head; what is dropped; probabilities twice."""
    channels = heads.groups * heads.channels
    yield stream.columns(f"{name} queries", heads.queries * heads.channels, core=True)
    yield replace(keys.columns(f"{name} keys and values", 2 * channels, core=True), depths=stream.depths)
    if causal:
        shape = (stream.positions, heads.keys)
        yield stream.tensor(f"{name} mask", shape, (Dim.WHOLE, Dim.WHOLE), dtype="bool", core=True)
    yield stream.pairs(f"{name} probabilities", heads.queries, heads.keys, core=True)
    yield stream.pairs(f"{name} dropout mask", heads.queries, heads.keys, dtype="bool", on=CPU, core=True)
    yield stream.pairs(f"{name} dropout keys", heads.queries, 1, dtype="int64", on=CUDA, core=True)
    yield stream.pairs(f"{name} probabilities after dropout", heads.queries, heads.keys, core=True)


def activated(stream: Stream, name: str, width: int, halves: int = 1, *, by_torch: int = 0) -> Iterator[SavedTensor]:
    """An activation and the matrix after it (`activations.activated_linear_`): h or its slope, and the value.

    `halves`: 2 if h has two halves. `by_torch`: tensors of `width` that torch's own operators keep in addition on CUDA.
    """
    forward, value = stream.forward, f"{name} value"
    small = value if forward.precision == forward.wide else ""
    yield stream.columns(f"{name} activation input", halves * width)
    again: dict[str, Any] = {"layer": name, "under": _UNLESS_RECOMPUTED, "product": name}
    if small:
        yield stream.columns(value, width, on=CPU, small=small, **again)
        yield stream.columns(value, width, on=CUDA, **again)
    else:
        yield stream.columns(value, width, **again)
    yield row_gradient(stream, name)
    if by_torch and not forward.defers:
        yield stream.columns(f"{name} factors", by_torch * width, on=CUDA, under=_UNLESS_RECOMPUTED)


def block_inputs(stream: Stream, samples: int, keys: int) -> Iterator[SavedTensor]:
    """What a block keeps that is computed again: the stream, and the keys of dropout of all sites; 0: no dropout."""
    yield replace(stream.entered("block input"), under=BLOCK_INPUTS)
    if keys:
        dims = (Dim.WHOLE, Dim.SAMPLE)
        options: dict[str, Any] = {"dtype": "int64", "once": True, "under": BLOCK_INPUTS}
        yield stream.tensor("dropout keys", (keys, samples), dims, **options)


def product(stream: Stream, name: str, width: int) -> Iterator[SavedTensor]:
    """The product of a matrix that parallel.recompute = "products" keeps; its gradient, for that of the matrix."""
    yield replace(stream.columns(f"{name} product", width), under=_PRODUCTS)
    yield stream.columns(f"{name} gradient", width, under=(), product=name)


def attention_product(
    stream: Stream, name: str, heads: AttentionSizes, *, causal: bool, masked: bool = False
) -> Iterator[SavedTensor]:
    """What parallel.recompute = "products" keeps of attention without dropout: the results of its kernel."""
    kept: dict[str, Any] = {"under": _PRODUCTS, "core": True}
    yield stream.columns(f"{name} product", heads.queries * heads.channels, **kept)
    projected = (heads.queries + 2 * heads.groups) * heads.channels
    if causal:
        yield stream.columns(f"{name}.qkv by head product", projected, on=CPU, **kept)
    on, name = (CUDA,) if causal else (CPU, CUDA), f"{name} log-sum-exp product"
    yield from _log_sum_exp(stream, name, heads, on, masked=masked, under=_PRODUCTS)


def embedded(stream: Stream, layer: str) -> SavedTensor:
    """The tokens that an embedding looks up."""
    shape = (stream.forward.samples, stream.positions)
    return stream.tensor(f"{layer} tokens", shape, (Dim.SAMPLE, Dim.TOKEN), dtype="int64", layer=layer)


def head_gradients(stream: Stream, layer: str, vocab: int, *, rows: SavedTensor, tied: int) -> Iterator[SavedTensor]:
    """What the head keeps (`operators.head`): the gradients of its input, like `rows`, and of its matrix.

    `tied`: the tokens of the embedding, if it has the same matrix; else 0. If they are several chunks, a CPU computes
    the gradient of such a matrix in the wide dtype.
    """
    forward, width = stream.forward, stream.width
    yield rows
    several, narrow = 0 < forward.chunk_tokens < forward.head_tokens, forward.precision != forward.wide
    is_wide = forward.whole and 0 < forward.chunk_tokens < tied
    options: dict[str, Any] = {"layer": layer, "dims": (Dim.COLUMN, Dim.WHOLE), "shape": (vocab, width)}
    options["product"] = layer  # no product waits for it: it waits with those that do
    name, least = f"{layer} gradient", 1 if forward.head_tokens >= WORTH_A_COPY else SMALL_VOCAB
    # A change of the dtype copies the rows of the matrix alone, without those that were added to round up.
    on_cpu: dict[str, Any] = {"on": CPU, "rounded": 0 if narrow and (several or is_wide) else SMALL_VOCAB}
    yield stream.tensor(name, **options, **on_cpu, dtype=forward.wide if is_wide else forward.precision)
    yield stream.tensor(name, **options, on=CUDA, rounded=0 if narrow and several else least)
