"""In: sizes of an attention layer. Out: what attention keeps for backward, on a CPU and on CUDA (`SavedTensor`).
Does not import torch. saved_tensors.py has the other operators; models/saved_blocks.py puts them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from codescent.operators.saved_tensors import BLOCK_INPUTS, IN_BLOCKS, PRODUCTS, UNLESS_RECOMPUTED, Stream
from codescent.plan.activations import COMPILED, CPU, CUDA, EAGER, RECOMPUTES, SavedTensor
from codescent.plan.divided import Dim

BLOCK_QUERIES = 128
"""On a CPU, causal attention computes so many queries at a time."""
KEEP_HEAD_DIMS = 8
"""Up to seq_len = 8 * head_dim, causal attention on a CPU may keep its probabilities: they are no larger than the
activations of the feed-forward."""
BEGINS, OFFSETS = "where documents begin", "offsets of documents"
"""Names of these tensors: see `documents`."""
FEW_DOCUMENTS = 8
"""What a sample with fewer documents has, with padding (`data.documents.ROUNDED`)."""
LSE_MULTIPLE = 32
"""The memory-efficient kernel for attention reads and writes the log-sum-exps of so many queries at a time."""


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention layer: query heads, key-value heads (groups), channels of a head, positions of the keys.

    `window`: of how many positions a query sees the keys; 0: there is no window. `cap`: of the scores; 0: none.
    `values`: channels of a value, which is as wide as a key in memory; 0: as many.
    """

    queries: int
    groups: int
    channels: int
    keys: int
    window: int = 0
    cap: float = 0.0
    values: int = 0

    @property
    def output(self) -> int:
        """Channels of the output of all heads."""
        return self.queries * (self.values or self.channels)

    @property
    def by_blocks(self) -> bool:
        """Whether causal attention is computed block by block on every device (`ScoreTraits.by_blocks`)."""
        return 0 < self.window < self.keys or self.cap > 0.0


def head_norm(stream: Stream, name: str, heads: AttentionSizes, *, over_all: bool) -> Iterator[SavedTensor]:
    """A norm of queries and keys: its input, and a number of each head, or of all queries and of all keys.

    A compiled block keeps such a number for each query head of a group, and the scales as the norm reads them.
    """
    projected, normed = (heads.queries + 2 * heads.groups) * heads.channels, heads.queries // heads.groups + 1
    yield stream.columns(f"{name} norm input", projected)
    if over_all:
        for numbers, places in ((2, (CPU, EAGER)), (normed, (COMPILED,))):
            for on in places:
                yield stream.inputs(f"{name} norm of all heads", numbers, dtype=stream.forward.wide, on=on)
        scales, dims = heads.groups * normed * heads.channels, Dim.COLUMN
    else:
        yield stream.columns(f"{name} norm of a head", heads.queries + heads.groups, dtype=stream.forward.wide)
        scales, dims = normed * heads.channels, Dim.WHOLE
    yield stream.tensor(f"{name} norm scales", (scales,), (dims,), on=COMPILED)


def keeps_probabilities(stream: Stream, heads: AttentionSizes) -> bool:
    """Whether causal attention on a CPU keeps its probabilities if they are small: without documents or a cap."""
    return heads.keys <= KEEP_HEAD_DIMS * heads.channels and not stream.forward.documents and not heads.cap


def by_mask(stream: Stream, heads: AttentionSizes) -> bool:
    """Whether documents are a mask on CUDA: its kernel of variable length computes in half precision only."""
    return stream.forward.documents and stream.forward.precision != "bf16" and not heads.by_blocks


def in_blocks(stream: Stream, heads: AttentionSizes) -> bool:
    """Whether CUDA computes causal attention block by block. Its kernel for documents has windows."""
    return heads.by_blocks and (stream.forward.precision != "bf16" or not stream.forward.documents or heads.cap > 0)


def documents(stream: Stream, heads: AttentionSizes, *, dropout: bool) -> Iterator[SavedTensor]:
    """What blocks read of documents, once for a chunk. Blocks that are computed again keep both tensors; compiled ones
    keep the one that they read. The stream has the depths of all blocks; the sizes are those of some.

    Where documents begin is int64 for each position. On CUDA its kernel reads their offsets, too: int32 for each
    document; declared are those of samples with at most 7 documents.
    """
    if not stream.forward.documents:
        return
    samples, reads = stream.forward.samples, BLOCK_INPUTS if dropout else RECOMPUTES
    by_kernel = not (dropout or by_mask(stream, heads) or in_blocks(stream, heads))
    options: dict[str, Any] = {"dtype": "int64", "once": True}
    for device, under in (
        (CPU, reads),
        (EAGER if by_kernel else CUDA, reads if in_blocks(stream, heads) else BLOCK_INPUTS),
    ):
        shape, dims = (samples, stream.positions), (Dim.SAMPLE, Dim.WHOLE)
        yield stream.tensor(BEGINS, shape, dims, on=device, under=under, **options)
    options |= {"dtype": "int32", "on": CUDA if by_kernel else EAGER}
    for core, kept in ((False, BLOCK_INPUTS), (True, IN_BLOCKS if by_kernel else ())):
        numbers = (samples * FEW_DOCUMENTS + 1,)
        yield stream.tensor(OFFSETS, numbers, (Dim.WHOLE,), core=core, under=kept, **options)


