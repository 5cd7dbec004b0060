"""In: a preset's name and free sizes. Out: the shape of a Llama and its parameters, with roles and initial values.
Does not import torch and allocates nothing: the planner reads it, and the module is built to match it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import UserError
from codescent.models.shape import WEIGHT_STD, Size, fill, linear, near_divisors, norm, wrong_sizes
from codescent.plan.shard import Parameter, Role


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched for sequences longer than those of pre-training, as Llama 3.1 has them.

    Waves longer than original_seq_len / low_freq_factor are slowed by `factor`, those shorter than original_seq_len /
    high_freq_factor are not, and those between in between (meta-llama/llama-models, models/llama3/model.py,
    apply_scaling).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


_LLAMA_3: dict[str, Any] = {"num_kv_heads": 8, "vocab_size": 128256, "rope_theta": 500_000.0, "norm_eps": 1e-5}
_8B = {"num_layers": 32, "num_heads": 32, "hidden_dim": 4096, "ffn_dim": 14336, **_LLAMA_3}
_70B = {"num_layers": 80, "num_heads": 64, "hidden_dim": 8192, "ffn_dim": 28672, **_LLAMA_3}
_405B = {"num_layers": 126, "num_heads": 128, "hidden_dim": 16384, "ffn_dim": 53248, **_LLAMA_3}
_SHORT: dict[str, Any] = {"seq_len": 8192}
_LONG: dict[str, Any] = {"seq_len": 131072, "rope_scaling": RopeScaling()}

# Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and the released config.json of each. The
# last one is ours, to try things with.
PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _8B | _SHORT,
    "llama3-70b": _70B | _SHORT,
    "llama3.1-8b": _8B | _LONG,
    "llama3.1-70b": _70B | _LONG,
    "llama3.1-405b": _405B | _LONG,
    "llama-tiny": {
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim": 128,
        "ffn_dim": 384,
        "vocab_size": 512,
        "seq_len": 256,
    },
}

SIZES = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "hidden_dim",
    "ffn_dim",
    "vocab_size",
    "seq_len",
    "rope_theta",
    "norm_eps",
    "tie_head",
)
_NEEDED = ("num_layers", "num_heads", "hidden_dim", "vocab_size", "seq_len")
_FFN_MULTIPLE = 64


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama. It has no biases, and nothing is dropped.

    Attributes:
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; None: they are not.
        norm_eps: added to the mean square in the norms.
        tie_head: whether the head reads `tok.weight`.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_head: bool = False
    bias: bool = False
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_dim // self.num_heads


SHAPE = LlamaShape


def resolve(
    sizes: Mapping[str, Size | None],
    preset: str | None = None,
    *,
    bias: bool | None = None,
    dropout: float = 0.0,
    where: str = "model",
) -> LlamaShape:
    """The shape that a preset and free sizes give; a size that is given wins over the preset's.

    Args:
        sizes: any of SIZES; None or absent means the preset's. Where nothing says otherwise, `num_kv_heads` is
            num_heads; `ffn_dim` 8/3 of hidden_dim, as many elements as with two matrices of 4 (Shazeer 2020, "GLU
            Variants Improve Transformer"; Touvron et al. 2023, "LLaMA", section 2.2), rounded up to a multiple of 64;
            the others are LlamaShape's.
        preset: a key of PRESETS, or None.
        bias: there is none; True is refused.
        dropout: there is none; any other value than 0 is refused.
        where: how the user wrote these keys, for the messages.

    Raises:
        UserError: every problem at once.
    """
    full, problems = fill("llama", sizes, preset, PRESETS, SIZES, where)
    if "ffn_dim" not in full and "hidden_dim" in full:
        full["ffn_dim"] = -(-8 * full["hidden_dim"] // 3 // _FFN_MULTIPLE) * _FFN_MULTIPLE
    if "num_kv_heads" not in full and "num_heads" in full:
        full["num_kv_heads"] = full["num_heads"]
    problems += wrong_sizes(full, _NEEDED, PRESETS, 0.0, where)
    problems += _not_a_llama(full, bias, dropout, where)
    if problems:
        raise UserError(*problems)
    return LlamaShape(**full)


def _not_a_llama(full: Mapping[str, Any], bias: bool | None, dropout: float, where: str) -> Iterator[str]:
    if bias:
        yield f"{where}.bias = true: a llama has no biases; leave it out"
    if dropout != 0.0:
        yield f"{where}.dropout = {dropout}: a llama drops nothing; leave it out"
    for name in ("rope_theta", "norm_eps"):
        if not full.get(name, 1.0) > 0.0:
            yield f"{where}.{name}: {full[name]} must be above 0"
    heads, kv_heads, width = (full.get(name, 0) for name in ("num_heads", "num_kv_heads", "hidden_dim"))
    if heads > 0 and kv_heads > 0 and heads % kv_heads:
        yield (
            f"{where}.num_kv_heads: {kv_heads} heads of keys and values cannot be shared equally by {heads} heads "
            f"({where}.num_heads); nearest: num_kv_heads = {near_divisors(heads, kv_heads)}"
        )
    if heads > 0 and width > 0 and width % heads == 0 and width // heads % 2:
        yield (
            f"{where}.num_heads: {heads} heads of {width} channels ({where}.hidden_dim) have {width // heads} each; "
            "rotary positions turn channels in pairs: their number must be even"
        )


def parameters(shape: LlamaShape) -> tuple[Parameter, ...]:
    """Every parameter, in the order in which forward first reads it; with `tie_head` the head reads `tok.weight`.

    Matrices are [output, input], as torch.nn.Linear has them. Rows of `attn.qkv` are group by group: the heads of
    queries that read the same keys and values, then their keys, then their values. `mlp.gate_up` is [ffn_dim, 2,
    hidden_dim], each channel's row of the gate beside its row of what the gate lets through. So some of the groups, or
    of the channels, are some of the rows, side by side.

    Initial values are normal of deviation 0.02, of the two projections that write to the residual stream 0.02 / sqrt(2
    * num_layers) (Radford et al. 2019, section 2.3; so torchtitan, models/llama3, init_weights without depth_init);
    norms are 1.
    """
    return tuple(_parameters(shape))


def _parameters(shape: LlamaShape) -> Iterator[Parameter]:
    width, ffn, end = shape.hidden_dim, shape.ffn_dim, shape.num_layers + 1
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual_std = WEIGHT_STD / math.sqrt(2 * shape.num_layers)
    vocabulary = (shape.vocab_size, width)
    yield Parameter("tok.weight", vocabulary, Role.VOCAB, WEIGHT_STD, depths=(0, end) if shape.tie_head else (0,))
    for layer in range(shape.num_layers):
        at, depth = f"blocks.{layer}", layer + 1
        yield from norm(f"{at}.norm_1", width, shape.bias, depth)
        yield from linear(f"{at}.attn.qkv", width, queries + 2 * keys, Role.COLUMN, WEIGHT_STD, shape.bias, depth)
        yield from linear(f"{at}.attn.out", queries, width, Role.ROW, residual_std, shape.bias, depth)
        yield from norm(f"{at}.norm_2", width, shape.bias, depth)
        yield Parameter(f"{at}.mlp.gate_up.weight", (ffn, 2, width), Role.COLUMN, WEIGHT_STD, depths=(depth,))
        yield from linear(f"{at}.mlp.down", ffn, width, Role.ROW, residual_std, shape.bias, depth)
    yield from norm("norm", width, shape.bias, end)
    if not shape.tie_head:
        yield Parameter("head.weight", vocabulary, Role.VOCAB, WEIGHT_STD, depths=(end,))


def forward_flops(shape: LlamaShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth: embedding, blocks, head.

    2 per element of a matrix, and 4 s h for the two products of attention with s positions (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters", appendix); an embedding is a look-up.
    """
    width, queries, keys = shape.hidden_dim, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block = 2.0 * width * (2 * queries + 2 * keys + 3 * shape.ffn_dim) + 4.0 * seq_len * queries
    return (0.0, *[block] * shape.num_layers, 2.0 * width * shape.vocab_size)
