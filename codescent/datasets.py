"""In: a config. Out: what its task reads: the dataset located, prepared, opened.
Does not know how a dataset is made (data/ does), and does not import torch."""

from __future__ import annotations

from pathlib import Path

from codescent import models
from codescent.config import Config
from codescent.data.dataset import locate, open_dataset
from codescent.data.foreign import GPT2_VOCAB_SIZE
from codescent.data.prepare import prepare
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers import ByteTokenizer


def task_of(config: Config) -> str:
    """What is made of the corpus: data.task, or the first that the model's kind is for."""
    if config.data.task is not None:
        return config.data.task
    return models.TASKS[models.kind_of(config.model.kind, config.model.preset)][0]


def prepare_dataset(config: Config, *, progress: bool) -> Path:
    """The prepared dataset of a config, prepared now where it is not there yet.

    Raises:
        UserError: the corpus or the tokenizer cannot be used.
    """
    data = config.data
    return prepare(
        data.corpus,
        data.tokenizer,
        data.folder,
        validation_fraction=data.validation_fraction,
        text_key=data.text_key,
        progress=progress,
    )


def opened(config: Config, path: Path) -> AnyDataset:
    """The dataset that `prepare_dataset` has prepared.

    Raises:
        UserError: it is damaged.
    """
    return open_dataset(path)


def known_vocab_size(config: Config) -> int | None:
    """The vocabulary, as far as it is known before the corpus is prepared.

    Raises:
        UserError: bad arguments, or a prepared dataset with a truncated shard.
    """
    data = config.data
    found = locate(
        data.corpus,
        data.tokenizer,
        data.folder,
        validation_fraction=data.validation_fraction,
        text_key=data.text_key,
    )
    if found is not None:
        return opened(config, found).vocab_size
    kind, _, size = data.tokenizer.partition(":")
    if kind == "bpe":
        return int(size)
    return {"byte": ByteTokenizer.vocab_size, "gpt2": GPT2_VOCAB_SIZE}.get(data.tokenizer)