def causal_attention(stream: Stream, name: str, heads: AttentionSizes) -> Iterator[SavedTensor]:
    """Causal self-attention without dropout. By blocks it keeps the projections by head, on a CPU and small
    probabilities."""
    qkv, formula = f"{name}.qkv by head", by_formula(stream.forward.precision, heads)
    projected = (heads.queries + 2 * heads.groups) * heads.channels
    yield stream.columns(qkv, projected, core=True, on=CPU if formula else "")
    if keeps_probabilities(stream, heads):
        shape = (stream.forward.samples, heads.queries, pairs_in_blocks(heads.keys, heads.window))
        small = qkv if stream.forward.precision == stream.forward.wide else ""
        dims, more = (Dim.SAMPLE, Dim.COLUMN, Dim.WHOLE), {"on": CPU, "core": True, "small": small}
        yield stream.tensor(f"{name} probabilities", shape, dims, **more | {"under": UNLESS_RECOMPUTED})
    if in_blocks(stream, heads):
        return
    if formula:
        yield from formula_attention(stream, name, heads, stream, memory=projected)
        return
    yield from _log_sum_exp(stream, f"{name} log-sum-exp", heads, on=(CUDA,), masked=by_mask(stream, heads))
    if by_mask(stream, heads):
        shape, dims = (stream.forward.samples, heads.keys, heads.keys), (Dim.SAMPLE, Dim.WHOLE, Dim.WHOLE)
        yield stream.tensor(f"{name} mask of documents", shape, dims, on=CUDA, core=True)
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


def by_formula(precision: str, heads: AttentionSizes) -> bool:
    """Whether CUDA has no kernel: none computes fp64, and none of fp32 reads the keys of groups as they are. Attention
    by blocks needs none."""
    lacks = precision == "fp64" or (precision == "fp32" and heads.groups < heads.queries)
    return lacks and not heads.by_blocks


def formula_attention(
    stream: Stream, name: str, heads: AttentionSizes, keys: Stream, *, memory: int
) -> Iterator[SavedTensor]:
    """What torch's formula keeps on CUDA: scaled queries and keys, values, and probabilities, of each query head.

    `memory`: channels of the product that has the values. Those of one sample, without groups, stay in it.
    """
    channels, views = heads.queries * heads.channels, stream.forward.samples == 1 and heads.groups == heads.queries
    options: dict[str, Any] = {"on": CUDA, "core": True}
    yield stream.columns(f"{name} queries of the formula", channels, **options)
    for what, width in (("keys", channels), ("values", memory if views else channels)):
        yield replace(keys.columns(f"{name} {what} of the formula", width, **options), depths=stream.depths)
    yield stream.pairs(f"{name} probabilities of the formula", heads.queries, heads.keys, **options)


