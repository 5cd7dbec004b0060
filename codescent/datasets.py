"""In: a config. Out: what its task reads: the dataset located, prepared, opened.
Does not know how a dataset is made (data/ does), and does not import torch."""

from __future__ import annotations

from pathlib import Path

from codescent import models
from codescent.config import Config
from codescent.data.dataset import locate, open_dataset
from codescent.data.foreign import GPT2_VOCAB_SIZE
from codescent.data.masked import MaskedDataset
from codescent.data.prepare import prepare
from codescent.data.question_prepare import SQUAD, QuestionRequest, locate_questions, prepare_questions
from codescent.data.question_source import open_questions
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers import ByteTokenizer
from codescent.data.windows import WindowSizes
from codescent.errors import UserError

VOCAB_SIZES = {"byte": ByteTokenizer.vocab_size, "gpt2": GPT2_VOCAB_SIZE, "bert": 30_522, "bert-cased": 28_996}
"""Of tokenizers that do not depend on a corpus."""


def task_of(config: Config) -> str:
    """What is made of the corpus: data.task, or what the corpus is for, or the first that the model's kind is for.

    Raises:
        UserError: the model's kind is not for it.
    """
    kind = models.kind_of(config.model.kind, config.model.preset)
    task = config.data.task or ("qa" if config.data.corpus == SQUAD else models.TASKS[kind][0])
    if task not in models.TASKS[kind]:
        others = " or ".join(name for name, tasks in models.TASKS.items() if task in tasks)
        raise UserError(
            f'data.task = "{task}": model.kind = "{kind}" is trained for {" or ".join(models.TASKS[kind])}; take that, '
            f"or model.kind = {others}"
        )
    return task


def prepare_dataset(config: Config, *, progress: bool) -> Path:
    """The prepared dataset of a config, prepared now where it is not there yet.

    Raises:
        UserError: the corpus or the tokenizer cannot be used.
    """
    data = config.data
    if task_of(config) == "qa":
        return prepare_questions(question_request(config), data.folder, progress=progress)
    return prepare(
        data.corpus,
        data.tokenizer,
        data.folder,
        validation_fraction=data.validation_fraction,
        text_key=data.text_key,
        progress=progress,
    )


def question_request(config: Config) -> QuestionRequest:
    """The questions that a config asks for.

    Raises:
        UserError: nothing says how long a sample is.
    """
    data = config.data
    if (max_length := data.seq_len or _positions(config)) is None:
        raise UserError("data.seq_len: how many tokens a window of question and context has; BERT's is 384")
    sizes = WindowSizes(max_length, data.stride, data.question_len)
    return QuestionRequest(
        data.corpus, data.validation, data.tokenizer, sizes, data.train_questions, data.validation_questions
    )


def _positions(config: Config) -> int | None:
    """The longest sample of the model, as far as the config says."""
    if config.model.seq_len is not None or config.model.preset is None:
        return config.model.seq_len
    return models.preset_positions(config.model.preset)


def opened(config: Config, path: Path) -> AnyDataset:
    """The dataset that `prepare_dataset` has prepared.

    Raises:
        UserError: it is damaged, or not what the task reads.
    """
    match task_of(config):
        case "qa":
            return open_questions(path)
        case "mlm":
            return MaskedDataset(open_dataset(path), config.run.seed)
    return open_dataset(path)


def known_vocab_size(config: Config) -> int | None:
    """The vocabulary, as far as it is known before the corpus is prepared.

    Raises:
        UserError: bad arguments, or a prepared dataset with a truncated shard.
    """
    data = config.data
    if task_of(config) == "qa":
        if data.tokenizer in VOCAB_SIZES:
            return VOCAB_SIZES[data.tokenizer]
        found = locate_questions(question_request(config), data.folder)
        return None if found is None else open_questions(found).vocab_size
    found = locate(
        data.corpus,
        data.tokenizer,
        data.folder,
        validation_fraction=data.validation_fraction,
        text_key=data.text_key,
    )
    if found is not None:
        return open_dataset(found).vocab_size
    kind, _, size = data.tokenizer.partition(":")
    return int(size) if kind == "bpe" else VOCAB_SIZES.get(data.tokenizer)
