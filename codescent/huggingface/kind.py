"""In: nothing. Out: `Kind`, the dataclass that bert.py, gpt2.py and llama.py fill in: how a model maps to a folder.
Does not name any model kind and does not read files."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from codescent.huggingface.correspond import Row
from codescent.models import Shape

Settings = Mapping[str, Any]  # a config.json


@dataclass(frozen=True)
class Kind:
    """How one kind of model maps to a Hugging Face folder. A pattern is a regular expression of a whole name."""

    name: str  # one of models.KINDS
    model_type: str  # the kind's name in config.json
    architectures: Callable[[Any], tuple[str, ...]]  # classes with all parameters of a shape; export writes the first
    prefix: str  # of the folder's tensor names, except the head's; folders without a head omit the prefix
    sizes: Mapping[str, str]  # name of our size to key of config.json
    fixed: Mapping[str, tuple[Any, ...]]  # keys with one supported value: this value, and its other spellings
    ignored: str  # keys that change neither the computation nor the stored tensors, separated by white space
    rows: Callable[[Any], Iterable[Row]]  # the table of parameters, for a shape
    axes: Callable[[Any], Mapping[str, int]]  # sizes of the table's axes that a parameter's shape does not give
    read: Callable[[Settings], tuple[dict[str, Any], list[str]]]  # config.json to our other sizes, and error messages
    write: Callable[[Any], dict[str, Any]]  # the other keys of config.json, from our shape
    handled: Collection[str]  # the keys that `read` reads
    defaults: Callable[[Settings], Mapping[str, Any]] = lambda settings: {}  # sizes for keys that are missing or null
    fits: Callable[[Any], bool] = lambda shape: True  # whether transformers computes a model of this shape by this kind
    full: Callable[[Any], Shape] = lambda shape: shape  # the shape with all the folder's parameters; export adds zeros
    buffers: str = r"(?!)"  # pattern of buffers that old folders store
    # shape of a folder, sizes of the run that reads it, names of its tensors -> the shape with what the run can read
    held: Callable[[Any, Mapping[str, Any], Collection[str]], Any] = lambda shape, model, tensors: shape
    # pattern of tensors that a model of our shape does not use; import reports and skips them
    spare: Callable[[Any], str] = lambda shape: r"(?!)"
    renamed: tuple[tuple[str, str], ...] = ()  # pattern of a part of an old name, and its replacement
    tied: Mapping[str, str] = field(default_factory=dict)  # tied tensor to the tensor that it repeats
    fresh: Collection[str] = ()  # parameters that a folder without a head lacks: training initialises them at random
    free: Collection[str] = ("dropout",)  # sizes that may differ between a folder and a run that starts from it
    inert: str = ""  # keys of this kind that nothing reads, beside INERT; import names those that it finds
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys that change nothing with these values

    def changes_nothing(self, key: str, value: object) -> bool:
        """Whether a key of config.json changes neither a tensor nor a product of this model, with this value."""
        values = {**NEUTRAL, **self.neutral}.get(key, ())
        return key in (*INERT.split(), *self.inert.split()) or any(is_same(value, one) for one in values)


def is_same(value: object, other: object) -> bool:
    """Whether two values of a JSON file are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def is_true(settings: Settings, key: str) -> bool:
    """The value of a switch; null is false. Raises TypeError: it is none of them, such as "false" in quotes."""
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{key} = {json.dumps(value)}: neither true nor false")
    return bool(value)


COMMON_IGNORED = """
    model_type architectures dtype torch_dtype transformers_version _name_or_path name_or_path use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id unk_token_id
    initializer_range task_specific_params return_dict output_hidden_states output_attentions torchscript id2label
    label2id finetuning_task tokenizer_class gradient_checkpointing auto_map _attn_implementation
    _attn_implementation_autoset attn_implementation problem_type
    """

INERT = """
    _commit_hash _from_model_config _num_labels num_labels output_past use_bfloat16 tf_legacy_loss
    predict_special_tokens transformers.js_config unsloth_fixed unsloth_version max_sequence_length model_max_length
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p min_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix
    chunk_size_feed_forward use_flash_attn _flash_attn_2_enabled
    """
"""Keys that no product of transformers' GPT-2, Llama and BERT reads: generation, exports, labels, how it is computed.

They are in the config.json of published models: those of distilgpt2, SmolLM2, TinyLlama and older versions of
transformers, which stored the settings of `generate` there."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
}
"""Keys that change nothing with these values, and another model with others."""
