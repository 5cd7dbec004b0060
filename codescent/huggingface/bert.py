"""In: nothing. Out: how a BERT of ours is written as one of `transformers`: names, axes, keys of config.json.
Does not read or write: reading, writing and every refusal go by what is declared here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.huggingface.correspond import Row, Theirs
from codescent.huggingface.kind import COMMON_IGNORED, Fixed, Kind, Settings
from codescent.models.bert.declare import NORM_EPS, SEGMENTS, BertShape

_BLOCK, _THEIRS = "blocks.#", "bert.encoder.layer.#"
_ARCHITECTURES = {"mlm": ("BertForMaskedLM", "BertForPreTraining"), "qa": ("BertForQuestionAnswering",)}
"""Classes whose folders have the head, the one that we write in front."""


def _pair(ours: str, theirs: str, dims: str) -> tuple[Row, Row]:
    """A weight with its bias."""
    return (
        Row(f"{ours}.weight", dims, (Theirs(f"{theirs}.weight", dims),)),
        Row(f"{ours}.bias", dims.split()[0], (Theirs(f"{theirs}.bias", dims.split()[0]),)),
    )


def _qkv(leaf: str, rest: str) -> Row:
    """Ours head by head, of each its query, key and value; theirs are three."""
    kinds = enumerate(("query", "key", "value"))
    theirs = (
        Theirs(f"{_THEIRS}.attention.self.{kind}.{leaf}", f"(h k){rest}", {"e": (number, number + 1)})
        for number, kind in kinds
    )
    return Row(f"{_BLOCK}.attn.qkv.{leaf}", f"(h e k){rest}", tuple(theirs))


# Axes: v vocabulary, t positions, s segments, d hidden_dim, o outputs, i inputs; of attention h heads, k channels of a
# head, e query, key, value.
_BODY = (
    Row("tok.weight", "v d", (Theirs("bert.embeddings.word_embeddings.weight", "v d"),)),
    Row("pos.weight", "t d", (Theirs("bert.embeddings.position_embeddings.weight", "t d"),)),
    Row("segment.weight", "s d", (Theirs("bert.embeddings.token_type_embeddings.weight", "s d"),)),
    *_pair("embed_norm", "bert.embeddings.LayerNorm", "d"),
    _qkv("weight", " i"),
    _qkv("bias", ""),
    *_pair(f"{_BLOCK}.attn.out", f"{_THEIRS}.attention.output.dense", "o i"),
    *_pair(f"{_BLOCK}.norm_1", f"{_THEIRS}.attention.output.LayerNorm", "d"),
    *_pair(f"{_BLOCK}.mlp.up", f"{_THEIRS}.intermediate.dense", "o i"),
    *_pair(f"{_BLOCK}.mlp.down", f"{_THEIRS}.output.dense", "o i"),
    *_pair(f"{_BLOCK}.norm_2", f"{_THEIRS}.output.LayerNorm", "d"),
)
_HEADS = {
    "mlm": (
        Row("head.bias", "v", (Theirs("cls.predictions.bias", "v"),)),
        *_pair("head.dense", "cls.predictions.transform.dense", "o i"),
        *_pair("head.norm", "cls.predictions.transform.LayerNorm", "d"),
    ),
    "qa": _pair("head", "qa_outputs", "o i"),
}


def _read(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    hidden, attention = (settings.get(f"{name}_dropout_prob", 0.1) for name in ("hidden", "attention_probs"))
    found = {"dropout": float(hidden), "head": "mlm"}
    if set(settings.get("architectures") or []) & set(_ARCHITECTURES["qa"]):
        found["head"] = "qa"
    if hidden != attention:
        shown = f"hidden_dropout_prob = {hidden}, attention_probs_dropout_prob = {attention}"
        return found, [f"{shown}: ours has one probability for both; make them equal"]
    return found, []


def _write(shape: BertShape) -> dict[str, Any]:
    return {"hidden_dropout_prob": shape.dropout, "attention_probs_dropout_prob": shape.dropout}


def _defaults(settings: Settings) -> Mapping[str, Any]:
    return {}


BERT = Kind(
    name="bert",
    model_type="bert",
    architectures=lambda shape: _ARCHITECTURES[shape.head],
    prefix="bert.",
    sizes={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "hidden_dim": "hidden_size",
        "ffn_dim": "intermediate_size",
        "vocab_size": "vocab_size",
        "seq_len": "max_position_embeddings",
    },
    defaults=_defaults,
    fixed={
        "hidden_act": Fixed("gelu"),
        "layer_norm_eps": Fixed(NORM_EPS),
        "type_vocab_size": Fixed(SEGMENTS),
        "position_embedding_type": Fixed("absolute"),
        "is_decoder": Fixed(False),
        "add_cross_attention": Fixed(False),
        "tie_word_embeddings": Fixed(True),
    },
    ignored=COMMON_IGNORED
    | {"classifier_dropout", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "output_past"}
    | {"pooler_size_per_head", "pooler_type", "directionality", "chunk_size_feed_forward"},
    rows=lambda shape: (*_BODY, *_HEADS[shape.head]),
    axes=lambda shape: {"h": shape.num_heads, "e": 3},
    full=lambda shape: shape,
    read=_read,
    write=_write,
    handled=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    buffers=r"bert\.embeddings\.position_ids",
    spare=r"bert\.pooler\..*|cls\.seq_relationship\..*",
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    fresh=tuple(row.parameter for head in _HEADS.values() for row in head),
    free=("dropout", "head"),
)
