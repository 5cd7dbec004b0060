"""In: the sizes of an encoder-decoder. Out: presets; the sizes, checked; FLOPs of a forward pass; for each parameter
its name, shape, role (how it may be split over ranks) and standard deviation of initial values.
Does not import torch or allocate memory, because the planner reads this file. module.py builds the same parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from codescent.models import block_operations
from codescent.models.shape import EqualHeads, Kind, attention, feed_forward, linear, norm, wide_ffn
from codescent.models.transformer.saved import saved
from codescent.operators import operations
from codescent.operators.saved_attention import AttentionSizes
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

# Vaswani et al. 2017, table 3; the base is torch.nn.Transformer's default. Their byte-pair vocabulary has "about 37000
# tokens" (section 5.1). The lengths are our choice: sinusoidal positions have no longest sequence.
_LAYERS = {"num_encoder_layers": 6, "num_decoder_layers": 6}
_LENGTHS = {"vocab_size": 37000, "source_len": 256, "target_len": 256}
PRESETS: dict[str, dict[str, Any]] = {
    "transformer-base": {**_LAYERS, "num_heads": 8, "hidden_dim": 512, "ffn_dim": 2048, **_LENGTHS},
    "transformer-big": {**_LAYERS, "num_heads": 16, "hidden_dim": 1024, "ffn_dim": 4096, **_LENGTHS},
}

_SOURCE, _TARGET = 0, 1  # indices of `streams`
OPTIONS: dict[str, tuple[str, ...]] = {
    "norm": ("last", "first"),
    "activation": ("relu", "gelu"),
    "embedding": ("tied", "untied", "none"),
}
"""Options that are words, with their values. The first is the default."""


@dataclass(frozen=True)
class TransformerShape(EqualHeads):
    """Sizes and options of an encoder-decoder; the defaults are torch.nn.Transformer's and the paper's.

    A sample has `source_len` positions of the source, followed by `target_len` positions of the target.

    Attributes:
        dropout: one probability for every dropout of torch.nn.Transformer, and for the embeddings.
        norm: "last", after each sum (Vaswani et al. 2017), or "first", before each layer's parts.
        causal: whether a position of the target sees earlier ones only.
        embedding: "tied": one matrix for source, target and head (section 3.4). "untied": three matrices. "none":
            source, target and output are vectors, and the loss is the squared error.
    """

    num_encoder_layers: int
    num_decoder_layers: int
    num_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    source_len: int
    target_len: int
    bias: bool = True
    dropout: float = 0.0
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0
    norm: str = "last"
    activation: str = "relu"
    embedding: str = "tied"
    causal: bool = True

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> TransformerShape:
        """The shape with these fields; without embeddings there is no vocabulary."""
        return cls(**{**sizes, "vocab_size": 0} if sizes.get("embedding") == "none" else sizes)

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Number of layers of encoder and decoder. The encoder's layers come first."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def seq_len(self) -> int:  # type: ignore[override]
        """Positions of a sample, source and target together."""
        return self.source_len + self.target_len

    @property
    def streams(self) -> tuple[int, ...]:  # type: ignore[override]
        """Lengths of source and target. Only positions of the target have a loss."""
        return self.source_len, self.target_len

    @property
    def encoder_layers(self) -> int:  # type: ignore[override]
        """Number of layers that read only the source."""
        return self.num_encoder_layers

    @property
    def causal_layers(self) -> int:
        """The layers of the decoder, if it is causal."""
        return self.num_decoder_layers if self.causal else 0

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """Context parallelism; without embeddings also sequence parallelism."""
        refused = {
            "cp": "in an encoder-decoder the decoder also attends to a second sequence, the source, but context "
            "parallelism computes causal self-attention of one sequence only"
        }
        if self.embedding == "none":
            refused["sequence_parallel"] = "the squared error of vectors is computed on whole sequences"
        return refused


def _wrong(full: Mapping[str, Any], bias: bool | None, dropout: float, where: str) -> Iterator[str]:
    if full.get("embedding") == "none" and full.get("mup_base_dim"):
        yield (
            f'{where}.mup_base_dim: with {where}.embedding = "none" the data has vectors of hidden_dim numbers, but '
            "mu-P needs the same data at every width; leave it out"
        )


def _derived(full: Mapping[str, Any]) -> dict[str, int | None]:
    return wide_ffn(full) | ({"vocab_size": None} if full.get("embedding") == "none" else {})


def parameters(shape: TransformerShape) -> Iterator[Parameter]:
    """Every parameter, in the order in which forward first reads it.

    Matrices are initially normal with the variance of Glorot and Bengio (2010), 2 / (inputs + outputs). As in
    torch.nn.Transformer, queries, keys and values count as one matrix with 3 * hidden_dim outputs. Embeddings have
    variance 1 / hidden_dim: multiplied by sqrt(hidden_dim), they are as large as the positions added to them. Norms
    have weight 1 and bias 0; other biases are 0. The encoder's norm has the depth of the last encoder layer.
    """
    end = shape.num_layers + 1
    if shape.embedding == "tied":
        yield _vocabulary("tok.weight", shape, (0, end))
    elif shape.embedding == "untied":
        yield _vocabulary("source_tok.weight", shape, (0,), _SOURCE)
        yield _vocabulary("target_tok.weight", shape, (0,), _TARGET)
    for layer in range(shape.num_layers):
        yield from _block(shape, layer)
    yield from norm("norm", shape.hidden_dim, shape.bias, end, _TARGET)
    if shape.embedding == "untied":
        yield _vocabulary("head.weight", shape, (end,), _TARGET)


def _vocabulary(name: str, shape: TransformerShape, depths: tuple[int, ...], stream: int | None = None) -> Parameter:
    width = shape.hidden_dim
    return Parameter(
        name, (shape.vocab_size, width), Role.VOCAB, 1 / math.sqrt(shape.base_dim), depths=depths, stream=stream
    )


def _block(shape: TransformerShape, layer: int) -> Iterator[Parameter]:
    block, depth, width = f"blocks.{layer}", layer + 1, shape.hidden_dim
    encodes, last = layer < shape.num_encoder_layers, layer == shape.num_encoder_layers - 1
    stream = _SOURCE if encodes else _TARGET
    qkv_std, square_std = _glorot(shape, width, 3 * width), _glorot(shape, width, width)
    ffn_std = _glorot(shape, width, shape.ffn_dim)
    parts = [attention(f"{block}.attn", shape, qkv_std, square_std, depth, stream)]
    if not encodes:
        parts.append(_cross_attention(f"{block}.cross", shape, qkv_std, square_std, depth))
    parts.append(feed_forward(f"{block}.mlp", shape, ffn_std, ffn_std, depth, stream))
    for number, part in enumerate(parts, start=1):
        around = norm(f"{block}.norm_{number}", width, shape.bias, depth, stream)
        yield from chain(around, part) if shape.norm == "first" else chain(part, around)
    if last:
        # Its depth is that of its layer. The decoder layers that read its output have other depths: one stage holds it.
        yield from norm(f"{block}.norm_end", width, shape.bias, depth, stream)


def _cross_attention(name: str, shape: TransformerShape, std: float, out_std: float, depth: int) -> Iterator[Parameter]:
    width, bias = shape.hidden_dim, shape.bias
    yield from linear(f"{name}.q", width, width, Role.COLUMN, std, bias, depth, _TARGET)
    head = (shape.head_dim, shape.head_dim)  # rows of its key and its value
    yield from linear(f"{name}.kv", width, 2 * width, Role.COLUMN, std, bias, depth, _SOURCE, head)
    yield from linear(f"{name}.out", width, width, Role.ROW, out_std, bias, depth, _TARGET)


def _glorot(shape: TransformerShape, inputs: int, outputs: int) -> float:
    """That of the base of mu-P, whose inputs and outputs are as many times fewer."""
    return math.sqrt(2 * shape.growth.width / (inputs + outputs))


def forward_flops(shape: TransformerShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass at each depth, per position of a sample of `seq_len`, source and target together.

    A matrix costs 2 per element and position that it reads. Attention costs 4 h per pair of query and key (see
    `flops_of_blocks`).
    """
    width, source = shape.hidden_dim, shape.source_len
    target = seq_len - source
    ffn = 4.0 * width * shape.ffn_dim
    encoder = source * (8.0 * width**2 + ffn) + 4.0 * width * source**2
    cross = 4.0 * width**2 * (target + source) + 4.0 * width * target * source
    decoder = target * (8.0 * width**2 + ffn) + 4.0 * width * target**2 + cross
    head = 2.0 * target * width * shape.vocab_size
    depths = (0.0, *[encoder] * shape.num_encoder_layers, *[decoder] * shape.num_decoder_layers, head)
    return tuple(flops / seq_len for flops in depths)


