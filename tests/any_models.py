"""In: nothing. Out: small models of `transformers` that no other kind has, and configs of runs that train them.
Does not run any: tests do."""

from __future__ import annotations

import copy
import json
from typing import Any

from codescent.models.transformers.declare import settings_text

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("lm", SIZES | {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
    "opt": ("lm", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gemma2": ("lm", GROUPED | {"sliding_window": 8}),
    "gemma3_text": ("lm", GROUPED | {"sliding_window": 8}),
    "phi": ("lm", SIZES),
    "cohere": ("lm", GROUPED),
    "roberta": ("mlm", SIZES | {"max_position_embeddings": 33, "hidden_dropout_prob": 0.3}),
    "modernbert": ("mlm", SIZES | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}),
}
"""What the head predicts, and the config.json: tied or not, with biases and without, capped logits, windows."""
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("lm", SIZES),
    "llama": ("lm", GROUPED),
    "bert": ("mlm", SIZES),
    "gemma": ("lm", GROUPED),
    "qwen2": ("lm", GROUPED),
    "mistral": ("lm", GROUPED | {"sliding_window": 8}),
    "bloom": ("lm", SIZES),
    "biogpt": ("lm", SIZES),
    "doge": ("lm", SIZES),
    "deepseek_v2": ("lm", SIZES | LATENT | {"num_key_value_heads": 4, "first_k_dense_replace": 2}),
    "deepseek_v3": ("lm", SIZES | LATENT | {"num_key_value_heads": 4, "first_k_dense_replace": 2}),
}
"""Of other forms: Conv1D, positions as biases, a mask of ones, several norms, numbers of experts that no layer has,
complex numbers."""


def _model(name: str) -> tuple[str, dict[str, Any]]:
    return MODELS[name] if name in MODELS else MORE_MODELS[name]


def config_of(name: str, **more: Any) -> str:
    """The value of model.config of a model."""
    return settings_text({"model_type": name, **_model(name)[1], **more})


def sections(name: str, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a config that trains a model."""
    found: dict[str, dict[str, Any]] = {
        "model": {"kind": "transformers", "config": config_of(name)},
        "data": {"task": _model(name)[0], "seq_len": 16},
        "train": {"global_batch_size": 4, "microbatch_size": 2, "head_chunk_tokens": 1024},
    }
    for section, values in copy.deepcopy(more).items():
        found[section] = {**found.get(section, {}), **values}
    return found


def folder_text(name: str) -> str:
    """The content of a config.json."""
    return json.dumps({"model_type": name, **MODELS[name][1]})
