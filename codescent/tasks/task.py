"""In: sections [data] and [model] of a config. Out: the base class of tasks, which check settings, prepare the data and
score trained models.
Does not list the tasks (`tasks.TASKS` does). Does not import torch, because `codescent plan` uses tasks, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from codescent import models
from codescent.base.errors import UserError
from codescent.data.prepared import TOKENIZER
from codescent.data.samples import AnswerTokens, AnyDataset, Source
from codescent.data.text.foreign import GPT2_VOCAB_SIZE
from codescent.data.text.records import FIRST_NAMES
from codescent.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from codescent.plan import Plan, TaskFacts, Work
from codescent.plan.objective import Policy, Preference
from codescent.tasks.scores import Scores

if TYPE_CHECKING:
    import torch
    from torch import nn

    from codescent.config.sections import Data, Model, Train
    from codescent.tasks.conversations.chat_template import ChatTokens

VOCAB_SIZES = {"byte": ByteTokenizer.vocab_size, "gpt2": GPT2_VOCAB_SIZE, "bert": 30_522, "bert-cased": 28_996}
"""Vocabulary sizes of the tokenizers that do not depend on a corpus."""
Encode = Callable[[str], tuple[str, list[int]]]


@dataclass(frozen=True)
class TaskRequest:
    """What a task needs to know of a run: sections of its config, files of its folder, decisions of rank 0.

    Attributes:
        run: the run's folder, for messages.
        kept: the task's `files` in the run's folder: name -> text; empty for a new run.
        pinned: the return value of `Task.pin` on rank 0; None before that.
        named: values of [data] that are names of a hub, by key. `data` has their places in the cache instead.
        corpora: the request of each corpus of data.mixture, by name; empty: there is one corpus.
        train: the section [train], for what a task minimises; None: its defaults.
    """

    data: Data
    model: Model
    seed: int = 0
    compile: str | None = None
    run: Path = Path()
    kept: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, Any] | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    corpora: Mapping[str, TaskRequest] = field(default_factory=dict)
    train: Train | None = None

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each corpus of a mixture, by name; empty: they follow from the sizes."""
        entries = self.data.mixture or ()
        return {entry.name: entry.weight for entry in entries if entry.weight is not None}

    @property
    def kind(self) -> str:
        """The kind of model."""
        return models.kind_of(self.model.kind, self.model.preset)


@dataclass(frozen=True)
class ScoreRequest:
    """What a task needs to score a trained model for `evaluate`.

    Attributes:
        make_module: returns the module with its weights on `device`, in evaluation mode.
        open_dataset: returns the run's dataset.
        open_tokenizer: returns the tokenizer in the run's folder, or None. Raises UserError: it is damaged.
        data: --data, a file to score instead of the run's validation split.
        out: --out, the file for predictions.
        answer: writes the likeliest answer of a module to each of several prompts (tokens), of up to so many new
            tokens; then the token that ends an answer, and the number of ids. None: nothing writes any.
    """

    task: TaskRequest
    work: Work
    device: torch.device
    make_module: Callable[[], nn.Module]
    open_dataset: Callable[[], AnyDataset]
    open_tokenizer: Callable[[], Tokenizer | None]
    data: Path | None = None
    out: Path | None = None
    answer: Callable[[nn.Module, Sequence[Sequence[int]], int, int | None, int], list[AnswerTokens]] | None = None

    def validation(self, task: Task) -> tuple[str, Source]:
        """The name of the run's validation split, and its samples. Raises UserError: the split has no sample."""
        dataset, work = self.open_dataset(), self.work
        source = dataset.source("validation", work.seq_len, work.positions(-1))
        if source.num_samples < 1:
            more = task.more_validation(self.task)
            raise UserError(f"{dataset.path}: the validation split has no sample; {more}")
        return self.validation_name(dataset), source

    def validation_name(self, dataset: AnyDataset) -> str:
        """The validation split in words: data.validation, or a part of the run's data."""
        given = self.task.data.validation
        return f"{dataset.path}, validation split" if given is None else f"{given} (data.validation)"


