"""In: the sizes of a BERT. Out: presets; the sizes, checked; for each parameter its name, shape, role (how it may be
split over ranks) and standard deviation of initial values.
Does not import torch or allocate memory, because the planner reads this file. module.py builds the same parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from codescent.models import block_operations, saved_blocks
from codescent.models.saved_blocks import DROPOUT_SITES
from codescent.models.shape import WEIGHT_STD, EqualHeads, Kind, attention, feed_forward, linear, norm, wide_ffn
from codescent.operators import operations, saved_tensors
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import CUDA, RECOMPUTES, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

# Devlin et al. 2019, "BERT", section 3, as released: ffn_dim is 4 * hidden_dim in both.
_UNCASED = {"vocab_size": 30522, "seq_len": 512}
PRESETS: dict[str, dict[str, Any]] = {
    "bert-base-uncased": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "ffn_dim": 3072, **_UNCASED},
    "bert-large-uncased": {"num_layers": 24, "num_heads": 16, "hidden_dim": 1024, "ffn_dim": 4096, **_UNCASED},
}
HEADS = ("mlm", "qa")
"""Heads: "mlm" predicts masked tokens, "qa" the first and last token of an answer. The first head is the default."""

SEGMENTS = 2
ANSWER_ENDS = 2
"""An answer has a first and a last position."""
NORM_EPS = 1e-12
MASKED_SHARE = 0.15
"""Share of the positions whose tokens the head "mlm" predicts (Devlin et al. 2019, section 3.1)."""


@dataclass(frozen=True)
class BertShape(EqualHeads):
    """Sizes of a BERT. `dropout` is one probability for embeddings, attention and residuals; `head` is one of HEADS."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    head: str = "mlm"
    bias: bool = True
    dropout: float = 0.0
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0
    extras: ClassVar[bool] = True  # every layer reads the lengths of the samples
    refuses: ClassVar[Mapping[str, str]] = {
        "cp": "context parallelism computes causal attention only, and in a BERT every position sees all positions "
        "but padding"
    }

    @property
    def causal_layers(self) -> int:
        """None: every position sees all positions."""
        return 0

    @property
    def head_share(self) -> float:  # type: ignore[override]
        """Share of the positions that the head reads."""
        return MASKED_SHARE if self.head == "mlm" else 1.0

    @property
    def head_rows(self) -> int:
        """Rows of all matrices of the head together."""
        return self.hidden_dim + self.vocab_size if self.head == "mlm" else 2


def _wrong(full: Mapping[str, Any], bias: bool | None, dropout: float, where: str) -> Iterator[str]:
    if bias is False:
        yield f"{where}.bias = false: a BERT has biases; leave it out"


def parameters(shape: BertShape) -> Iterator[Parameter]:
    """Every parameter, in the order in which forward first reads it. `head.bias` is first in its head.

    Initial values are BERT's: normal with standard deviation 0.02; norms have weight 1 and bias 0; other biases are 0.
    (BERT truncates the normal distribution at two standard deviations. We do not.)
    """
    width, end, std = shape.hidden_dim, shape.num_layers + 1, WEIGHT_STD
    tied = (0, end) if shape.head == "mlm" else (0,)
    yield Parameter("tok.weight", (shape.vocab_size, width), Role.VOCAB, std, depths=tied)
    yield Parameter("pos.weight", (shape.seq_len, width), Role.POSITION, std, depths=(0,))
    yield Parameter("segment.weight", (SEGMENTS, width), Role.POSITION, std, depths=(0,))
    yield from norm("embed_norm", width, True, 0)
    for layer in range(shape.num_layers):
        block, depth = f"blocks.{layer}", layer + 1
        yield from attention(f"{block}.attn", shape, std, std, depth)
        yield from norm(f"{block}.norm_1", width, True, depth)
        yield from feed_forward(f"{block}.mlp", shape, std, std, depth)
        yield from norm(f"{block}.norm_2", width, True, depth)
    if shape.head == "mlm":
        yield Parameter("head.bias", (shape.vocab_size,), Role.BIAS_COLUMN, depths=(end,), fixed=True)
        yield from linear("head.dense", width, width, Role.WHOLE, std, True, end)
        yield from norm("head.norm", width, True, end)
    else:
        yield from linear("head", width, 2, Role.LOGITS, std, True, end)


def saved(shape: BertShape, forward: ForwardPass) -> Iterator[SavedTensor]:
    """What each depth keeps for backward."""
    width, padded = shape.hidden_dim, "the sample" if forward.padded else ""
    yield from saved_blocks.embedding(forward, width, ("tok", forward.positions), dropout=shape.dropout)
    start = Stream(forward, (0, 1), forward.positions, width, under=RECOMPUTES)
    if forward.padded:  # samples with lengths have segments, too
        yield start.rows("segments, one-hot", SEGMENTS, layer="segment")
    yield from saved_tensors.layer_norm(start, "embed_norm", entered=False)
    blocks = Stream(forward, (1, shape.num_layers + 1), forward.positions, width)
    if forward.padded:
        yield saved_blocks.padding(
            blocks, forward.positions, RECOMPUTES if shape.dropout else saved_tensors.BLOCK_INPUTS
        )
    yield from saved_blocks.self_attention(blocks, shape, causal=False, padding=padded, entered=True)
    yield from saved_tensors.layer_norm(blocks, "norm_1", entered=False)
    yield from saved_blocks.feed_forward(blocks, shape, "up")
    yield from saved_tensors.layer_norm(blocks, "norm_2", entered=False)
    yield from saved_blocks.block_inputs(blocks, shape, DROPOUT_SITES)
    yield from (_saved_of_masked if shape.head == "mlm" else _saved_of_span)(saved_blocks.head(forward, shape), shape)


