"""In: nothing. Out: a table from codescent's Llama to a Hugging Face folder: tensor names, dims and config.json keys.
Does not read or write files: folder.py, read.py and write.py use this table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from codescent.huggingface.correspond import Row, Theirs, same
from codescent.huggingface.kind import COMMON_IGNORED, Kind, Settings
from codescent.models.llama.declare import ROPE, LlamaShape

_BLOCK, _THEIRS = "blocks.#", "model.layers.#"
_SCALING = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_seq_len",
}
"""Key of the rotary scaling in config.json to our size."""
_LENGTH = "original_max_position_embeddings"


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
    """Read head size, tied head and rotary positions from config.json (with the keys of transformers 4 or 5)."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", settings.get("rope_theta", 10_000.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    found: dict[str, Any] = {"rope_theta": float(theta), "tie_head": bool(settings.get("tie_word_embeddings", False))}
    problems = []
    heads, width = settings.get("num_attention_heads") or 1, settings.get("hidden_size") or 0
    if settings.get("head_dim") not in (None, width // heads):
        problems.append(
            f"head_dim = {settings['head_dim']}: codescent has hidden_size / num_attention_heads = {width // heads}"
        )
    if rope.get("partial_rotary_factor") == 1.0:  # all channels are turned
        del rope["partial_rotary_factor"]
    if kind == "llama3":
        given = {theirs: rope.pop(theirs, None) for theirs in _SCALING}
        if given[_LENGTH] is None:  # transformers takes these then
            given[_LENGTH] = settings.get(_LENGTH) or settings.get("max_position_embeddings")
        numbers = {theirs: value for theirs, value in given.items() if _is_number(value)}
        lacking = [f"{theirs} = {json.dumps(value)}" for theirs, value in given.items() if theirs not in numbers]
        if lacking:
            problems.append(f"rotary scaling with {', '.join(lacking)}: llama3 needs a number above 0 for each")
        found |= {
            _SCALING[theirs]: int(value) if theirs == _LENGTH else float(value) for theirs, value in numbers.items()
        }
    elif kind != "default":
        problems.append(f'rotary positions of the type "{kind}": codescent has "default" and "llama3"')
        rope = {}
    problems += [f"rotary positions with {name} = {value}: unknown to codescent" for name, value in rope.items()]
    return found, problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf


def _write(shape: LlamaShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    rope = None
    if scaling is not None:
        values = {theirs: getattr(scaling, ROPE[ours]) for theirs, ours in _SCALING.items()}
        rope = {"rope_type": "llama3", **values}
    return {
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tie_head,
    }


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
    handled=("rope_theta", "rope_scaling", "rope_parameters", _LENGTH, "head_dim", "tie_word_embeddings"),
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
