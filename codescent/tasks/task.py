"""In: the sections of a config that a task reads. Out: the base class of every task: what a sample is, what is scored.
Does not name any task (`tasks.TASKS` does), and does not import torch: planning asks tasks too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from codescent import models
from codescent.base.errors import UserError
from codescent.data.prepared import TOKENIZER
from codescent.data.samples import AnyDataset, Source
from codescent.data.text.foreign import GPT2_VOCAB_SIZE
from codescent.data.text.request import KINDS
from codescent.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from codescent.data.tokenizers.wordpiece import split_name
from codescent.plan import Plan, TaskFacts, Work

if TYPE_CHECKING:
    import torch
    from torch import nn

    from codescent.config.sections import Data, Model

VOCAB_SIZES = {"byte": ByteTokenizer.vocab_size, "gpt2": GPT2_VOCAB_SIZE, "bert": 30_522, "bert-cased": 28_996}
"""Vocabularies of the tokenizers that do not depend on a corpus."""
Encode = Callable[[str], tuple[str, list[int]]]


@dataclass(frozen=True)
class TaskRequest:
    """What a run asks of its task: keys of its config, and what the run keeps and has decided.

    Attributes:
        run: the run's folder, for messages.
        kept: texts of its task's `files` that the run keeps, by name; empty before it begins.
        pinned: what `Task.pin` returned on rank 0; None before that.
    """

    data: Data
    model: Model
    seed: int = 0
    compile: str = "none"
    run: Path = Path()
    kept: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """The kind of model."""
        return models.kind_of(self.model.kind, self.model.preset)


@dataclass(frozen=True)
class ScoreRequest:
    """What `evaluate` asks of a task: to score a trained model.

    Attributes:
        make_module: the module with its weights on `device`, in evaluation mode.
        open_dataset: what the run reads.
        open_tokenizer: the one that the run keeps, if any. Raises UserError: it is damaged.
        data: --data: what to score instead of the run's validation split.
        out: --out: where to write predictions.
    """

    task: TaskRequest
    work: Work
    device: torch.device
    make_module: Callable[[], nn.Module]
    open_dataset: Callable[[], AnyDataset]
    open_tokenizer: Callable[[], Tokenizer | None]
    data: Path | None = None
    out: Path | None = None

    def validation(self) -> tuple[Path, Source]:
        """Where the run's data is, and the samples of its validation split. Raises UserError: there is none."""
        dataset, work = self.open_dataset(), self.work
        source = dataset.source("validation", work.seq_len, work.positions(-1))
        if source.num_samples < 1:
            raise UserError(f"{dataset.path}: the validation split has not one sample; raise data.validation_fraction")
        return dataset.path, source


