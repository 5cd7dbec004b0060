"""In: nothing. Out: a table from codescent's Llama to a Hugging Face folder: tensor names and their dims.
Does not say which families of transformers have which traits (families.py does), and does not read or write files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from codescent.huggingface import latents
from codescent.huggingface.correspond import Row, Theirs, same
from codescent.huggingface.experts import NONE, ExpertKeys
from codescent.models.llama.declare import LlamaShape

_BLOCK, _MODULE, _THEIRS = "blocks.#", "mtp.#", "model.layers.#"
_NORMS = {
    "first": {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"},
    "output": {"norm_1": "post_attention_layernorm", "norm_2": "post_feedforward_layernorm"},
    "both": {
        "norm_1": "input_layernorm",
        "norm_1_out": "post_attention_layernorm",
        "norm_2": "pre_feedforward_layernorm",
        "norm_2_out": "post_feedforward_layernorm",
    },
}
"""Their names of our norms, by `LlamaShape.norm`."""


def rows(shape: LlamaShape, experts: ExpertKeys = NONE) -> tuple[Row, ...]:
    """The table of a shape's parameters.

    Letters of dims: v vocabulary, d hidden_dim, o outputs, i inputs, f ffn_dim; u gate and up. Attention: g groups; e
    heads of a group (its queries, key, value); q query heads of a group; k channels of a head. In codescent the two
    channels of a rotary pair are adjacent; in Hugging Face they are half of the channels that turn apart.

    `experts`: how the family names experts. With `shape.fused` queries, keys and values are one matrix, and so are
    gates and values of the feed-forward.
    """
    return (
        same("tok.weight", "model.embed_tokens.weight", "v d"),
        *_block(shape, experts, _BLOCK, _THEIRS),
        same("norm.weight", "model.norm.weight", "d"),
        *(_predictor(shape, experts) if shape.mtp_layers else ()),
        same("head.weight", "lm_head.weight", "v d"),
    )


def _predictor(shape: LlamaShape, experts: ExpertKeys) -> Iterator[Row]:
    """The rows of modules that predict more tokens. They have the numbers behind those of the blocks, as ours."""
    yield from _block(shape, experts, f"{_MODULE}.block", _THEIRS)
    for ours, theirs in (("embed_norm", "enorm"), ("hidden_norm", "hnorm"), ("norm", "shared_head.norm")):
        yield same(f"{_MODULE}.{ours}.weight", f"{_THEIRS}.{theirs}.weight", "d")
    yield same(f"{_MODULE}.join.weight", f"{_THEIRS}.eh_proj.weight", "d i")


def _block(shape: LlamaShape, experts: ExpertKeys, ours: str, theirs: str) -> tuple[Row, ...]:
    """The rows of a block. `ours`, `theirs`: its name."""
    ffn = shape.ffn_dim
    halves = [("gate_proj", (0, 0)), ("up_proj", (0, 0))]
    if shape.fused:
        halves = [("gate_up_proj", (0, 2 * ffn)), ("gate_up_proj", (ffn, 2 * ffn))]
    return (
        *(same(f"{ours}.{one}.weight", f"{theirs}.{norm}.weight", "d") for one, norm in _NORMS[shape.norm].items()),
        *_attention(shape, ours, theirs),
        Row(
            f"{ours}.mlp.gate_up.weight",
            "f u d",
            tuple(
                Theirs(f"{theirs}.mlp.{name}.weight", "f d", {"u": (half, half + 1)}, rows=rows)
                for half, (name, rows) in enumerate(halves)
            ),
        ),
        *experts.rows(shape, ours, theirs),
        same(f"{ours}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", "o i"),
    )


def _attention(shape: LlamaShape, ours: str, theirs: str) -> Iterator[Row]:
    """The rows of attention. A shape may lack biases and norms."""
    if shape.kv_latent_dim:
        yield from latents.rows(shape, ours, theirs)
        return
    queries, pairs = shape.num_heads // shape.num_kv_heads, {"k": _order(shape)}
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    first, total, pieces = 0, sum(heads) * shape.head_dim, list[tuple[str, tuple[int, int]]]()
    for name, count in zip(("q_proj", "k_proj", "v_proj"), heads, strict=True):
        pieces.append(("qkv_proj", (first, total)) if shape.fused else (name, (0, 0)))
        first += count * shape.head_dim
    has: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
        ("(g e k)", (0, queries), pairs),
        ("(g k)", (queries, queries + 1), pairs),
        ("(g k)", (queries + 1, queries + 2), {}),
    ]
    for leaf, inputs in (("weight", " d"), ("bias", "")):
        parts = tuple(
            Theirs(f"{theirs}.self_attn.{name}.{leaf}", f"{dims}{inputs}", {"e": some}, order, rows)
            for (name, rows), (dims, some, order) in zip(pieces, has, strict=True)
        )
        yield Row(f"{ours}.attn.qkv.{leaf}", f"(g e k){inputs}", parts)
    over_all = {"q_norm": "(g q k)", "k_norm": "(g k)"} if shape.qk_norm == "all" else {"q_norm": "k", "k_norm": "k"}
    for name, dims in over_all.items():
        norm = Theirs(f"{theirs}.self_attn.{name}.weight", dims, order=pairs)
        yield Row(f"{ours}.attn.{name}.weight", dims, (norm,))
    yield same(f"{ours}.attn.out.weight", f"{theirs}.self_attn.o_proj.weight", "o i")


def _order(shape: LlamaShape) -> tuple[int, ...]:
    """Our channel of each of their channels of a head."""
    pairs = (shape.rotary_dim or shape.head_dim) // 2
    turned = [2 * pair + half for half in range(2) for pair in range(pairs)]
    return (*turned, *range(2 * pairs, shape.head_dim))


def axes(shape: LlamaShape) -> Mapping[str, int]:
    """Sizes of axes of the table that a parameter's shape does not give."""
    queries = shape.num_heads // shape.num_kv_heads
    return {"e": queries + 2, "q": queries, "k": shape.head_dim}
