"""In: a preset's name and free sizes. Out: the shape of a GPT-2 and its parameters, with roles and initial values.
Does not import torch and allocates nothing: the planner reads it, and the module is built to match it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from codescent.base.errors import UserError
from codescent.models.shape import WEIGHT_STD, EqualHeads, Size, fill, linear, norm, wrong_sizes
from codescent.plan.shard import Parameter, Role

# OpenAI's sizes (Radford et al. 2019, table 2, as released): ffn_dim is 4 * hidden_dim in all of them.
PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-medium": {"num_layers": 24, "num_heads": 16, "hidden_dim": 1024, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-large": {"num_layers": 36, "num_heads": 20, "hidden_dim": 1280, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-xl": {"num_layers": 48, "num_heads": 25, "hidden_dim": 1600, "vocab_size": 50257, "seq_len": 1024},
}

SIZES = ("num_layers", "num_heads", "hidden_dim", "ffn_dim", "vocab_size", "seq_len")


@dataclass(frozen=True)
class GPT2Shape(EqualHeads):
    """Sizes of a GPT-2. `dropout` is one probability for embeddings, attention and residuals, as GPT-2 has it."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    bias: bool = True
    dropout: float = 0.0


SHAPE = GPT2Shape


def resolve(
    sizes: Mapping[str, Size | None],
    preset: str | None = None,
    *,
    bias: bool | None = None,
    dropout: float = 0.0,
    where: str = "model",
) -> GPT2Shape:
    """The shape that a preset and free sizes give; a size that is given wins over the preset's.

    Args:
        sizes: any of SIZES; None or absent means the preset's. `ffn_dim` is 4 * hidden_dim unless given.
        preset: a key of PRESETS, or None: then every size but ffn_dim must be given.
        bias: whether linear layers and norms have a bias; None: they have.
        dropout: probability in [0, 1).
        where: how the user wrote these keys, for the messages.

    Raises:
        UserError: every problem at once.
    """
    full, problems = fill("gpt2", sizes, preset, PRESETS, SIZES, where)
    if "ffn_dim" not in full and "hidden_dim" in full:
        full["ffn_dim"] = 4 * full["hidden_dim"]
    problems += wrong_sizes(full, [name for name in SIZES if name != "ffn_dim"], PRESETS, dropout, where)
    if problems:
        raise UserError(*problems)
    return GPT2Shape(**full, bias=bias is not False, dropout=dropout)


def parameters(shape: GPT2Shape) -> tuple[Parameter, ...]:
    """Every parameter, in the order in which forward first reads it; the head is tied to `tok.weight`.

    Matrices are [output, input], as torch.nn.Linear has them. Initial values are GPT-2's: normal of deviation 0.02,
    the two projections that write to the residual stream 0.02 / sqrt(2 * num_layers), norms 1 and 0, biases 0.
    """
    return tuple(_parameters(shape))


def _parameters(shape: GPT2Shape) -> Iterator[Parameter]:
    width, ffn, end = shape.hidden_dim, shape.ffn_dim, shape.num_layers + 1
    residual_std = WEIGHT_STD / math.sqrt(2 * shape.num_layers)
    yield Parameter("tok.weight", (shape.vocab_size, width), Role.VOCAB, WEIGHT_STD, depths=(0, end))
    yield Parameter("pos.weight", (shape.seq_len, width), Role.POSITION, WEIGHT_STD, depths=(0,))
    for layer in range(shape.num_layers):
        at, depth = f"blocks.{layer}", layer + 1
        yield from norm(f"{at}.norm_1", width, shape.bias, depth)
        yield from linear(f"{at}.attn.qkv", width, 3 * width, Role.COLUMN, WEIGHT_STD, shape.bias, depth)
        yield from linear(f"{at}.attn.out", width, width, Role.ROW, residual_std, shape.bias, depth)
        yield from norm(f"{at}.norm_2", width, shape.bias, depth)
        yield from linear(f"{at}.mlp.up", width, ffn, Role.COLUMN, WEIGHT_STD, shape.bias, depth)
        yield from linear(f"{at}.mlp.down", ffn, width, Role.ROW, residual_std, shape.bias, depth)
    yield from norm("norm", width, shape.bias, end)


def forward_flops(shape: GPT2Shape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth: embedding, blocks, head.

    2 per element of a matrix, and 4 s h for the two products of attention with s positions (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters", appendix); an embedding is a look-up.
    """
    width = shape.hidden_dim
    block = 2.0 * width * (4 * width + 2 * shape.ffn_dim) + 4.0 * seq_len * width
    return (0.0, *[block] * shape.num_layers, 2.0 * width * shape.vocab_size)