def operators(shape: TransformerShape, forward: ForwardPass) -> Iterator[LayerOperator]:
    """What each depth computes beside products with matrices."""
    width, last, layers = shape.hidden_dim, shape.num_encoder_layers, shape.num_layers
    target, start = forward.positions - shape.source_len, Stream(forward, (0, 1), forward.positions, width)
    tokens = {"tied": {"tok": forward.positions}, "untied": {"source_tok": shape.source_len, "target_tok": target}}
    matrices = tokens.get(shape.embedding, {})
    for name, positions in matrices.items():
        yield operations.embedded(replace(start, positions=positions), name)
    if matrices:
        yield operations.added(start, "positions", list(matrices)[-1])
        if shape.dropout:
            yield operations.dropped(start, "embedding dropout", list(matrices)[-1])
    encoder = Stream(forward, (1, last + 1), shape.source_len, width)
    decoder = Stream(forward, (last + 1, layers + 1), target, width)
    yield from _operators_of_layer(shape, encoder, None)
    yield operations.norm(replace(encoder, depths=(last, last + 1)), "norm_end")
    yield from _operators_of_layer(shape, decoder, encoder)
    end = replace(decoder, depths=(layers + 1, layers + 2))
    yield operations.norm(end, "norm")
    yield from block_operations.for_head(end, shape, "norm")
    if shape.embedding == "none":
        yield operations.rows(end, "squared error", "norm", **operations.SUM)
    else:
        yield operations.loss(end, "tok" if shape.embedding == "tied" else "head", shape.vocab_size)