def _saved_of_masked(end: Stream, shape: BertShape) -> Iterator[SavedTensor]:
    """What the head "mlm" keeps: of the tokens that it predicts alone."""
    forward, rows, whole = end.forward, (end.forward.head_tokens, shape.hidden_dim), (Dim.WHOLE, Dim.WHOLE)
    yield end.tensor("masked rows", rows[:1], whole[:1], dtype="int64")
    yield end.tensor("head.dense input", rows, whole, layer="head.dense", product="head.dense")
    yield end.tensor("head.dense gradient", rows, whole, under=(), product="head.dense")
    yield end.tensor("head.dense output", rows, whole)
    few = Stream(forward, end.depths, 1, shape.hidden_dim, under=RECOMPUTES)
    for tensor in saved_tensors.layer_norm(few, "head.norm", entered=False):
        yield replace(tensor, shape=(rows[0], tensor.shape[-1]), dims=whole)
    gradient, tokens = end.tensor("head input gradient", rows, whole), forward.samples * forward.positions
    yield from saved_tensors.head_gradients(end, "tok", shape.vocab_size, rows=gradient, tied=tokens)
    yield end.tensor("more targets than rows", (1,), whole[:1], dtype="bool", on=CUDA)
    yield end.tensor("head.bias gradient", (shape.vocab_size,), (Dim.COLUMN,), layer="head")


def _saved_of_span(end: Stream, shape: BertShape) -> Iterator[SavedTensor]:
    """What the head "qa" and its loss keep. Every rank computes the loss of all positions."""
    forward, samples = end.forward, end.forward.samples
    dims, scores = (Dim.SAMPLE, Dim.WHOLE, Dim.WHOLE), (samples, ANSWER_ENDS, forward.positions)
    yield end.entered("head input", layer="head", product="head")
    whole = end.inputs if samples == 1 else end.rows  # of one sample a rank's rows are a view of all rows
    yield whole("head gradient", ANSWER_ENDS, under=(), product="head")
    yield end.tensor("answers", scores[:2], dims[:2], dtype="int64")
    yield end.tensor("log-softmax", scores, dims, dtype=forward.wide)
    yield end.tensor("number of answers", (1,), dims[2:], dtype=forward.wide)
    if forward.padded:
        yield end.tensor("padding of the logits", (samples, forward.positions), dims[:2], dtype="bool")
    if forward.objective.label_smoothing:
        yield end.tensor("log-softmax to smooth", scores, dims, dtype=forward.wide)
        if forward.padded:
            yield end.tensor("lengths", (samples,), dims[:1], dtype="int64")
    if forward.objective.z_loss:
        yield end.tensor("logits", scores, dims, dtype=forward.wide)
        yield end.tensor("log Z", scores[:2], dims[:2], dtype=forward.wide)


def operators(shape: BertShape, forward: ForwardPass) -> Iterator[LayerOperator]:
    """What each depth computes beside products with matrices."""
    start = Stream(forward, (0, 1), forward.positions, shape.hidden_dim)
    yield operations.embedded(start, "tok")
    yield operations.added(start, "positions", "pos")
    if forward.padded:
        yield operations.added(start, "segments", "segment")
    yield operations.norm(start, "embed_norm")
    if shape.dropout:
        yield operations.dropped(start, "embedding dropout", "embed_norm")
    blocks = Stream(forward, (1, shape.num_layers + 1), forward.positions, shape.hidden_dim)
    yield from block_operations.self_attention(blocks, shape, causal=False)
    yield operations.norm(blocks, "norm_1")
    yield from block_operations.feed_forward(blocks, shape, "up")
    yield operations.norm(blocks, "norm_2")
    end = block_operations.head(forward, shape)
    if shape.head == "mlm":
        rows = replace(end, forward=replace(forward, samples=1), positions=forward.head_tokens)
        yield operations.columns(rows, "head activation", "head.dense", shape.hidden_dim, **operations.ACTIVATION)
        yield operations.norm(rows, "head.norm")
        yield from block_operations.for_head(rows, shape, "head.norm")
        yield operations.loss(end, "tok", shape.vocab_size)
    else:
        yield replace(operations.loss(end, "head", ANSWER_ENDS), dims=(Dim.SAMPLE, Dim.WHOLE))  # tp divides no answer


KIND = Kind(
    "bert",
    BertShape,
    "Bert",
    PRESETS,
    parameters,
    wide_ffn,
    saved,
    operators,
    wrong=_wrong,
    words={"head": HEADS},
    options=("dropout",),
    encodes=True,
    uncompiled="has been compiled in one process only so far: no compiled run with tp > 1 has finished yet",
)
