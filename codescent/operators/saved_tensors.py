"""In: sizes of a layer. Out: the tensors that its operators keep for backward, on a CPU and on CUDA (`SavedTensor`).
Does not import torch and does not know a model: models/NAME/declare.py puts these parts together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from codescent.base.dtypes import WIDE
from codescent.plan.activations import COMPILED, CPU, CUDA, EAGER, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.objective import CROSS_ENTROPY, Objective

SMALL_VOCAB = 2048
"""A head with fewer rows does not round them up on a CPU: its time depends on the number of operations."""
WORTH_A_COPY = 256
"""Off a CPU, a head that reads so many tokens rounds its rows up: the copy costs little beside the products."""

IN_BLOCKS = ("none", "selective")
"""What a block keeps that `products` and `full` make again."""
UNLESS_RECOMPUTED = ("none",)
BLOCK_INPUTS = ("products", "full")
"""With these a block keeps its inputs, and is computed again."""
PRODUCTS = ("products",)


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of one micro-batch in training.

    Attributes:
        samples, positions: of the micro-batch; positions of source and target together.
        head_tokens: tokens whose loss the head computes.
        chunk_tokens: tokens whose logits are in memory at a time; 0: all.
        padded: whether layers read which positions are padding.
        documents: whether layers read where the documents of a sample begin.
        selects: whether a rank selects tokens of a sample (context parallelism).
        splits: whether a rank has some rows of the residual stream only (sequence parallelism, too).
        gathers: whether a layer that tp divides reads rows that it has gathered (sequence parallelism).
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
    documents: bool = False
    selects: bool = False
    splits: bool = False
    gathers: bool = False
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


def plus_one_norm(stream: Stream, name: str, *, entered: bool = True, again: bool = False) -> Iterator[SavedTensor]:
    """`operators.plus_one_norm`: keeps its input and a number of each row. `entered`: see `rms_norm`.

    `again`: its input is a sum with the output of such a norm, which compiled blocks make again.
    """
    for on in (CPU, EAGER) if again else ("",):
        yield stream.entered(f"{name} input", on=on) if entered else stream.rows(f"{name} input", on=on)
    yield stream.rows(f"{name} norm of a row", 1, dtype=stream.forward.wide)


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


def dropped(stream: Stream, name: str, width: int | None = None, *, ends: bool = False) -> Iterator[SavedTensor]:
    """The mask of dropout of the residual stream; off a CPU the keys of its rows, from which it is made again.

    `ends`: of what a block computes last. The compiler keeps this mask; of others it keeps at most the keys.
    """
    for device in (CPU, COMPILED) if ends else (CPU,):
        yield stream.rows(f"{name} dropout mask", width, dtype="bool", on=device)
    yield stream.rows(f"{name} dropout keys", 1, dtype="int64", on=EAGER if ends else CUDA)


def activated(stream: Stream, name: str, width: int, halves: int = 1, *, by_torch: int = 0) -> Iterator[SavedTensor]:
    """An activation and the matrix after it (`activations.activated_linear_`): h or its slope, and the value.

    `halves`: 2 if h has two halves. `by_torch`: tensors of `width` that torch's own operators keep in addition on CUDA.
    The compiler makes those again.
    """
    forward, value = stream.forward, f"{name} value"
    small = value if forward.precision == forward.wide else ""
    yield stream.columns(f"{name} activation input", halves * width)
    again: dict[str, Any] = {"layer": name, "under": UNLESS_RECOMPUTED, "product": name}
    if small:
        yield stream.columns(value, width, on=CPU, small=small, **again)
        yield stream.columns(value, width, on=CUDA, **again)
    else:
        yield stream.columns(value, width, **again)
    yield row_gradient(stream, name)
    if by_torch and not forward.defers:
        yield stream.columns(f"{name} factors", by_torch * width, on=EAGER, under=UNLESS_RECOMPUTED)


def block_inputs(stream: Stream, samples: int, keys: int) -> Iterator[SavedTensor]:
    """What a block keeps that is computed again: the stream, and the keys of dropout of all sites; 0: no dropout."""
    yield replace(stream.entered("block input"), under=BLOCK_INPUTS)
    if keys:
        dims = (Dim.WHOLE, Dim.SAMPLE)
        options: dict[str, Any] = {"dtype": "int64", "once": True, "under": BLOCK_INPUTS}
        yield stream.tensor("dropout keys", (keys, samples), dims, **options)


def product(stream: Stream, name: str, width: int) -> Iterator[SavedTensor]:
    """The product of a matrix that parallel.recompute = "products" keeps; its gradient, for that of the matrix."""
    yield replace(stream.columns(f"{name} product", width), under=PRODUCTS)
    yield stream.columns(f"{name} gradient", width, under=(), product=name)


def embedded(stream: Stream, layer: str) -> SavedTensor:
    """The tokens that an embedding looks up."""
    shape = (stream.forward.samples, stream.positions)
    return stream.tensor(f"{layer} tokens", shape, (Dim.SAMPLE, Dim.TOKEN), dtype="int64", layer=layer)


def _compared(stream: Stream, layer: str, rows: SavedTensor) -> Iterator[SavedTensor]:
    """What `operators.token_losses` keeps: the input of the head; of each token log Z, loss, gradient and column."""
    yield replace(rows, name="head input")
    dims, shape, wide = (Dim.SAMPLE, Dim.POSITION), (stream.forward.samples, stream.positions), stream.forward.wide
    for name, dtype in (("log Z", wide), ("loss", wide), ("loss gradient", wide), ("column", "int64")):
        yield stream.tensor(f"{layer} {name}", shape, dims, dtype=dtype)


def head_gradients(stream: Stream, layer: str, vocab: int, *, rows: SavedTensor, tied: int) -> Iterator[SavedTensor]:
    """What the head keeps (`operators.head`): the gradients of its input, like `rows`, and of its matrix.

    `tied`: the tokens of the embedding, if it has the same matrix; else 0. If they are several chunks, a CPU computes
    the gradient of such a matrix in the wide dtype. A head that compares answers (`operators.token_losses`) has no
    gradients yet: it keeps its input, and a few numbers of each token.
    """
    forward, width = stream.forward, stream.width
    if forward.objective.by_token:
        yield from _compared(stream, layer, rows)
        return
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
