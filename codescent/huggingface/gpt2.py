"""In: nothing. Out: a table from codescent's GPT-2 to a Hugging Face folder: tensor names, dims and config.json keys.
Does not read or write files: folder.py, read.py and write.py use this table."""

from __future__ import annotations

import dataclasses
from typing import Any

from codescent.huggingface.correspond import same, with_bias
from codescent.huggingface.kind import COMMON_IGNORED, Kind, Settings
from codescent.models.gpt2.declare import GPT2Shape

_BLOCK, _THEIRS = "blocks.#", "transformer.h.#"
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


# Letters of dims: v vocabulary, t positions, d hidden_dim, o outputs, i inputs; h heads, k channels of a head, e query/
# key/value. Our qkv rows go head by head. Hugging Face has all queries, then all keys, then all values. Its Conv1D
# weights are [inputs, outputs].
ROWS = (
    same("tok.weight", "transformer.wte.weight", "v d"),
    same("pos.weight", "transformer.wpe.weight", "t d"),
    *with_bias(f"{_BLOCK}.norm_1", f"{_THEIRS}.ln_1", "d"),
    *with_bias(f"{_BLOCK}.attn.qkv", f"{_THEIRS}.attn.c_attn", "(h e k) i", "i (e h k)"),
    *with_bias(f"{_BLOCK}.attn.out", f"{_THEIRS}.attn.c_proj", "o i", "i o"),
    *with_bias(f"{_BLOCK}.norm_2", f"{_THEIRS}.ln_2", "d"),
    *with_bias(f"{_BLOCK}.mlp.up", f"{_THEIRS}.mlp.c_fc", "o i", "i o"),
    *with_bias(f"{_BLOCK}.mlp.down", f"{_THEIRS}.mlp.c_proj", "o i", "i o"),
    *with_bias("norm", "transformer.ln_f", "d"),
)


def _read(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    dropouts = {name: settings.get(name, 0.1) for name in _DROPOUTS}
    if len(set(dropouts.values())) > 1:
        shown = ", ".join(f"{name} = {value}" for name, value in dropouts.items())
        return {}, [f"{shown}: codescent has one probability for all three; make them equal"]
    return {"dropout": float(next(iter(dropouts.values())))}, []


def _write(shape: GPT2Shape) -> dict[str, Any]:
    # n_ctx: the older name of n_positions, which llama.cpp's converter reads
    return {**dict.fromkeys(_DROPOUTS, shape.dropout), "n_ctx": shape.seq_len}


GPT2 = Kind(
    name="gpt2",
    model_type="gpt2",
    architectures=lambda _: ("GPT2LMHeadModel",),
    prefix="transformer.",
    sizes={
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "hidden_dim": "n_embd",
        "ffn_dim": "n_inner",
        "vocab_size": "vocab_size",
        "seq_len": "n_positions",
    },
    defaults=lambda settings: {"ffn_dim": 4 * settings.get("n_embd", 0)},
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    ignored=COMMON_IGNORED + "n_ctx is_decoder reorder_and_upcast_attn summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj",
    rows=lambda shape: ROWS,
    axes=lambda shape: {"h": shape.num_heads, "e": 3},
    full=lambda shape: dataclasses.replace(shape, bias=True),
    read=_read,
    write=_write,
    handled=_DROPOUTS,
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    tied={"lm_head.weight": "transformer.wte.weight"},
)
