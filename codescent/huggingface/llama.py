"""In: nothing. Out: a table from codescent's Llama to a Hugging Face folder: tensor names, dims and config.json keys.
Does not read or write files: folder.py, read.py and write.py use this table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.huggingface import rope
from codescent.huggingface.correspond import Row, Theirs, same
from codescent.huggingface.kind import COMMON_IGNORED, Kind, Settings
from codescent.models.llama.declare import LlamaShape

_BLOCK, _THEIRS = "blocks.#", "model.layers.#"


def _rows(queries: int) -> tuple[Row, ...]:
    """The table for `queries` query heads per key-value head.

    Letters of dims: v vocabulary, d hidden_dim, o outputs, i inputs, f ffn_dim; u gate and up. Attention: g groups; e
    heads of a group (its queries, key, value); c rotary pairs of channels; p the two channels of a pair. In codescent
    the two channels are adjacent; in Hugging Face they are half a head apart.
    """
    keys, values = (queries, queries + 1), (queries + 1, queries + 2)
    return (
        same("tok.weight", "model.embed_tokens.weight", "v d"),
        same(f"{_BLOCK}.norm_1.weight", f"{_THEIRS}.input_layernorm.weight", "d"),
        Row(
            f"{_BLOCK}.attn.qkv.weight",
            "(g e c p) d",
            (
                Theirs(f"{_THEIRS}.self_attn.q_proj.weight", "(g e p c) d", {"e": (0, queries)}),
                Theirs(f"{_THEIRS}.self_attn.k_proj.weight", "(g p c) d", {"e": keys}),
                Theirs(f"{_THEIRS}.self_attn.v_proj.weight", "(g c p) d", {"e": values}),
            ),
        ),
        same(f"{_BLOCK}.attn.out.weight", f"{_THEIRS}.self_attn.o_proj.weight", "o i"),
        same(f"{_BLOCK}.norm_2.weight", f"{_THEIRS}.post_attention_layernorm.weight", "d"),
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


def _read(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Read head size, tied head and rotary positions from config.json."""
    found, problems = rope.read(settings)
    heads, width = settings.get("num_attention_heads") or 1, settings.get("hidden_size") or 0
    if settings.get("head_dim") not in (None, width // heads):
        problems.append(
            f"head_dim = {settings['head_dim']}: codescent has hidden_size / num_attention_heads = {width // heads}"
        )
    return found | {"tie_head": bool(settings.get("tie_word_embeddings", False))}, problems


def _write(shape: LlamaShape) -> dict[str, Any]:
    positions = rope.write(shape.rope_theta, shape.rope_scaling)
    return positions | {"head_dim": shape.head_dim, "tie_word_embeddings": shape.tie_head}


def _axes(shape: LlamaShape) -> Mapping[str, int]:
    queries = shape.num_heads // shape.num_kv_heads
    return {"e": queries + 2, "c": shape.head_dim // 2, "p": 2}


LLAMA = Kind(
    name="llama",
    model_type="llama",
    architectures=lambda _: ("LlamaForCausalLM",),
    prefix="model.",
    sizes={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "hidden_dim": "hidden_size",
        "ffn_dim": "intermediate_size",
        "vocab_size": "vocab_size",
        "seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
    },
    defaults=lambda settings: {"num_kv_heads": settings.get("num_attention_heads"), "norm_eps": 1e-6},
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0.0,),
    },
    ignored=COMMON_IGNORED + "pretraining_tp",
    rows=lambda shape: _rows(shape.num_heads // shape.num_kv_heads),
    axes=_axes,
    read=_read,
    write=_write,
    handled=(*rope.HANDLED, "head_dim", "tie_word_embeddings"),
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    fresh=("head.weight",),
    free=("dropout", "seq_len"),
    inert="is_decoder is_llama_config resid_pdrop embd_pdrop",
    neutral={
        "rope_interleaved": (False,),  # true: the channels of a pair are adjacent, as in our own order
        "partial_rotary_factor": (1.0, None),
        "layer_types": (None,),
    },
)
