"""In: nothing. Out: the type of a kind's declaration (names, config keys, axes), which reading and writing share.
Does not know any kind, and reads no file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from codescent.huggingface.correspond import Row
from codescent.models import Shape

Settings = Mapping[str, Any]
"""A config.json."""


@dataclass(frozen=True)
class Fixed:
    """A key of config.json for which our model supports one value.

    Attributes:
        value: the supported value, which export writes.
        others: other spellings of the same value.
        absent: whether a missing key means that value, too.
    """

    value: Any
    others: tuple[Any, ...] = ()
    absent: bool = True


@dataclass(frozen=True)
class Kind:
    """How one kind of model is written as a Hugging Face folder.

    Attributes:
        name: one of models.KINDS.
        model_type: the kind's name in config.json.
        architectures: classes of transformers that have all parameters of a shape; export writes the first.
        prefix: prefix of their tensor names, except the head's. Folders without a head omit it.
        sizes: name of our size to key of config.json.
        fixed: keys with one supported value.
        ignored: keys that change neither the computation nor the stored tensors.
        rows: the parameter table of a shape.
        axes: sizes of the table's axes that do not follow from a parameter's shape.
        read: our other sizes from config.json, and its problems.
        write: the other keys of config.json, from our shape.
        handled: the keys that `read` understands.
        defaults: our sizes for keys that config.json lacks or sets to null.
        full: the shape that has every parameter of a folder. Export writes the ones that ours lacks as zeros.
        buffers: regular expression of buffers that old folders store.
        spare: regular expression of tensors that our model does not use; import reports and skips them.
        renamed: regular expressions of old tensor names, and their new names.
        tied: name of a tied tensor to the tensor that it repeats.
        fresh: parameters that a folder without a head lacks. Training initialises them at random.
        free: sizes that may differ between a folder and a run that starts from its weights.
    """

    name: str
    model_type: str
    architectures: Callable[[Any], tuple[str, ...]]
    prefix: str
    sizes: Mapping[str, str]
    fixed: Mapping[str, Fixed]
    ignored: Collection[str]
    rows: Callable[[Any], Iterable[Row]]
    axes: Callable[[Any], Mapping[str, int]]
    read: Callable[[Settings], tuple[dict[str, Any], list[str]]]
    write: Callable[[Any], dict[str, Any]]
    handled: Collection[str]
    defaults: Callable[[Settings], Mapping[str, Any]] = lambda settings: {}
    full: Callable[[Any], Shape] = lambda shape: shape
    buffers: str = r"(?!)"
    spare: str = r"(?!)"
    renamed: tuple[tuple[str, str], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    fresh: Collection[str] = ()
    free: Collection[str] = ("dropout",)


def keys(text: str) -> frozenset[str]:
    """Keys of config.json, separated by white space."""
    return frozenset(text.split())


COMMON_IGNORED = keys("""
    model_type architectures dtype torch_dtype transformers_version _name_or_path name_or_path use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id unk_token_id
    initializer_range task_specific_params return_dict output_hidden_states output_attentions torchscript id2label
    label2id finetuning_task tokenizer_class gradient_checkpointing auto_map _attn_implementation
    _attn_implementation_autoset attn_implementation problem_type
    """)


def differences(kind: Kind, folders: Shape, runs: Shape) -> list[tuple[str, Any, Any]]:
    """Sizes outside `kind.free` that differ: name, the folder's value, the run's value."""
    names = [entry.name for entry in dataclasses.fields(folders) if entry.name not in kind.free]
    values = [(name, getattr(folders, name), getattr(runs, name)) for name in names]
    return [(name, here, there) for name, here, there in values if here != there]
