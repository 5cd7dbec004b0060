"""In: a preset's name, free sizes and options. Out: the shape of an encoder-decoder, its parameters, its FLOPs.
Does not import torch and allocates nothing: the planner reads it, and the module is built to match it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from codescent.base.errors import UserError
from codescent.models.shape import EqualHeads, Size, fill, wrong_sizes
from codescent.plan.shard import Parameter, Role

# Vaswani et al. 2017, table 3; the base is torch.nn.Transformer's default. Their vocabulary of pairs of bytes has
# "about 37000 tokens" (section 5.1). Lengths are not theirs: sinusoidal positions know no longest sequence.
_BASE: dict[str, Any] = {
    "num_encoder_layers": 6,
    "num_decoder_layers": 6,
    "num_heads": 8,
    "hidden_dim": 512,
    "ffn_dim": 2048,
    "vocab_size": 37000,
    "source_len": 256,
    "target_len": 256,
}
PRESETS: dict[str, dict[str, Any]] = {
    "transformer-base": _BASE,
    "transformer-big": _BASE | {"num_heads": 16, "hidden_dim": 1024, "ffn_dim": 4096},
}

_SOURCE, _TARGET = 0, 1  # numbers of `streams`
OPTIONS: dict[str, tuple[str, ...]] = {
    "norm": ("last", "first"),
    "activation": ("relu", "gelu"),
    "embedding": ("tied", "untied", "none"),
}
"""Options that are words, with the values that there are, the default first."""
SIZES = (*_BASE, *OPTIONS, "causal")


@dataclass(frozen=True)
class TransformerShape(EqualHeads):
    """Sizes and options of an encoder-decoder; the defaults are torch.nn.Transformer's and the paper's.

    A sample is `source_len` positions of the source and then those of the target, one sequence after the other.

    Attributes:
        dropout: one probability for all the places where torch.nn.Transformer drops, and for the embeddings.
        norm: "last", after each sum (Vaswani et al. 2017), or "first", before each layer's parts.
        causal: whether a position of the target sees earlier ones only.
        embedding: "tied", one matrix for source, target and head (section 3.4); "untied", three; "none": source and
            target are vectors, and so is the output, whose squared error is the loss.
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
    norm: str = "last"
    activation: str = "relu"
    causal: bool = True
    embedding: str = "tied"

    @property
    def num_layers(self) -> int:
        """Layers of both stacks; the decoder's are counted on."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def seq_len(self) -> int:
        """Positions of a sample, those of both sequences: rows of the residual stream."""
        return self.source_len + self.target_len

    @property
    def streams(self) -> tuple[int, ...]:
        """Lengths of the sequences that lie one after the other in the residual stream; the loss is of the last."""
        return self.source_len, self.target_len

    @property
    def refuses(self) -> Mapping[str, str]:
        """Axes of the mesh, and keys of [parallel], that this model does not go with, and why."""
        refused = {
            "cp": "in an encoder-decoder each rank would need a part of two sequences, of which every decoder layer "
            "reads the other whole, and the attention that travels is causal attention over one"
        }
        if self.embedding == "none":
            refused["sequence_parallel"] = "the squared error of vectors is computed on whole sequences"
        return refused


SHAPE = TransformerShape


def resolve(
    sizes: Mapping[str, Size | None],
    preset: str | None = None,
    *,
    bias: bool | None = None,
    dropout: float = 0.0,
    where: str = "model",
) -> TransformerShape:
    """The shape that a preset and free sizes give; a size that is given wins over the preset's.

    Args:
        sizes: any of SIZES; None or absent means the preset's. Where nothing says otherwise, `ffn_dim` is 4 *
            hidden_dim, and options are TransformerShape's.
        preset: a key of PRESETS, or None: then every size but ffn_dim must be given (without embedding, vocab_size
            is not asked for either: it is 0).
        bias: whether linear layers and norms have a bias; None: they have.
        dropout: probability in [0, 1).
        where: how the user wrote these keys, for the messages.

    Raises:
        UserError: every problem at once.
    """
    full, problems = fill("transformer", sizes, preset, PRESETS, SIZES, where)
    if "ffn_dim" not in full and "hidden_dim" in full:
        full["ffn_dim"] = 4 * full["hidden_dim"]
    embeds = full.get("embedding") != "none"
    asked = [name for name in _BASE if name != "ffn_dim" and (embeds or name != "vocab_size")]
    problems += wrong_sizes(full, asked, PRESETS, dropout, where)
    problems += [
        f"{where}.{name}: {full[name]!r} is none of {', '.join(words)}"
        for name, words in OPTIONS.items()
        if full.get(name, words[0]) not in words
    ]
    if problems:
        raise UserError(*problems)
    if not embeds:
        full["vocab_size"] = 0
    return TransformerShape(**full, bias=bias is not False, dropout=dropout)


def parameters(shape: TransformerShape) -> tuple[Parameter, ...]:
    """Every parameter, in the order in which forward first reads it.

    Matrices are [output, input], as torch.nn.Linear has them. Initial values: matrices normal with the variance of
    Glorot and Bengio (2010), 2 / (inputs + outputs), queries, keys and values as one matrix of 3 * hidden_dim outputs
    as torch.nn.Transformer draws them; embeddings with variance 1 / hidden_dim, so that rows scaled by
    sqrt(hidden_dim) are of the size of the positions added to them; norms 1 and 0, biases 0.

    Depths: 0 the embeddings of source and target, then the encoder's layers, the last of them with the encoder's norm,
    then the decoder's, and at the end the decoder's norm and the head.
    """
    return tuple(_parameters(shape))


def _parameters(shape: TransformerShape) -> Iterator[Parameter]:
    end = shape.num_layers + 1
    if shape.embedding == "tied":
        yield _vocabulary("tok.weight", shape, (0, end))
    elif shape.embedding == "untied":
        yield _vocabulary("source_tok.weight", shape, (0,), _SOURCE)
        yield _vocabulary("target_tok.weight", shape, (0,), _TARGET)
    for layer in range(shape.num_layers):
        yield from _block(shape, layer)
    yield from _norm("norm", shape, end)
    if shape.embedding == "untied":
        yield _vocabulary("head.weight", shape, (end,), _TARGET)


def _block(shape: TransformerShape, layer: int) -> Iterator[Parameter]:
    at, last = f"blocks.{layer}", shape.num_encoder_layers - 1
    parts = {"attn": _attention, "mlp": _feed_forward} if layer <= last else _DECODER_PARTS
    for number, (name, part) in enumerate(parts.items(), start=1):
        norm = _norm(f"{at}.norm_{number}", shape, layer + 1)
        inside = part(shape, f"{at}.{name}", layer)
        yield from chain(norm, inside) if shape.norm == "first" else chain(inside, norm)
    if layer == last:
        # With the layer, not with those that read it: so one stage has it, and what is sent on is what they read.
        yield from _norm(f"{at}.norm_end", shape, layer + 1)


def _attention(shape: TransformerShape, at: str, layer: int) -> Iterator[Parameter]:
    width, stream = shape.hidden_dim, _stream(shape, layer)
    std = math.sqrt(2 / (4 * width))
    yield from _linear(f"{at}.qkv", width, 3 * width, Role.COLUMN, shape, layer, stream, std)
    yield from _linear(f"{at}.out", width, width, Role.ROW, shape, layer, stream)


def _cross_attention(shape: TransformerShape, at: str, layer: int) -> Iterator[Parameter]:
    width = shape.hidden_dim
    std = math.sqrt(2 / (4 * width))
    yield from _linear(f"{at}.q", width, width, Role.COLUMN, shape, layer, _TARGET, std)
    yield from _linear(f"{at}.kv", width, 2 * width, Role.COLUMN, shape, layer, _SOURCE, std)
    yield from _linear(f"{at}.out", width, width, Role.ROW, shape, layer, _TARGET)


def _feed_forward(shape: TransformerShape, at: str, layer: int) -> Iterator[Parameter]:
    width, ffn, stream = shape.hidden_dim, shape.ffn_dim, _stream(shape, layer)
    yield from _linear(f"{at}.up", width, ffn, Role.COLUMN, shape, layer, stream)
    yield from _linear(f"{at}.down", ffn, width, Role.ROW, shape, layer, stream)


_DECODER_PARTS = {"attn": _attention, "cross": _cross_attention, "mlp": _feed_forward}


def _stream(shape: TransformerShape, layer: int) -> int:
    return _SOURCE if layer < shape.num_encoder_layers else _TARGET


def _vocabulary(name: str, shape: TransformerShape, depths: tuple[int, ...], stream: int | None = None) -> Parameter:
    width = shape.hidden_dim
    return Parameter(name, (shape.vocab_size, width), Role.VOCAB, 1 / math.sqrt(width), depths=depths, stream=stream)


def _norm(name: str, shape: TransformerShape, depth: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (shape.hidden_dim,), Role.NORM, mean=1.0, depths=(depth,))
    if shape.bias:
        yield Parameter(f"{name}.bias", (shape.hidden_dim,), Role.NORM, depths=(depth,))


def _linear(
    name: str,
    inputs: int,
    outputs: int,
    role: Role,
    shape: TransformerShape,
    layer: int,
    stream: int,
    std: float | None = None,
) -> Iterator[Parameter]:
    std, depths = math.sqrt(2 / (inputs + outputs)) if std is None else std, (layer + 1,)
    yield Parameter(f"{name}.weight", (outputs, inputs), role, std, depths=depths, stream=stream)
    if shape.bias:
        bias_role = Role.BIAS_COLUMN if role is Role.COLUMN else Role.BIAS_ROW
        yield Parameter(f"{name}.bias", (outputs,), bias_role, depths=depths, stream=stream)


def forward_flops(shape: TransformerShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass at each depth, per position of a sample of `seq_len`, source and target together.

    2 per element of a matrix and position that it reads, and 4 h per pair of query and key (as gpt2_shape counts them).
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