class Prompts:
    """Encodes prompts, whose tokens a trained model continues.

    Args:
        encode: function from a prompt to (text to print, tokens); None: the prompt itself and the tokenizer's ids.
        stop: the token that ends a text; None: the tokenizer's separator.
        default: the prompt if the user gives none.
    """

    def __init__(
        self, tokenizer: Tokenizer, encode: Encode | None = None, stop: int | None = None, default: str = ""
    ) -> None:
        self._tokenizer, self._encode, self.default = tokenizer, encode, default
        self.stop = tokenizer.separator if stop is None else stop

    def encode(self, prompt: str) -> tuple[str, list[int]]:
        """The text of a prompt to print, and its tokens. Raises UserError: it cannot be encoded.

        A prompt begins with what begins every text of the tokenizer, such as <s>. An empty prompt begins a document:
        its token is this one, else the separator. Without a separator it is the end of a line, else id 0.
        """
        if prompt:
            begin = self._tokenizer.opening
            return (
                self._encode(prompt) if self._encode else (prompt, [*begin, *self._tokenizer.encode(prompt).tolist()])
            )
        if self._tokenizer.opening:
            return prompt, list(self._tokenizer.opening)
        if self._tokenizer.separator is not None:
            return prompt, [self._tokenizer.separator]
        try:
            return prompt, self._tokenizer.encode("\n").tolist() or [0]
        except UserError:  # an alphabet without line ends
            return prompt, [0]


class ShownDataset(AnyDataset, Protocol):
    """A dataset that `codescent data` can print and verify."""

    def summary(self) -> list[str]:
        """Lines that describe the dataset."""

    def verify(self) -> None:
        """Compare its files with the hashes stored when they were written. Raises UserError: every changed file."""


