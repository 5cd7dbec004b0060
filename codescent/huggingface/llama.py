"""In: nothing. Out: a table from codescent's Llama to a Hugging Face folder: tensor names and their dims.
Does not say which families of transformers have which traits (families.py does), and does not read or write files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codescent.huggingface.correspond import Row, Theirs, same
from codescent.models.llama.declare import LlamaShape

_BLOCK, _THEIRS = "blocks.#", "model.layers.#"
_NORMS = {
    "first": ("input_layernorm", "post_attention_layernorm"),
    "output": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""Their names of our norm_1 and norm_2, by `LlamaShape.norm`."""


def rows(shape: LlamaShape) -> tuple[Row, ...]:
    """The table of a shape's parameters.

    Letters of dims: v vocabulary, d hidden_dim, o outputs, i inputs, f ffn_dim; u gate and up. Attention: g groups; e
    heads of a group (its queries, key, value); q query heads of a group; c rotary pairs of channels; p the two channels
    of a pair. In codescent the two channels are adjacent; in Hugging Face they are half a head apart.
    """
    first, second = _NORMS[shape.norm]
    return (
        same("tok.weight", "model.embed_tokens.weight", "v d"),
        same(f"{_BLOCK}.norm_1.weight", f"{_THEIRS}.{first}.weight", "d"),
        *_attention(shape.num_heads // shape.num_kv_heads, over_all=shape.qk_norm == "all"),
        same(f"{_BLOCK}.norm_2.weight", f"{_THEIRS}.{second}.weight", "d"),
        Row(
            f"{_BLOCK}.mlp.gate_up.weight",
            "f u d",
            (
                Theirs(f"{_THEIRS}.mlp.gate_proj.weight", "f d", {"u": (0, 1)}),
                Theirs(f"{_THEIRS}.mlp.up_proj.weight", "f d", {"u": (1, 2)}),
            ),
        ),
        same(f"{_BLOCK}.mlp.down.weight", f"{_THEIRS}.mlp.down_proj.weight", "o i"),
        same("norm.weight", "model.norm.weight", "d"),
        same("head.weight", "lm_head.weight", "v d"),
    )


def _attention(queries: int, *, over_all: bool) -> Iterator[Row]:
    """The rows of attention, for `queries` query heads per key-value head. A shape may lack biases and norms."""
    keys, values = (queries, queries + 1), (queries + 1, queries + 2)
    for leaf, inputs in (("weight", " d"), ("bias", "")):
        theirs = (
            Theirs(f"{_THEIRS}.self_attn.q_proj.{leaf}", f"(g e p c){inputs}", {"e": (0, queries)}),
            Theirs(f"{_THEIRS}.self_attn.k_proj.{leaf}", f"(g p c){inputs}", {"e": keys}),
            Theirs(f"{_THEIRS}.self_attn.v_proj.{leaf}", f"(g c p){inputs}", {"e": values}),
        )
        yield Row(f"{_BLOCK}.attn.qkv.{leaf}", f"(g e c p){inputs}", theirs)
    heads = {"q_norm": "g q ", "k_norm": "g "} if over_all else {"q_norm": "", "k_norm": ""}
    for name, which in heads.items():
        norm, theirs_norm = f"{_BLOCK}.attn.{name}.weight", f"{_THEIRS}.self_attn.{name}.weight"
        yield same(norm, theirs_norm, f"({which}c p)", f"({which}p c)")
    yield same(f"{_BLOCK}.attn.out.weight", f"{_THEIRS}.self_attn.o_proj.weight", "o i")


def axes(shape: LlamaShape) -> Mapping[str, int]:
    """Sizes of axes of the table that a parameter's shape does not give."""
    queries = shape.num_heads // shape.num_kv_heads
    return {"e": queries + 2, "q": queries, "c": shape.head_dim // 2, "p": 2}
