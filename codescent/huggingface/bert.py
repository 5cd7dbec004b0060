"""In: nothing. Out: a table from codescent's BERT to a Hugging Face folder: tensor names, dims and config.json keys.
Does not read or write files: folder.py, read.py and write.py use this table."""

from __future__ import annotations

from typing import Any

from codescent.huggingface.correspond import Row, Theirs, same, with_bias
from codescent.huggingface.kind import COMMON_IGNORED, Kind, Settings
from codescent.models.bert.declare import NORM_EPS, SEGMENTS, BertShape

_BLOCK, _THEIRS = "blocks.#", "bert.encoder.layer.#"
_ARCHITECTURES = {"mlm": ("BertForMaskedLM", "BertForPreTraining"), "qa": ("BertForQuestionAnswering",)}
"""For each head, the classes of transformers that have it. Export writes the first class."""


def _qkv(leaf: str, rest: str) -> Row:
    """The table row of the query-key-value matrix, or of its bias.

    Our matrix goes head by head: query, key, value. Hugging Face has three tensors.
    """
    kinds = enumerate(("query", "key", "value"))
    theirs = (
        Theirs(f"{_THEIRS}.attention.self.{kind}.{leaf}", f"(h k){rest}", {"e": (number, number + 1)})
        for number, kind in kinds
    )
    return Row(f"{_BLOCK}.attn.qkv.{leaf}", f"(h e k){rest}", tuple(theirs))


# Letters of dims: v vocabulary, t positions, s segments, d hidden_dim, o outputs, i inputs; h heads, k channels of a
# head, e query/key/value.
_BODY = (
    same("tok.weight", "bert.embeddings.word_embeddings.weight", "v d"),
    same("pos.weight", "bert.embeddings.position_embeddings.weight", "t d"),
    same("segment.weight", "bert.embeddings.token_type_embeddings.weight", "s d"),
    *with_bias("embed_norm", "bert.embeddings.LayerNorm", "d"),
    _qkv("weight", " i"),
    _qkv("bias", ""),
    *with_bias(f"{_BLOCK}.attn.out", f"{_THEIRS}.attention.output.dense", "o i"),
    *with_bias(f"{_BLOCK}.norm_1", f"{_THEIRS}.attention.output.LayerNorm", "d"),
    *with_bias(f"{_BLOCK}.mlp.up", f"{_THEIRS}.intermediate.dense", "o i"),
    *with_bias(f"{_BLOCK}.mlp.down", f"{_THEIRS}.output.dense", "o i"),
    *with_bias(f"{_BLOCK}.norm_2", f"{_THEIRS}.output.LayerNorm", "d"),
)
_HEADS = {
    "mlm": (
        same("head.bias", "cls.predictions.bias", "v"),
        *with_bias("head.dense", "cls.predictions.transform.dense", "o i"),
        *with_bias("head.norm", "cls.predictions.transform.LayerNorm", "d"),
    ),
    "qa": with_bias("head", "qa_outputs", "o i"),
}


def _read(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    hidden, attention = (settings.get(f"{name}_dropout_prob", 0.1) for name in ("hidden", "attention_probs"))
    found = {"dropout": float(hidden), "head": "mlm"}
    if set(settings.get("architectures") or []) & set(_ARCHITECTURES["qa"]):
        found["head"] = "qa"
    if hidden != attention:
        shown = f"hidden_dropout_prob = {hidden}, attention_probs_dropout_prob = {attention}"
        return found, [f"{shown}: codescent has one probability for both; make them equal"]
    return found, []


def _write(shape: BertShape) -> dict[str, Any]:
    return {"hidden_dropout_prob": shape.dropout, "attention_probs_dropout_prob": shape.dropout}


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
    fixed={
        "hidden_act": ("gelu",),
        "layer_norm_eps": (NORM_EPS,),
        "type_vocab_size": (SEGMENTS,),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    ignored=COMMON_IGNORED
    + "classifier_dropout pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers output_past "
    "pooler_size_per_head pooler_type directionality chunk_size_feed_forward",
    rows=lambda shape: (*_BODY, *_HEADS[shape.head]),
    axes=lambda shape: {"h": shape.num_heads, "e": 3},
    read=_read,
    write=_write,
    handled=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    buffers=r"bert\.embeddings\.position_ids",
    spare=lambda _: r"bert\.pooler\..*|cls\.seq_relationship\..*",
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    fresh=tuple(row.parameter for head in _HEADS.values() for row in head),
    free=("dropout", "head"),
)
