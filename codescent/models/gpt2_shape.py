"""In: a preset's name and free sizes. Out: the shape of a GPT-2 and its parameters, with roles and initial values.
Does not import torch and allocates nothing: the planner reads it, and the module is built to match it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from codescent.errors import UserError
from codescent.plan.shard import Parameter, Role

# OpenAI's sizes (Radford et al. 2019, table 2, as released): ffn_dim is 4 * hidden_dim in all of them.
PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-medium": {"num_layers": 24, "num_heads": 16, "hidden_dim": 1024, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-large": {"num_layers": 36, "num_heads": 20, "hidden_dim": 1280, "vocab_size": 50257, "seq_len": 1024},
    "gpt2-xl": {"num_layers": 48, "num_heads": 25, "hidden_dim": 1600, "vocab_size": 50257, "seq_len": 1024},
}

SIZES = ("num_layers", "num_heads", "hidden_dim", "ffn_dim", "vocab_size", "seq_len")
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class GPT2Shape:
    """Sizes of a GPT-2. `dropout` is one probability for embeddings, attention and residuals, as GPT-2 has it."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    bias: bool = True
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_dim // self.num_heads


def resolve(
    sizes: Mapping[str, int | None],
    preset: str | None = None,
    *,
    bias: bool = True,
    dropout: float = 0.0,
    where: str = "model",
) -> GPT2Shape:
    """The shape that a preset and free sizes give; a size that is given wins over the preset's.

    Args:
        sizes: any of SIZES; None or absent means the preset's. `ffn_dim` is 4 * hidden_dim unless given.
        preset: a key of PRESETS, or None: then every size but ffn_dim must be given.
        bias: whether linear layers and norms have a bias.
        dropout: probability in [0, 1).
        where: how the user wrote these keys, for the messages.

    Raises:
        UserError: every problem at once.
    """
    problems = [f"{where}.{name}: no such size; sizes are {', '.join(SIZES)}" for name in sizes if name not in SIZES]
    if preset is not None and preset not in PRESETS:
        problems.append(f"{where}.preset: {_unknown_preset(preset)}")
        raise UserError(*problems)
    full: dict[str, int] = dict(PRESETS[preset]) if preset is not None else {}
    full.update({name: size for name, size in sizes.items() if size is not None and name in SIZES})
    if "ffn_dim" not in full and "hidden_dim" in full:
        full["ffn_dim"] = 4 * full["hidden_dim"]
    missing = [name for name in SIZES if name not in full and name != "ffn_dim"]
    if missing:
        keys = ", ".join(f"{where}.{name}" for name in missing)
        problems.append(f"{keys}: not given; give them, or {where}.preset (one of {', '.join(PRESETS)})")
    problems += [
        f"{where}.{name}: {size} is not a size; it must be at least 1" for name, size in full.items() if size < 1
    ]
    if not 0.0 <= dropout < 1.0:
        problems.append(f"{where}.dropout: {dropout} is not a probability in [0, 1)")
    heads, width = full.get("num_heads", 0), full.get("hidden_dim", 0)
    if heads > 0 and width > 0 and width % heads:
        problems.append(f"{where}.num_heads: {_indivisible(heads, width, where)}")
    if problems:
        raise UserError(*problems)
    return GPT2Shape(**full, bias=bias, dropout=dropout)


def _unknown_preset(preset: str) -> str:
    near = difflib.get_close_matches(preset, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no preset {preset!r}{hint} Presets: {', '.join(PRESETS)}"


def _indivisible(heads: int, width: int, where: str) -> str:
    divisors = [number for number in range(1, width + 1) if width % number == 0]
    below = max(number for number in divisors if number < heads) if heads > 1 else 1
    above = min((number for number in divisors if number > heads), default=below)
    near_heads = " or ".join(str(number) for number in sorted({below, above}))
    near_widths = " or ".join(str(number) for number in (width // heads * heads, -(-width // heads) * heads) if number)
    return (
        f"{heads} heads do not divide {where}.hidden_dim = {width}; nearest: "
        f"num_heads = {near_heads} for this width, hidden_dim = {near_widths} for these heads"
    )


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
        yield from _norm(f"{at}.norm_1", shape, depth)
        yield from _linear(f"{at}.attn.qkv", width, 3 * width, Role.COLUMN, WEIGHT_STD, shape.bias, depth)
        yield from _linear(f"{at}.attn.out", width, width, Role.ROW, residual_std, shape.bias, depth)
        yield from _norm(f"{at}.norm_2", shape, depth)
        yield from _linear(f"{at}.mlp.up", width, ffn, Role.COLUMN, WEIGHT_STD, shape.bias, depth)
        yield from _linear(f"{at}.mlp.down", ffn, width, Role.ROW, residual_std, shape.bias, depth)
    yield from _norm("norm", shape, end)


def _norm(name: str, shape: GPT2Shape, depth: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (shape.hidden_dim,), Role.NORM, mean=1.0, depths=(depth,))
    if shape.bias:
        yield Parameter(f"{name}.bias", (shape.hidden_dim,), Role.NORM, depths=(depth,))


def _linear(
    name: str, inputs: int, outputs: int, role: Role, std: float, bias: bool, depth: int
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (outputs, inputs), role, std, depths=(depth,))
    if bias:
        bias_role = Role.BIAS_COLUMN if role is Role.COLUMN else Role.BIAS_ROW
        yield Parameter(f"{name}.bias", (outputs,), bias_role, depths=(depth,))


def forward_flops(shape: GPT2Shape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth: embedding, blocks, head.

    2 per element of a matrix, and 4 s h for the two products of attention with s positions (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters", appendix); an embedding is a look-up.
    """
    width = shape.hidden_dim
    block = 2.0 * width * (4 * width + 2 * shape.ffn_dim) + 4.0 * seq_len * width
    return (0.0, *[block] * shape.num_layers, 2.0 * width * shape.vocab_size)
