"""In: a preset's name and free sizes. Out: the shape of a BERT with a head, its parameters, its FLOPs.
Does not import torch and allocates nothing: the planner reads it, and the module is built to match it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import UserError
from codescent.models.shape import WEIGHT_STD, EqualHeads, Size, fill, linear, norm, wrong_sizes
from codescent.plan.shard import Parameter, Role

# Devlin et al. 2019, "BERT", section 3, as released: ffn_dim is 4 * hidden_dim in both.
_BASE: dict[str, Any] = {
    "num_layers": 12,
    "num_heads": 12,
    "hidden_dim": 768,
    "ffn_dim": 3072,
    "vocab_size": 30522,
    "seq_len": 512,
}
PRESETS: dict[str, dict[str, Any]] = {
    "bert-base-uncased": _BASE,
    "bert-large-uncased": _BASE | {"num_layers": 24, "num_heads": 16, "hidden_dim": 1024, "ffn_dim": 4096},
}
HEADS = ("mlm", "qa")
"""Masked tokens, or where an answer begins and ends; the default first."""
SIZES = (*_BASE, "head")

SEGMENTS = 2
NORM_EPS = 1e-12
MASKED_SHARE = 0.15
"""Of the positions of a sample, how many are to be found again by the head "mlm" (Devlin et al. 2019, section 3.1)."""


@dataclass(frozen=True)
class BertShape(EqualHeads):
    """Sizes of a BERT. `dropout` is one probability for embeddings, attention probabilities and what is added, as BERT
    has it; `head` is what it is trained for, one of HEADS."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    head: str = "mlm"
    dropout: float = 0.0

    @property
    def bias(self) -> bool:
        """Every linear layer has one."""
        return True

    @property
    def head_share(self) -> float:
        """Of the positions, how many the head reads."""
        return MASKED_SHARE if self.head == "mlm" else 1.0

    @property
    def refuses(self) -> Mapping[str, str]:
        """Axes of the mesh that this model does not go with, and why."""
        return {
            "cp": "the attention that travels is causal attention over whole sequences, and here every position sees "
            "all others but padding"
        }


SHAPE = BertShape


def resolve(
    sizes: Mapping[str, Size | None],
    preset: str | None = None,
    *,
    bias: bool | None = None,
    dropout: float = 0.0,
    where: str = "model",
) -> BertShape:
    """The shape that a preset and free sizes give; a size that is given wins over the preset's.

    Args:
        sizes: any of SIZES; None or absent means the preset's. Where nothing says otherwise, `ffn_dim` is 4 *
            hidden_dim and `head` is "mlm".
        preset: a key of PRESETS, or None: then every other size must be given.
        bias: every linear layer has one; False is refused.
        dropout: probability in [0, 1).
        where: how the user wrote these keys, for the messages.

    Raises:
        UserError: every problem at once.
    """
    full, problems = fill("bert", sizes, preset, PRESETS, SIZES, where)
    if "ffn_dim" not in full and "hidden_dim" in full:
        full["ffn_dim"] = 4 * full["hidden_dim"]
    problems += wrong_sizes(full, [name for name in _BASE if name != "ffn_dim"], PRESETS, dropout, where)
    if full.get("head", HEADS[0]) not in HEADS:
        problems.append(f"{where}.head: {full['head']!r} is none of {', '.join(HEADS)}")
    if bias is False:
        problems.append(f"{where}.bias = false: a BERT has biases; leave it out")
    if problems:
        raise UserError(*problems)
    return BertShape(**full, dropout=dropout)


def parameters(shape: BertShape) -> tuple[Parameter, ...]:
    """Every parameter, in the order in which forward first reads it, but for `head.bias`, which stands before the rest
    of its head, as in the module.

    Matrices are [output, input], as torch.nn.Linear has them. Initial values are BERT's: normal of deviation 0.02
    everywhere, norms 1 and 0, biases 0. (BERT cuts its normal distribution off at two deviations; ours is whole.)
    """
    return tuple(_parameters(shape))


def _parameters(shape: BertShape) -> Iterator[Parameter]:
    width, ffn, end, std = shape.hidden_dim, shape.ffn_dim, shape.num_layers + 1, WEIGHT_STD
    tied = (0, end) if shape.head == "mlm" else (0,)
    yield Parameter("tok.weight", (shape.vocab_size, width), Role.VOCAB, std, depths=tied)
    yield Parameter("pos.weight", (shape.seq_len, width), Role.POSITION, std, depths=(0,))
    yield Parameter("segment.weight", (SEGMENTS, width), Role.POSITION, std, depths=(0,))
    yield from norm("embed_norm", width, True, 0)
    for layer in range(shape.num_layers):
        at, depth = f"blocks.{layer}", layer + 1
        yield from linear(f"{at}.attn.qkv", width, 3 * width, Role.COLUMN, std, True, depth)
        yield from linear(f"{at}.attn.out", width, width, Role.ROW, std, True, depth)
        yield from norm(f"{at}.norm_1", width, True, depth)
        yield from linear(f"{at}.mlp.up", width, ffn, Role.COLUMN, std, True, depth)
        yield from linear(f"{at}.mlp.down", ffn, width, Role.ROW, std, True, depth)
        yield from norm(f"{at}.norm_2", width, True, depth)
    if shape.head == "mlm":
        yield Parameter("head.bias", (shape.vocab_size,), Role.BIAS_COLUMN, depths=(end,))
        yield from linear("head.dense", width, width, Role.WHOLE, std, True, end)
        yield from norm("head.norm", width, True, end)
    else:
        yield from linear("head", width, 2, Role.LOGITS, std, True, end)


def forward_flops(shape: BertShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth: embedding, blocks, head (as gpt2_shape counts them).

    The head "mlm" reads MASKED_SHARE of the tokens.
    """
    width = shape.hidden_dim
    block = 2.0 * width * (4 * width + 2 * shape.ffn_dim) + 4.0 * seq_len * width
    outputs = width + shape.vocab_size if shape.head == "mlm" else 2
    return (0.0, *[block] * shape.num_layers, 2.0 * width * outputs * shape.head_share)
