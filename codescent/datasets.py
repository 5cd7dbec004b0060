"""In: a config. Out: what its task reads: the dataset located, prepared, opened.
Does not know how a dataset is made (data/ does), and does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

from codescent import models
from codescent.base.errors import UserError
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.data.text.dataset import locate, open_dataset
from codescent.data.text.foreign import GPT2_VOCAB_SIZE
from codescent.data.text.prepare import prepare
from codescent.data.text.request import KINDS
from codescent.data.tokenizers.tokenizer import ByteTokenizer
from codescent.data.tokenizers.wordpiece import split_name
from codescent.plan import Work
from codescent.plan.model import Size
from codescent.tasks.answers.prepare import SQUAD, QuestionRequest, locate_questions, prepare_questions
from codescent.tasks.answers.source import is_question_folder, open_questions
from codescent.tasks.answers.windows import WindowSizes
from codescent.tasks.conversations.chat_files import ChatFiles, read_chat_files
from codescent.tasks.conversations.prepare import ResponseRequest, locate_responses, prepare_responses
from codescent.tasks.conversations.source import ResponseDataset, is_response_folder, open_responses
from codescent.tasks.masked_tokens.source import MaskedDataset
from codescent.tasks.pairs.source import MARKS, LineDataset
from codescent.tasks.tensors.dataset import TensorDataset, in_memory, is_prepared, is_tensors, open_tensors
from codescent.tasks.tensors.dataset import read_description as read_tensor_description
from codescent.tasks.tensors.files import SUFFIXES, format_of
from codescent.tasks.tensors.prepare import make_recipe, prepare_synthetic
from codescent.tasks.tensors.synthetic import PREFIX, Sizes, Synthetic, parse

VOCAB_SIZES = {"byte": ByteTokenizer.vocab_size, "gpt2": GPT2_VOCAB_SIZE, "bert": 30_522, "bert-cased": 28_996}
"""Of tokenizers that do not depend on a corpus."""

PADDED = ("sft", "seq2seq")
"""Tasks whose samples have lengths beside tokens, whatever the model (see `Samples.extras`)."""


def task_of(config: Config) -> str:
    """What is made of the corpus: data.task, or what the corpus is for, or the first that the model's kind is for.

    Raises:
        UserError: the model's kind is not for it.
    """
    data, kind = config.data, models.kind_of(config.model.kind, config.model.preset)
    tensors = "tensors" if data.format is not None or is_tensors(data.corpus) else None
    asks = data.corpus == SQUAD or is_question_folder(Path(data.corpus).expanduser())
    answers = is_response_folder(Path(data.corpus).expanduser())
    task = data.task or tensors or ("qa" if asks else "sft" if answers else models.TASKS[kind][0])
    if task not in models.TASKS[kind]:
        others = " or ".join(name for name, tasks in models.TASKS.items() if task in tasks)
        raise UserError(
            f'data.task = "{task}": model.kind = "{kind}" is trained for {" or ".join(models.TASKS[kind])}; take that, '
            f"or model.kind = {others}"
        )
    return task


def sizes_of(config: Config) -> dict[str, Size | None]:
    """The sizes of the model as the config gives them; its head is that of the task.

    Raises:
        UserError: the model's kind is not for the task.
    """
    sizes = {name: getattr(config.model, name) for name in models.SIZES if name != "head"}
    task = task_of(config)
    return {**sizes, "head": task} if task in models.HEADS else sizes


def prepare_dataset(config: Config, *, progress: bool, chat: ChatFiles | None = None) -> Path:
    """The prepared dataset of a config, prepared now where it is not there yet.

    Args:
        config: of a run.
        progress: show how far it is.
        chat: the chat template that is taken for the one at data.chat_template: see `chat_files`.

    Raises:
        UserError: the corpus or the tokenizer cannot be used, or not for this task and model.
    """
    if problems := list(unfit(config)):
        raise UserError(*problems)
    data = config.data
    match task_of(config):
        case "qa":
            return prepare_questions(question_request(config), data.folder, progress=progress)
        case "sft":
            return prepare_responses(response_request(config, chat), data.folder, progress=progress)
        case "tensors":
            return _prepare_tensors(config, progress=progress)
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


def response_request(config: Config, chat: ChatFiles | None = None) -> ResponseRequest:
    """The prompts and responses, or conversations, that a config asks for."""
    data = config.data
    return ResponseRequest(
        corpus=data.corpus,
        tokenizer=data.tokenizer,
        template=data.template,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        validation_fraction=data.validation_fraction,
        messages_key=data.messages_key,
        chat_template=chat or data.chat_template,
    )


def chat_files(config: Config, kept: ChatFiles | None = None) -> ChatFiles | None:
    """The chat template at data.chat_template, with the day that it takes for today: whoever prepares the data of a run
    is to have this one. None: the task has none, or the config names none.

    Args:
        config: of a run.
        kept: what the run has kept, if it is there already: its day stands.

    Raises:
        UserError: it cannot be read, or is not the one that was kept.
    """
    path = config.data.chat_template
    if path is None or task_of(config) != "sft":
        return None
    files = read_chat_files(path)
    if kept is not None and not kept.is_same(files):
        raise UserError(
            f"data.chat_template: {files.name}: not the template with which the run began, which is in {kept.name}; "
            "begin a new run, or undo what was changed"
        )
    return replace(files, day=(kept and kept.day) or date.today().isoformat())


def prepared_with(dataset: AnyDataset) -> ChatFiles | None:
    """The chat template by which an open dataset was prepared; None: by none."""
    return dataset.chat if isinstance(dataset, ResponseDataset) else None


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
        case "sft":
            return open_responses(path)
        case "mlm":
            return MaskedDataset(open_dataset(path), config.run.seed)
        case "tensors":
            return _opened_tensors(config, path)
        case "seq2seq":
            return LineDataset(open_dataset(path), config.data.pairs)
    return open_dataset(path)


def is_synthetic(config: Config) -> bool:
    """Whether the corpus is random numbers, to measure with."""
    corpus = config.data.corpus
    return task_of(config) == "tensors" and (corpus.startswith(PREFIX) or is_prepared(Path(corpus).expanduser()))


def unfit(config: Config) -> Iterator[str]:
    """Why task, model and corpus do not go together, as far as their names tell."""
    task, model, corpus = task_of(config), config.model, config.data.corpus
    if task == "tensors" and model.embedding != "none":
        yield (
            'model.embedding: data.task = "tensors" has vectors, and embeddings are looked up by tokens; give '
            'model.embedding = "none"'
        )
    if task != "tensors" and model.embedding == "none":
        yield (
            f'model.embedding = "none": source and target are vectors, but data.task = "{task}" gives tokens; take '
            '"tied" or "untied", or tensors (data.corpus = "synthetic:2048", or a file of them)'
        )
    if task != "sft" and config.data.chat_template is not None:
        yield (
            f'data.chat_template: conversations are what data.task = "sft" learns from, and here it is "{task}"; give '
            'data.task = "sft", or leave the template out'
        )
    if task != "tensors" and is_tensors(corpus):
        yield f'data.task = "{task}": data.corpus = "{corpus}" is tensors, no text; leave data.task out'


def misfits(config: Config, dataset: AnyDataset, work: Work) -> Iterator[str]:
    """Why the model cannot read the samples of an open dataset."""
    if not isinstance(dataset, TensorDataset):
        return
    sizes = dataset.sizes
    for key, wanted, found, what in (
        ("model.source_len", work.positions(0), sizes.source_len, "vectors of the source"),
        ("model.target_len", work.positions(-1), sizes.target_len, "vectors of the target"),
        ("model.hidden_dim", work.hidden_dim, sizes.width, "numbers of a vector"),
    ):
        if wanted != found:
            yield f"{key} = {wanted}: a sample of {dataset.path} has {found} {what}; give {key} = {found}"


def _prepare_tensors(config: Config, *, progress: bool) -> Path:
    """Where the tensors are: written now, where synthetic ones are to be on disk and are not yet."""
    data = config.data
    path = Path(data.corpus).expanduser()
    if data.corpus.startswith(PREFIX):
        storage = data.format or "memory"
        if storage == "memory":
            return Path(data.corpus)
        return prepare_synthetic(_recipe(config), storage, data.folder, progress=progress)
    if not is_tensors(data.corpus):
        raise UserError(
            f"data.corpus = {data.corpus!r}: no tensors: a file whose name ends in {', '.join(SUFFIXES)}, a folder "
            "that `codescent data --synthetic` made, or synthetic:SAMPLES"
        )
    kept = read_tensor_description(path)["storage"] if is_prepared(path) else format_of(path)
    if data.format not in (None, "memory", kept):
        raise UserError(
            f'data.format = "{data.format}": {data.corpus} is {kept}; leave data.format out, or take "memory" to read '
            "it whole"
        )
    return path


def _opened_tensors(config: Config, path: Path) -> TensorDataset:
    data = config.data
    if data.corpus.startswith(PREFIX) and not is_prepared(path):
        return in_memory(_recipe(config), data.corpus)
    return open_tensors(str(path), data.validation_fraction, whole=data.format == "memory")


def _recipe(config: Config) -> Synthetic:
    """Synthetic tensors of the sizes that the model reads."""
    model = config.model
    kind = models.kind_of(model.kind, model.preset)
    shape = models.shape_of(kind, sizes_of(config), model.preset, bias=model.bias, dropout=model.dropout)
    samples, seed = parse(config.data.corpus)
    source_len, target_len = shape.streams
    return make_recipe(samples, Sizes(source_len, target_len, shape.hidden_dim), seed, config.data.validation_fraction)


def known_vocab_size(config: Config) -> int | None:
    """The vocabulary, as far as it is known before the corpus is prepared. Tensors have none.

    Raises:
        UserError: bad arguments, or a prepared dataset with a truncated shard.
    """
    data = config.data
    task = task_of(config)
    if task == "tensors":
        return None
    if task in ("qa", "mlm") and data.tokenizer in KINDS and split_name(data.tokenizer) is None:
        raise UserError(
            f'data.tokenizer = "{data.tokenizer}": data.task = "{task}" reads BERT\'s WordPiece; take "bert", '
            '"bert-cased" or "bert:FILE"'
        )
    if task == "qa":
        found = locate_questions(question_request(config), data.folder)
        return VOCAB_SIZES.get(data.tokenizer) if found is None else open_questions(found).vocab_size
    if task == "sft":
        found = locate_responses(response_request(config), data.folder)
        return VOCAB_SIZES.get(data.tokenizer) if found is None else open_responses(found).vocab_size
    marks = MARKS if task == "seq2seq" else 0
    found = locate(
        data.corpus,
        data.tokenizer,
        data.folder,
        validation_fraction=data.validation_fraction,
        text_key=data.text_key,
    )
    if found is not None:
        return open_dataset(found).vocab_size + marks
    kind, _, size = data.tokenizer.partition(":")
    known = int(size) if kind == "bpe" else VOCAB_SIZES.get(data.tokenizer)
    return None if known is None else known + marks