def _operators_of_layer(shape: TransformerShape, stream: Stream, source: Stream | None) -> Iterator[LayerOperator]:
    """Of a layer of the encoder, or of the decoder, which reads the encoder's output `source`."""
    yield operations.norm(stream, "norm_1")
    yield from block_operations.self_attention(stream, shape, causal=source is not None and shape.causal)
    if source is not None:
        heads = AttentionSizes(shape.num_heads, shape.num_heads, shape.head_dim, source.positions)
        drops = shape.dropout > 0
        yield operations.norm(stream, "norm_2")
        yield from operations.attention(stream, "cross", "cross.kv", heads, causal=False, dropout=drops)
        yield from operations.residual(stream, "cross", "cross.out", dropout=drops)
    yield operations.norm(stream, "norm_2" if source is None else "norm_3")
    yield operations.columns(stream, "mlp activation", "mlp.up", shape.ffn_dim, **operations.ACTIVATION)
    if shape.dropout:
        yield operations.columns(stream, "mlp inner dropout", "mlp.up", shape.ffn_dim, **operations.DROPOUT)
    yield from operations.residual(stream, "mlp", "mlp.down", dropout=shape.dropout > 0)


KIND = Kind(
    "transformer",
    TransformerShape,
    "Transformer",
    PRESETS,
    parameters,
    _derived,
    saved,
    operators,
    forward_flops,
    wrong=_wrong,
    words=OPTIONS,
    uncompiled="has losses that are not finite when it is compiled for a CPU, and the cause is not known yet",
)
