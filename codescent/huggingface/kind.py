"""In: what a file of a kind declares: names, keys, axes. Out: one noun that reading and writing go by, both ways.
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
    """A key of config.json whose value our model has in only one way.

    Attributes:
        value: what is written.
        others: what means the same.
        absent: whether a config.json without the key means that value, too.
    """

    value: Any
    others: tuple[Any, ...] = ()
    absent: bool = True


@dataclass(frozen=True)
class Kind:
    """How one kind of model of ours is written as a folder of theirs.

    Attributes:
        name: the kind's (one of models.KINDS).
        model_type: what config.json calls it.
        architectures: the classes whose folders have all parameters of a shape, the one that we write in front.
        prefix: of the names of their tensors but the head's; a folder of the model without a head has none.
        sizes: key of config.json by the name of our size.
        defaults: our sizes where config.json has not their key, or null.
        fixed: keys with one value.
        ignored: keys that change nothing of what the model computes, or of what is stored.
        rows: the table of the parameters of a shape.
        axes: sizes of axes in the table that do not follow from a parameter's shape.
        full: the shape whose parameters are all those that a folder has: what ours lacks is written as zeros.
        read: the rest of config.json: our other sizes from it, and what is wrong.
        write: the rest of config.json, from our shape.
        handled: the keys that `read` knows.
        buffers: regular expression of tensors in old folders that are no parameters.
        spare: regular expression of tensors that our model has no use for: left out, and said.
        renamed: regular expressions of names that old folders have, and what stands for them since.
        tied: a tensor that repeats another one where the model says so, and which.
        fresh: parameters that a folder of the model without a head lacks: drawn, where weights are read for training.
        free: sizes that may differ between a folder and a run that begins with its weights.
    """

    name: str
    model_type: str
    architectures: Callable[[Any], tuple[str, ...]]
    prefix: str
    sizes: Mapping[str, str]
    defaults: Callable[[Settings], Mapping[str, Any]]
    fixed: Mapping[str, Fixed]
    ignored: Collection[str]
    rows: Callable[[Any], Iterable[Row]]
    axes: Callable[[Any], Mapping[str, int]]
    full: Callable[[Any], Shape]
    read: Callable[[Settings], tuple[dict[str, Any], list[str]]]
    write: Callable[[Any], dict[str, Any]]
    handled: Collection[str]
    buffers: str = r"(?!)"
    spare: str = r"(?!)"
    renamed: tuple[tuple[str, str], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    fresh: Collection[str] = ()
    free: Collection[str] = ("dropout",)


COMMON_IGNORED = frozenset(
    {
        "model_type",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "unk_token_id",
        "initializer_range",
        "task_specific_params",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "torchscript",
        "id2label",
        "label2id",
        "finetuning_task",
        "tokenizer_class",
        "gradient_checkpointing",
        "auto_map",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "problem_type",
    }
)


def differences(kind: Kind, folders: Shape, runs: Shape) -> list[tuple[str, Any, Any]]:
    """Sizes in which two shapes differ that may not: name, the folder's, the run's."""
    names = [entry.name for entry in dataclasses.fields(folders) if entry.name not in kind.free]
    values = [(name, getattr(folders, name), getattr(runs, name)) for name in names]
    return [(name, here, there) for name, here, there in values if here != there]