class Task:
    """Base class of tasks: what a model learns to predict, and from which data. Most tasks share the defaults.

    Attributes:
        name: the value of data.task.
        kinds: the kinds of model that can be trained for the task.
        aim: what the model learns, in words.
        form: the kind of corpus for which `made_for` is true, in words.
        keys: the keys of [data] that decide the samples, and so the losses.
        reads: more keys of [data] that the task reads.
        objective: keys of [train] that the task alone reads, for what it minimises.
        undivided: why data.documents = "separate" makes no sense for its samples, as a clause; "": it does.
        ignores: keys, as "section.key", that have no effect in this task, though other tasks need them.
        head: the model head that the task needs; None: the kind of model has one head only.
        extras: True if the samples have extras, such as lengths, for every kind of model (see `Samples`).
        equal_losses: True if all samples have equally many losses.
        files: names of files in the run's folder that decide the samples.
        mixes: True if a mixture of corpora can be made of its samples.
        reads_text: True if the task reads any text, as `data.as_text` says.
        kept: keys that name a file of the user, each with the name of the run's own copy in its folder.
        unit: what one loss is computed for, in words.
        peft_task_type: `peft`'s name of the task; None: it has none.
        scores_files: the kinds of model for which `evaluate --data FILE` works.
        published: names of corpora of this task that are no texts, each with the shipped config that trains on it.
    """

    name: str
    kinds: tuple[str, ...]
    aim: str = ""
    form: str = "text"
    keys: tuple[str, ...] = ("corpus", "tokenizer", "validation_fraction", "text_key", "as_text", "validation")
    reads: tuple[str, ...] = ()
    objective: tuple[str, ...] = ()
    undivided: str = "its samples are no text with several documents"
    ignores: tuple[str, ...] = ()
    head: str | None = None
    extras = False
    mixes = True
    reads_text = False
    equal_losses = True
    files: tuple[str, ...] = ()
    kept: Mapping[str, str] = MappingProxyType({"data.tokenizer": TOKENIZER})
    unit = "tokens"
    peft_task_type: str | None = None
    scores_files: tuple[str, ...] = ()
    published: Mapping[str, str] = MappingProxyType({})

    def made_for(self, data: Data) -> bool:
        """Whether the corpus implies this task if data.task is not set."""
        return False

    def also_text(self, corpus: str) -> bool:
        """Whether the corpus implies this task, but is a text that other tasks can read as well."""
        return False

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """Messages: why the task cannot be used with this model and these keys, each with what to change."""
        if request.model.embedding == "none":
            yield (
                f'model.embedding = "none": source and target are vectors, but data.task = "{self.name}" gives tokens; '
                'take "tied" or "untied", or tensors (data.corpus = "synthetic:2048", or a file of them)'
            )

    def refuse_documents(self, request: TaskRequest) -> Iterator[str]:
        """Messages: why the documents of a sample cannot be kept apart. Called where data.documents asks for it."""
        separate = 'data.documents = "separate"'
        if self.undivided:
            yield f'{separate}: data.task = "{self.name}": {self.undivided}; leave data.documents out'
        elif request.kind not in models.SEPARATING:
            yield (
                f'{separate}: model.kind = "{request.kind}" attends to all of a sample; only '
                f"{' and '.join(models.SEPARATING)} keep its documents apart; leave data.documents out"
            )
        elif request.compile == "model":
            yield (
                f"{separate}: the last token of a document has no target, which the compiled head of train.compile = "
                '"model" does not support; take train.compile = "blocks"'
            )

    def unpreparable(self, request: TaskRequest) -> Iterator[str]:
        """Messages: why the data could not be prepared, as far as the keys tell. An imported model may be so."""
        yield from ()

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """Keys, as "section.key", that the task reads but that this corpus makes useless, with the reason as a clause.
        Keys with defaults may be among them.
        """
        yield from ()

    def more_validation(self, request: TaskRequest) -> str:
        """What to do if the validation split is too short, in words."""
        if request.data.validation is not None:
            return "give a longer data.validation"
        useless = dict(self.unused(request))
        return "give data.validation" if "data.validation_fraction" in useless else "raise data.validation_fraction"

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """Messages: why a run of another task, `name`, cannot use keys or a corpus that only this task reads."""
        yield from ()

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """What the plan must know of the task."""
        values = {key: getattr(request.data, key) for key in self.keys}
        if request.data.validation is not None:
            values.pop("validation_fraction", None)
        separate = request.data.documents == "separate"
        for key, given in (("as_text", request.data.as_text), ("documents", separate)):
            if not given:  # earlier runs do not have the key
                values.pop(key, None)
        if "text_key" in values:  # as earlier runs recorded it
            values["text_key"] = values["text_key"] or FIRST_NAMES[0]
        identity = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
        identity |= {key: name for key, name in request.named.items() if key in identity}
        extras = self.extras or shape.extras or separate
        equal = self.equal_losses and not separate
        return TaskFacts(self.name, extras, shape.head_share, equal_losses=equal, documents=separate, identity=identity)

    def preference(self, request: TaskRequest) -> Preference | None:
        """The loss of answers that the task minimises; None: the cross-entropy of its targets."""
        return None

    def policy(self, request: TaskRequest) -> Policy | None:
        """The loss of answers that the model writes itself, before each step; None: samples have what is learned."""
        return None

    def remarks(self, request: TaskRequest) -> Iterator[str]:
        """Sentences: what a user may not have meant, though the run can be made. Raises UserError: unusable keys."""
        yield from ()

    def vocab_size(self, request: TaskRequest) -> int | None:
        """The vocabulary size, if it is known without preparing. Raises UserError: keys or data that cannot be used."""
        return VOCAB_SIZES.get(request.data.tokenizer)

    def locate(self, request: TaskRequest) -> Path | None:
        """The path of the prepared data; None: `prepare` has not made it yet, or the task cannot tell.
        Raises UserError: it is damaged.
        """
        return None

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """Prepare the data if it does not exist yet; return its path. Raises UserError: it cannot be prepared."""
        raise NotImplementedError

    def open(self, request: TaskRequest, path: Path) -> AnyDataset:
        """Open the data at a path that `prepare` returned. Raises UserError: this task cannot read it."""
        raise NotImplementedError

    def open_corpus(self, corpus: str, validation_fraction: float) -> ShownDataset | None:
        """Open a corpus that needs no preparation; None: it needs preparation, or belongs to another task."""
        return None

    def misfits(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """Messages: why the model cannot read the samples."""
        yield from ()

    def shortened(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """Sentences, printed before the first step: which parts of samples a run leaves out, as they have no room."""
        yield from ()

    def beforehand(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """Sentences: data that a run makes itself, or makes again on another day, although it is prepared now."""
        yield from ()

    # Files in the run's folder, so that a resumed run has the same samples. Rank 0 decides (`pin`) for every rank.

    def pin(self, request: TaskRequest) -> Mapping[str, Any]:
        """Rank 0's decisions for all ranks before the data is prepared, as JSON data.
        Raises UserError: a file cannot be read, or differs from its copy in the run's folder.
        """
        return {}

    def carry(self, dataset: AnyDataset) -> Mapping[str, str]:
        """The files that the task stores in the run's folder: name -> text."""
        text = dataset.tokenizer_text
        return {} if text is None else {TOKENIZER: text}

    def carry_unprepared(self, request: TaskRequest) -> Mapping[str, str]:
        """`carry` for an imported run, which has no data yet: without the tokenizer. Raises UserError like `pin`."""
        return {}

    def refuse_resume(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """Messages: why a run with the stored files `request.kept` cannot resume with this dataset."""
        yield from ()

    # Use of a trained model.

    def refuse_score(self, request: ScoreRequest) -> Iterator[str]:
        """Messages: why --data or --out cannot be used."""
        if request.out is not None:
            yield f'--out {request.out}: only answers to questions are written; the run\'s data.task is "{self.name}"'
        if request.data is not None and request.task.kind not in self.scores_files:
            yield (
                f'--data {request.data}: for model.kind = "{request.task.kind}" with data.task = "{self.name}" only '
                "the run's own validation split can be scored"
            )

    def score(self, request: ScoreRequest) -> Scores:
        """What `codescent evaluate` prints; by default the validation split's mean loss. Raises UserError."""
        from codescent.tasks.score import mean_loss  # noqa: PLC0415 - planning does without torch

        name, source = request.validation(self)
        loss, count = mean_loss(request.make_module(), source, request.work.seq_len, request.device)
        facts = {"data": name, "loss": loss, "count": count, "unit": self.unit}
        return Scores([f"{name}: loss {loss:.4f} of {count:,} {self.unit}"], facts)

    def prompts(self, request: TaskRequest, tokenizer: Tokenizer) -> Prompts:
        """The encoder of prompts. Raises UserError: a file that it needs in the run's folder is damaged or missing."""
        return Prompts(tokenizer)

    def chat(self, request: TaskRequest, tokenizer: Tokenizer) -> ChatTokens | None:
        """The chat template of a trained model; None: it has none. Raises UserError: as `prompts`."""
        return None

    def example(self, open_validation: Callable[[], Source]) -> list[int] | None:
        """The tokens of a prompt of the validation split, which the text at the end of a run continues.
        None: this text begins a document. `open_validation` opens the split. Raises UserError: it cannot be opened.
        """
        return None

    def keys_of_folder(
        self, folder: Path, tokenizer: Tokenizer, data: Data, *, has_corpus: bool
    ) -> Mapping[str, str | Path]:
        """Keys of [data] for an import of a Hugging Face folder that was made for this task; of other folders none.

        `has_corpus`: whether the user has named the corpus. Raises UserError: why the task cannot use the folder.
        """
        return {}

    def missing_files(self, data: Data, *, has_corpus: bool) -> list[str]:
        """Keys of [data] that the user must give before a run can start. `has_corpus`: see `keys_of_folder`."""
        return [] if has_corpus else ["corpus"]

    def export(
        self,
        request: TaskRequest,
        tokenizer: Tokenizer,
        texts: dict[str, str],
        ends: dict[str, Any],
        *,
        is_trained: bool,
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Add the task's part to an export.

        Args and return value:
            texts: the tokenizer's files, name -> text.
            ends: control tokens for config.json, key -> id, or list of ids.
            is_trained: false for the checkpoint of an imported run, which keeps what its folder had.
        """
        return texts, ends


def is_given(data: Data, name: str) -> bool:
    """Whether a key of [data] has another value than its default."""
    return bool(getattr(data, name) != type(data).model_fields[name].default)