class Prompts:
    """How a prompt becomes the tokens that a trained model continues.

    `encode` gives what is shown of it, and its tokens; `stop` ends a text. By default they are the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, encode: Encode | None = None, stop: int | None = None) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self.stop = tokenizer.separator if stop is None else stop

    def encode(self, prompt: str) -> tuple[str, list[int]]:
        """A prompt as it is shown, and its tokens. Raises UserError: it cannot be encoded.

        An empty one begins a document, which follows a separator, or a line's end where there is none.
        """
        if prompt:
            return self._encode(prompt) if self._encode else (prompt, self._tokenizer.encode(prompt).tolist())
        if self._tokenizer.separator is not None:
            return prompt, [self._tokenizer.separator]
        try:
            return prompt, self._tokenizer.encode("\n").tolist() or [0]
        except UserError:  # an alphabet without line ends
            return prompt, [0]


class ShownDataset(AnyDataset, Protocol):
    """A dataset that `codescent data` shows."""

    def summary(self) -> list[str]:
        """What there is to say of it, in lines."""

    def verify(self) -> None:
        """Compare its files with what was noted when they were made. Raises UserError: all that changed."""


class Task:
    """What a model is trained to predict of a sample, from which data; the defaults are those that most tasks share.

    Attributes:
        name: data.task.
        kinds: the kinds of model that it is for.
        keys: the keys of [data] that decide its samples, and thus its losses.
        head: the head that a model needs for it, of a kind whose models have several; None: the only one.
        extras: samples have extras, such as their lengths, with every kind of model (see `Samples`).
        files: names of the files of a run that decide its samples.
        unit: what one loss belongs to, in words.
        peft_task_type: `peft`'s name of the task; None: it has none.
        scores_files: the kinds of model that are scored on a file of the user's, too.
    """

    name: str
    kinds: tuple[str, ...]
    keys: tuple[str, ...] = ("corpus", "tokenizer", "validation_fraction", "text_key")
    head: str | None = None
    extras = False
    files: tuple[str, ...] = ()
    unit = "tokens"
    peft_task_type: str | None = None
    scores_files: tuple[str, ...] = ()

    def made_for(self, data: Data) -> bool:
        """Whether a corpus asks for this task by itself, without data.task."""
        return False

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """Why it cannot serve this model and these keys, each with the nearest that would do."""
        if request.model.embedding == "none":
            yield (
                f'model.embedding = "none": source and target are vectors, but data.task = "{self.name}" gives tokens; '
                'take "tied" or "untied", or tensors (data.corpus = "synthetic:2048", or a file of them)'
            )

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """Why a run of the task `name` may not be given what only this task reads."""
        yield from ()

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """What the plan must know."""
        values = {key: getattr(request.data, key) for key in self.keys}
        identity = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
        return TaskFacts(self.name, self.extras or shape.extras, shape.head_share, identity=identity)

    def vocab_size(self, request: TaskRequest) -> int | None:
        """The vocabulary, if known before the data is prepared. Raises UserError: keys or data that cannot be used."""
        return VOCAB_SIZES.get(request.data.tokenizer)

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """Prepare the data, if it is not there yet; returns where it is. Raises UserError: it cannot be prepared."""
        raise NotImplementedError

    def open(self, request: TaskRequest, path: Path) -> AnyDataset:
        """The data that `prepare` returned the path of, open. Raises UserError: it is not what this task reads."""
        raise NotImplementedError

    def open_corpus(self, corpus: str, validation_fraction: float) -> ShownDataset | None:
        """A corpus that needs no preparation, open; None: it needs some, or belongs to another task."""
        return None

    def misfits(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """Why the model cannot read the samples."""
        yield from ()

    # What a run keeps, so that it goes on with the same: rank 0 pins it, every rank reads the pin.

    def pin(self, request: TaskRequest) -> Mapping[str, Any]:
        """What rank 0 decides for all ranks before the data is prepared, as JSON data.
        Raises UserError: it cannot be read, or is not what the run keeps.
        """
        return {}

    def carry(self, dataset: AnyDataset) -> Mapping[str, str]:
        """Texts of the files that a run keeps, by their name."""
        text = dataset.tokenizer_text
        return {} if text is None else {TOKENIZER: text}

    def carry_unprepared(self, request: TaskRequest) -> Mapping[str, str]:
        """`carry` for an imported run, which has no data yet; without the tokenizer. Raises UserError like `pin`."""
        return {}

    def refuse_resume(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """Why a run that keeps `request.kept` cannot go on with this dataset."""
        yield from ()

    # What is done with a trained model.

    def refuse_score(self, request: ScoreRequest) -> Iterator[str]:
        """Why --data or --out cannot be used."""
        if request.out is not None:
            yield f'--out {request.out}: answers to questions are written; the run\'s data.task is "{self.name}"'
        if request.data is not None and request.task.kind not in self.scores_files:
            yield (
                f'--data {request.data}: of model.kind = "{request.task.kind}" with data.task = "{self.name}" the '
                "run's own validation split alone is scored"
            )

    def score(self, request: ScoreRequest) -> list[str]:
        """What `codescent evaluate` prints; by default the mean loss of the validation split. Raises UserError."""
        from codescent.tasks.score import mean_loss  # noqa: PLC0415 - planning does without torch

        path, source = request.validation()
        loss, count = mean_loss(request.make_module(), source, request.work.seq_len, request.device)
        return [f"{path}, validation split: loss {loss:.4f} of {count:,} {self.unit}"]

    def prompts(self, request: TaskRequest, tokenizer: Tokenizer) -> Prompts:
        """How a prompt becomes tokens. Raises UserError: what the run keeps for it is damaged or absent."""
        return Prompts(tokenizer)

    def export(
        self, request: TaskRequest, tokenizer: Tokenizer, texts: dict[str, str], ends: dict[str, int | None]
    ) -> tuple[dict[str, str], dict[str, int | None]]:
        """The tokenizer's files of an export and its control tokens in config.json, with what this task adds."""
        return texts, ends


def refuse_no_wordpiece(task: Task, data: Data) -> None:
    """Raise UserError where data.tokenizer names one that is not BERT's."""
    if data.tokenizer in KINDS and split_name(data.tokenizer) is None:
        raise UserError(
            f'data.tokenizer = "{data.tokenizer}": data.task = "{task.name}" reads BERT\'s WordPiece; take "bert", '
            '"bert-cased" or "bert:FILE"'
        )
