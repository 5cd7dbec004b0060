"""In: the sizes of a GPT-2. Out: presets; the sizes, checked; for each parameter its name, shape, role (how it may be
split over ranks) and standard deviation of initial values.
Does not import torch or allocate memory, because the planner reads this file. module.py builds the same parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from codescent.models import block_operations, saved_blocks
from codescent.models.saved_blocks import DROPOUT_SITES
from codescent.models.shape import WEIGHT_STD, EqualHeads, Kind, attention, feed_forward, norm, wide_ffn
from codescent.operators import operations, saved_tensors
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import SavedTensor
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

# OpenAI's sizes (Radford et al. 2019, table 2, as released): ffn_dim is 4 * hidden_dim in all of them.
PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-medium": {"num_layers": 24, "num_heads": 16, "hidden_dim": 1024, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-large": {"num_layers": 36, "num_heads": 20, "hidden_dim": 1280, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-xl": {"num_layers": 48, "num_heads": 25, "hidden_dim": 1600, "vocab_size": 50257, "seq_len": 1024},
}


@dataclass(frozen=True)
class GPT2Shape(EqualHeads):
    """Sizes of a GPT-2. `dropout` is one probability for embeddings, attention and residuals."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    bias: bool = True
    dropout: float = 0.0
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0


def parameters(shape: GPT2Shape) -> Iterator[Parameter]:
    """Every parameter, in the order in which forward first reads it; the head is tied to `tok.weight`.

    Initial values are GPT-2's: normal with standard deviation 0.02; for the two projections that write to the residual
    stream 0.02 / sqrt(2 * num_layers). Norms have weight 1 and bias 0; other biases are 0.
    """
    width, end = shape.hidden_dim, shape.num_layers + 1
    residual_std = WEIGHT_STD / math.sqrt(2 * shape.num_layers)
    yield Parameter("tok.weight", (shape.vocab_size, width), Role.VOCAB, WEIGHT_STD, depths=(0, end))
    yield Parameter("pos.weight", (shape.seq_len, width), Role.POSITION, WEIGHT_STD, depths=(0,))
    for layer in range(shape.num_layers):
        block, depth = f"blocks.{layer}", layer + 1
        yield from norm(f"{block}.norm_1", width, shape.bias, depth)
        yield from attention(f"{block}.attn", shape, WEIGHT_STD, residual_std, depth)
        yield from norm(f"{block}.norm_2", width, shape.bias, depth)
        yield from feed_forward(f"{block}.mlp", shape, WEIGHT_STD, residual_std, depth)
    yield from norm("norm", width, shape.bias, end)


def saved(shape: GPT2Shape, forward: ForwardPass) -> Iterator[SavedTensor]:
    """What each depth keeps for backward."""
    width = shape.hidden_dim
    yield from saved_blocks.embedding(forward, width, ("tok", forward.positions), dropout=shape.dropout)
    yield from saved_blocks.positions_of_documents(forward, width)
    blocks = Stream(forward, (1, shape.num_layers + 1), forward.positions, width)
    yield from saved_tensors.layer_norm(blocks, "norm_1", entered=True)
    yield from saved_blocks.self_attention(blocks, shape, causal=True)
    yield from saved_tensors.layer_norm(blocks, "norm_2", entered=False)
    yield from saved_blocks.feed_forward(blocks, shape, "up")
    yield from saved_blocks.block_inputs(blocks, shape, DROPOUT_SITES)
    end = saved_blocks.head(forward, shape)
    yield from saved_tensors.layer_norm(end, "norm", entered=True)
    yield from saved_blocks.loss(end, shape, "tok", tied=True)


def operators(shape: GPT2Shape, forward: ForwardPass) -> Iterator[LayerOperator]:
    """What each depth computes beside products with matrices."""
    start = Stream(forward, (0, 1), forward.positions, shape.hidden_dim)
    yield operations.embedded(start, "tok")
    yield operations.added(start, "positions", "pos")
    if shape.dropout:
        yield operations.dropped(start, "embedding dropout", "pos")
    blocks = Stream(forward, (1, shape.num_layers + 1), forward.positions, shape.hidden_dim)
    yield operations.norm(blocks, "norm_1")
    yield from block_operations.self_attention(blocks, shape, causal=True)
    yield operations.norm(blocks, "norm_2")
    yield from block_operations.feed_forward(blocks, shape, "up")
    end = block_operations.head(forward, shape)
    yield operations.norm(end, "norm")
    yield from block_operations.for_head(end, shape, "norm")
    yield operations.loss(end, "tok", shape.vocab_size)


KIND = Kind("gpt2", GPT2Shape, "GPT2", PRESETS, parameters, wide_ffn, saved, operators, generates=True, separates=True)
