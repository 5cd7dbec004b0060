"""In: a task; a run whose data is a mixture of corpora. Out: the task of the mixture, which is that of each corpus.
Does not order samples (data/mixed_order.py does) and does not know what a sample is: the task of the corpora does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from codescent import models
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.config.mixture import MIXTURE
from codescent.data.mixture import MixedDataset, MixedSource
from codescent.data.samples import AnyDataset, Source
from codescent.data.text.dataset import token_shards
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.plan import Plan, Scalar, TaskFacts
from codescent.plan.objective import Preference
from codescent.tasks.scores import Scores
from codescent.tasks.task import Prompts, ScoreRequest, Task, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data

OF_A_CORPUS = ("corpus", "validation", "text_key")
"""The keys of [data] of which each corpus may have its own value."""
TAKEN = (
    *(
        "name",
        "kinds",
        "aim",
        "form",
        "keys",
        "reads",
        "objective",
        "ignores",
        "head",
        "extras",
        "reads_text",
        "equal_losses",
    ),
    *("files", "kept", "unit", "peft_task_type", "scores_files", "mixes", "undivided"),
)
"""Attributes of the task of the corpora."""
T = TypeVar("T")


class MixtureTask(Task):
    """A task on a mixture. `request.corpora` has a request for each corpus; `task` is that of all of them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        for name in TAKEN:
            setattr(self, name, getattr(task, name))

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`; also what does not mix."""
        if not self.mixes:
            yield f'{MIXTURE}: the corpora of data.task = "{self.name}" cannot be mixed; give one as data.corpus'
        kind, corpora = request.data.tokenizer.partition(":")[0], _each(request)
        texts = [name for name, one in corpora.items() if token_shards(one.data.corpus) is None]
        if kind in ("char", "bpe") and texts and self.mixes:
            yield (
                f'data.tokenizer = "{request.data.tokenizer}": it is made from one corpus, and {MIXTURE} needs one for '
                f"all ({', '.join(texts)}); take byte, gpt2, or a tokenizer.json such as that of a prepared corpus"
            )
        yield from dict.fromkeys(problem for one in corpora.values() for problem in self.task.refuse(one))

    def refuse_documents(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`."""
        yield from dict.fromkeys(one for each in _each(request).values() for one in self.task.refuse_documents(each))

    def unpreparable(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`."""
        yield from dict.fromkeys(one for each in _each(request).values() for one in self.task.unpreparable(each))

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`: keys that have no effect on any corpus; keys of a corpus that have none on it, each at its place
        (`config.mixture.Place`).
        """
        found = {name: dict(self.task.unused(one)) for name, one in _each(request).items()}
        given = given_of_each(request)
        for key, why in next(iter(found.values())).items():
            if all(key in one for one in found.values()):
                yield key, why
        for name, keys in given.items():
            useless = {key: found[name][f"data.{key}"] for key in keys if f"data.{key}" in found[name]}
            yield from ((f"{MIXTURE}.{name}.{key}", why) for key, why in useless.items())
        if any("text_key" in keys for keys in given.values()) and all(
            "text_key" in given[name] or "data.text_key" in one for name, one in found.items()
        ):
            yield "data.text_key", "is for corpora without a text_key of their own, and none of them reads it"

    def more_validation(self, request: TaskRequest) -> str:
        """See `Task`."""
        return "raise data.validation_fraction, or give its entry in data.mixture a validation"

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """See `Task`; with the names of the corpora, and what is given of each."""
        each = {name: self.task.facts(one, shape) for name, one in _each(request).items()}
        identity: dict[str, Scalar] = {"corpus": None, "mixture": ", ".join(each)}
        identity["mixture_temperature"] = None if request.weights else request.data.mixture_temperature or 1.0
        for name, facts in each.items():
            own = {key: facts.identity[key] for key in OF_A_CORPUS if facts.identity.get(key) is not None}
            identity |= {key: value for key, value in facts.identity.items() if key not in OF_A_CORPUS}
            identity |= {f"mixture.{name}.{key}": value for key, value in own.items()}
            identity |= {f"mixture.{name}.weight": request.weights[name]} if request.weights else {}
        return replace(next(iter(each.values())), identity=identity)

    def preference(self, request: TaskRequest) -> Preference | None:
        """See `Task`."""
        return self.task.preference(request)

    def remarks(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`."""
        yield from dict.fromkeys(one for each in _each(request).values() for one in self.task.remarks(each))

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`: the first that is known; `open` compares all."""
        found = _of_each(request, self.task.vocab_size)
        return next((size for size in found.values() if size is not None), None)

    def locate(self, request: TaskRequest) -> Path | None:
        """See `Task`: the folder of prepared corpora, if all are there."""
        found = _of_each(request, self.task.locate)
        return None if None in found.values() else request.data.folder

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """See `Task`. Returns the folder of prepared corpora."""
        _of_each(request, lambda one: self.task.prepare(one, progress=progress))
        return request.data.folder

    def open(self, request: TaskRequest, path: Path) -> MixedDataset:
        """See `Task`. Raises UserError: also if the corpora have tokens of several tokenizers."""

        def opened(one: TaskRequest) -> AnyDataset:
            found = self.task.locate(one)
            if found is None:
                raise UserError(f"{one.data.corpus}: its prepared data in {path} was removed; run the command again")
            return self.task.open(one, found)

        corpora = _of_each(request, opened)
        _refuse_other_tokens(corpora)
        return MixedDataset(path, corpora, request.weights, request.data.mixture_temperature or 1.0)

    def misfits(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """See `Task`; also a corpus that has fewer samples than a step takes of it."""
        assert isinstance(dataset, MixedDataset)
        work = plan.work
        source = dataset.source("train", work.seq_len, work.positions(-1))
        for (name, corpus), share in zip(source.corpora.items(), source.shares, strict=True):
            yield from _prefixed(name, self.task.misfits(dataset.corpora[name], plan))
            least = max(1, math.ceil(share * work.global_batch_size))
            if corpus.num_samples < least:
                samples = f"{counted(corpus.num_samples, 'training sample')} of {counted(work.seq_len, 'position')}"
                yield (
                    f"{MIXTURE}.{name}: {dataset.corpora[name].path} has {samples}, and a step takes up to {least} of "
                    "it; lower its weight, data.seq_len or train.global_batch_size, or give more text"
                )

    def beforehand(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """See `Task`."""
        assert isinstance(dataset, MixedDataset)
        for name, one in _each(request).items():
            yield from _prefixed(name, self.task.beforehand(one, dataset.corpora[name]))

    def pin(self, request: TaskRequest) -> Mapping[str, Any]:
        """See `Task`."""
        return self.task.pin(_first(request))

    def carry(self, dataset: AnyDataset) -> Mapping[str, str]:
        """See `Task`: of a corpus that has its tokenizer."""
        assert isinstance(dataset, MixedDataset)
        corpora = list(dataset.corpora.values())
        return self.task.carry(next((one for one in corpora if one.tokenizer_text is not None), corpora[0]))

    def carry_unprepared(self, request: TaskRequest) -> Mapping[str, str]:
        """See `Task`."""
        return self.task.carry_unprepared(_first(request))

    def refuse_resume(self, request: TaskRequest, dataset: AnyDataset) -> Iterator[str]:
        """See `Task`."""
        assert isinstance(dataset, MixedDataset)
        for name, one in _each(request).items():
            yield from self.task.refuse_resume(one, dataset.corpora[name])

    def refuse_score(self, request: ScoreRequest) -> Iterator[str]:
        """See `Task`."""
        yield from self.task.refuse_score(replace(request, task=_first(request.task)))

    def score(self, request: ScoreRequest) -> Scores:
        """See `Task`; of --data the scores of the task, else those of each corpus and the loss of the mixture."""
        if request.data is not None or request.out is not None:
            return self.task.score(replace(request, task=_first(request.task)))
        dataset, module, work = request.open_dataset(), request.make_module(), request.work
        assert isinstance(dataset, MixedDataset)
        scores: dict[str, Scores] = {}
        for name, one in _each(request.task).items():
            opened = partial(dataset.corpora.__getitem__, name)
            scores[name] = self.task.score(replace(request, task=one, open_dataset=opened, make_module=lambda: module))
        source: MixedSource = dataset.source("validation", work.seq_len, work.positions(-1))
        loss = source.mean({name: one.facts["loss"] for name, one in scores.items()}, None)
        lines = [f"{name}: {line}" for name, one in scores.items() for line in one.lines]
        facts = {"loss": loss, "corpora": {name: one.facts for name, one in scores.items()}}
        return Scores([*lines, f"mixture: loss {loss:.4f}, by the weights of the corpora"], facts)

    def prompts(self, request: TaskRequest, tokenizer: Tokenizer) -> Prompts:
        """See `Task`."""
        return self.task.prompts(_first(request), tokenizer)

    def example(self, open_validation: Callable[[], Source]) -> list[int] | None:
        """See `Task`."""
        return self.task.example(open_validation)

    def keys_of_folder(
        self, folder: Path, tokenizer: Tokenizer, data: Data, *, has_corpus: bool
    ) -> Mapping[str, str | Path]:
        """See `Task`."""
        return self.task.keys_of_folder(folder, tokenizer, data, has_corpus=has_corpus)

    def missing_files(self, data: Data, *, has_corpus: bool) -> list[str]:
        """See `Task`: a mixture has named its corpora."""
        return self.task.missing_files(data, has_corpus=True)

    def export(
        self,
        request: TaskRequest,
        tokenizer: Tokenizer,
        texts: dict[str, str],
        ends: dict[str, Any],
        *,
        is_trained: bool,
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """See `Task`."""
        return self.task.export(_first(request), tokenizer, texts, ends, is_trained=is_trained)


def given_of_each(request: TaskRequest) -> dict[str, tuple[str, ...]]:
    """The keys of [data] that are given for single corpora, by the name of the corpus."""
    return {entry.name: tuple(entry.values()) for entry in request.data.mixture or ()}


def _each(request: TaskRequest) -> dict[str, TaskRequest]:
    """The request of each corpus, with what is known of the run by now."""
    run, kept, pinned = request.run, request.kept, request.pinned
    return {name: replace(one, run=run, kept=kept, pinned=pinned) for name, one in request.corpora.items()}


def _first(request: TaskRequest) -> TaskRequest:
    return next(iter(_each(request).values()))


def _of_each(request: TaskRequest, act: Callable[[TaskRequest], T]) -> dict[str, T]:
    """What `act` returns for each corpus. Raises UserError: the problems of all corpora."""
    return of_each(_each(request), act)


def of_each(corpora: Mapping[str, Any], act: Callable[[Any], T]) -> dict[str, T]:
    """What `act` returns for each value. Raises UserError: the problems of all, with their names."""
    found: dict[str, T] = {}
    problems: list[str] = []
    for name, one in corpora.items():
        try:
            found[name] = act(one)
        except UserError as error:
            problems += _prefixed(name, error.problems)
    if problems:
        raise UserError(*problems)
    return found


def _prefixed(name: str, problems: Iterable[str]) -> Iterator[str]:
    return (f"{MIXTURE}.{name}: {problem}" for problem in problems)


def _refuse_other_tokens(corpora: Mapping[str, AnyDataset]) -> None:
    """Raise UserError if not all corpora have tokens of one tokenizer. Of shards without one only the size counts."""
    texts = {name: text for name, one in corpora.items() if (text := one.tokenizer_text) is not None}
    first = next(iter(texts or corpora))
    wanted, size = texts.get(first), corpora[first].vocab_size
    problems = [
        f"{MIXTURE}.{name}: its tokens are of another tokenizer (vocabulary of {one.vocab_size:,}) than those of "
        f"{first} ({size:,}); give its text, or shards of the same tokenizer"
        for name, one in corpora.items()
        if one.vocab_size != size or texts.get(name, wanted) != wanted
    ]
    if problems:
        raise UserError(*problems)