def rounded_up(queries: int) -> int:
    """For how many queries the memory-efficient kernel keeps a number."""
    return -(-queries // LSE_MULTIPLE) * LSE_MULTIPLE


def pairs_in_blocks(positions: int, window: int = 0) -> int:
    """Pairs of a query and a key for which causal attention on a CPU computes probabilities, of one head."""
    blocks, rest = divmod(positions, BLOCK_QUERIES)
    pairs = BLOCK_QUERIES**2 * _up_to(blocks) + rest * positions
    if not 0 < window < positions:
        return pairs
    whole = -(-(window - 1) // BLOCK_QUERIES)  # blocks whose queries see the first key, all of them
    late = max(0, blocks - whole)  # full blocks behind these; block `whole + i` skips first_key of its first query
    skipped = late * first_key(whole * BLOCK_QUERIES, window) + BLOCK_QUERIES * _up_to(late - 1)
    return pairs - BLOCK_QUERIES * skipped - rest * first_key(blocks * BLOCK_QUERIES, window)


def _up_to(number: int) -> int:
    """1 + 2 + ... + number."""
    return number * (number + 1) // 2


def first_key(start: int, window: int) -> int:
    """The first key that a block of queries from `start` on sees. `window` 0: there is none."""
    return max(0, start - window + 1) if window else 0


def fused_attention(
    stream: Stream, name: str, heads: AttentionSizes, keys: Stream, padding: str = ""
) -> Iterator[SavedTensor]:
    """torch's scaled_dot_product_attention of all keys: what it reads, its log-sum-exp, and the mask in numbers.

    Its output is kept by the matrix after it, too. `padding`: the name of the sequence that has padding.
    """
    on = CPU if by_formula(stream.forward.precision, heads) else ""
    yield stream.columns(f"{name} queries", heads.queries * heads.channels, core=True, on=on)
    channels = 2 * heads.groups * heads.channels
    yield replace(keys.columns(f"{name} keys and values", channels, core=True, on=on), depths=stream.depths)
    yield from _log_sum_exp(stream, f"{name} log-sum-exp", heads, (on,) if on else (CPU, CUDA), masked=bool(padding))
    if padding:
        shape = (stream.forward.samples, heads.keys)
        yield stream.tensor(f"{name} mask of {padding}", shape, (Dim.SAMPLE, Dim.WHOLE), core=True, on=on)
    if on:
        memory = channels + heads.queries * heads.channels * (stream == keys)
        yield from formula_attention(stream, name, heads, keys, memory=memory)


def output(stream: Stream, layer: str, heads: AttentionSizes, *, causal: bool) -> Iterator[SavedTensor]:
    """What attention without dropout computes, which the matrix `layer` reads. A fused kernel keeps it, too."""
    alone = by_formula(stream.forward.precision, heads) or (causal and in_blocks(stream, heads))
    if heads.values:  # a kernel keeps the output with the channels of keys, of which the matrix reads a copy of some
        yield stream.columns(f"{layer} input", heads.output, layer=layer, product=layer)
        if not alone:
            yield stream.columns(f"{layer} padded output", heads.queries * heads.channels, on=CUDA, core=True)
        return
    width = heads.queries * heads.channels
    for device, only in ((CPU, causal), (CUDA, alone)):
        yield stream.columns(f"{layer} input", width, layer=layer if only else "", product=layer, on=device)


def attention_with_dropout(
    stream: Stream, name: str, heads: AttentionSizes, keys: Stream, *, causal: bool
) -> Iterator[SavedTensor]:
    """Attention operator by operator: queries, keys and values by head; what is dropped; probabilities twice.

    A compiled block keeps the mask. Instead of probabilities it may keep scores, with two numbers of each row.
    """
    channels = heads.groups * heads.channels
    yield stream.columns(f"{name} queries", heads.queries * heads.channels, core=True)
    yield replace(keys.columns(f"{name} keys and values", 2 * channels, core=True), depths=stream.depths)
    if causal:
        samples = stream.forward.samples if stream.forward.documents else 1
        shape = (samples, stream.positions, heads.keys)
        dims = (Dim.SAMPLE if stream.forward.documents else Dim.WHOLE, Dim.WHOLE, Dim.WHOLE)
        yield stream.tensor(f"{name} mask", shape, dims, dtype="bool", core=True)
    yield stream.pairs(f"{name} probabilities", heads.queries, heads.keys, core=True)
    for device in (CPU, COMPILED):
        yield stream.pairs(f"{name} dropout mask", heads.queries, heads.keys, dtype="bool", on=device, core=True)
    yield stream.pairs(f"{name} dropout keys", heads.queries, 1, dtype="int64", on=EAGER, core=True)
    of_rows: dict[str, Any] = {"dtype": stream.forward.wide, "on": COMPILED, "core": True}
    yield stream.pairs(f"{name} maximum and sum of a row", heads.queries, 2, **of_rows)
    yield stream.pairs(f"{name} probabilities after dropout", heads.queries, heads.keys, core=True)


def attention_product(
    stream: Stream, name: str, heads: AttentionSizes, *, causal: bool, masked: bool = False, normed: bool = False
) -> Iterator[SavedTensor]:
    """What parallel.recompute = "products" keeps of attention without dropout: the results of its kernel.

    `normed`: queries and keys are. Else compiled blocks keep no product of which attention by blocks keeps the turn.
    """
    kept: dict[str, Any] = {"under": PRODUCTS, "core": True}
    formula = by_formula(stream.forward.precision, heads)
    yield stream.columns(f"{name} product", heads.queries * heads.channels, **kept, on=CPU if formula else "")
    projected = (heads.queries + 2 * heads.groups) * heads.channels
    blocks = causal and in_blocks(stream, heads)
    places = (("",) if normed else (CPU, EAGER)) if blocks else (CPU,)
    for device in places if causal else ():
        yield stream.columns(f"{name}.qkv by head product", projected, on=device, **kept)
    on = (*(() if causal else (CPU,)), *(() if formula or blocks else (CUDA,)))
    yield from _log_sum_exp(stream, f"{name} log-sum-exp product", heads, on, masked=masked, under=PRODUCTS)
