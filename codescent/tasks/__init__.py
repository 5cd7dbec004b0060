"""In: a run's sections [data] and [model]. Out: the run's task, which is one of TASKS; the run's open dataset.
Does not know what a sample is: each task does."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from codescent import models
from codescent.base.command import command
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.hub_name import is_hub_name
from codescent.base.own_names import FORM, is_own_name
from codescent.config.mixture import MIXTURE
from codescent.data.samples import AnyDataset
from codescent.data.text import corpora
from codescent.data.text.sources import AS_TEXT
from codescent.hub.cache import place_of, tokenizer_place
from codescent.tasks.answers import Answers
from codescent.tasks.conversations import Conversations
from codescent.tasks.language_model import LanguageModel
from codescent.tasks.masked_tokens import MaskedTokens
from codescent.tasks.mixture import OF_A_CORPUS, MixtureTask, given_of_each, of_each
from codescent.tasks.own import own_task
from codescent.tasks.pairs import Pairs
from codescent.tasks.preferences import Preferences
from codescent.tasks.rewarded import Rewarded
from codescent.tasks.task import ScoreRequest, ShownDataset, Task, TaskRequest
from codescent.tasks.tensors import Tensors

if TYPE_CHECKING:
    from codescent.config.sections import Data, Model, Train
    from codescent.plan import Plan

__all__ = ["TASKS", "ScoreRequest", "ShownDataset", "Task", "TaskRequest"]

TASKS: tuple[Task, ...] = (
    *(LanguageModel(), MaskedTokens(), Tensors(), Answers(), Conversations(), Pairs()),
    Preferences(),
    Rewarded(),
)
"""Every task. The default of a kind of model is the first task in this tuple that supports the kind."""

FILES = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".txt",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".h5",
    ".hdf5",
    ".pt",
    ".safetensors",
    ".bin",
    ".gz",
    ".xz",
    ".lzma",
    ".bz2",
    ".zst",
)
"""Endings of a corpus that is a file, not a name."""

PLACES = {"corpus": place_of, "validation": place_of, "tokenizer": tokenizer_place}
"""Keys of [data] that may name a hub, and where the cache has what they name."""

MOST_OPENED = 100
"""Files of a folder that are opened, to see whether they have a form that a task reads."""


def task_named(name: str) -> Task:
    """The task of this name. Raises UserError: there is none; the message has the nearest name."""
    if is_own_name(name):
        return own_task(name)
    names = [task.name for task in TASKS]
    if name in names:
        return TASKS[names.index(name)]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    wanted = ", ".join(f'"{task}"' for task in names)
    raise UserError(f'data.task: given "{name}"; must be {wanted}, {FORM} or "auto"{hint}')


def task_of(request: TaskRequest) -> Task:
    """The task of a run: data.task, else the task that the corpus implies, else the default of the model's kind.
    Raises UserError: there is no such task, or it does not support the model's kind.
    """
    if request.corpora:
        return MixtureTask(task_named(str(request.data.task)))
    fitting = [task for task in _known_to(request) if _trains(task, request.kind)]
    if request.data.task is not None:
        task = task_named(request.data.task)
    elif fitting:
        task = next((task for task in TASKS if task.made_for(request.data)), fitting[0])
    else:
        raise UserError(f'model.kind = "{request.kind}": its tasks name none of {", ".join(one.name for one in TASKS)}')
    if task not in fitting:
        raise UserError(_misfit(request, task, fitting))
    return task


def task_of_plan(plan: Plan) -> Task:
    """The task of a plan, by which its dataset was opened."""
    task = task_named(plan.task.name)
    return MixtureTask(task) if plan.task.identity.get("mixture") else task


def _known_to(request: TaskRequest) -> tuple[Task, ...]:
    """Every task that a run may have: those of this package, and the user's that it names."""
    name = request.data.task
    return (*TASKS, own_task(name)) if name is not None and is_own_name(name) else TASKS


def _trains(task: Task, kind: str) -> bool:
    """Whether a kind of model can be trained for a task. A kind of the user says it of the tasks of this package."""
    return kind in task.kinds or task.name in models.own_tasks(kind)


def _misfit(request: TaskRequest, task: Task, fitting: Sequence[Task]) -> str:
    """Why the kind of model cannot be trained for a task."""
    kinds, names = " or ".join(task.kinds), " or ".join(one.name for one in fitting) or "no task of codescent"
    if request.data.task is not None:
        return (
            f'data.task = "{task.name}": model.kind = "{request.kind}" is trained for {names}; take that, or '
            f"model.kind = {kinds}"
        )
    as_text = f', or data.task = "{fitting[0].name}" to read it as text' if task.also_text(request.data.corpus) else ""
    corpus, form = request.data.corpus, request.data.format
    chosen = f"data.corpus = {corpus} ({task.form})" if form is None else f"data.format = {form}"
    return (
        f'data.task = "{task.name}", chosen for {chosen}: model.kind = "{request.kind}" is trained for {names}; take '
        f"model.kind = {kinds}, or another corpus{as_text}"
    )


def remarks(request: TaskRequest) -> Iterator[str]:
    """Sentences: what a user may not have meant, though the run can be made."""
    task = task_of(request)
    yield from task.remarks(request)
    for each in request.corpora.values() or [request]:
        yield from _remarks_on_files(each, task)


def _remarks_on_files(request: TaskRequest, task: Task) -> Iterator[str]:
    """Sentences on the names of files of one corpus, and on what they hold."""
    data = request.data
    for key, given in (("data.corpus", data.corpus), ("data.validation", data.validation)):
        files = None if given is None else corpora.pattern_files(given)
        if files:
            yield f"{key} = {given}: no file has this name, so it is read as a pattern (glob): {counted(files, 'file')}"
    if data.as_text:
        yield from (f"{held}, and is read as text; {reader}" for held, reader in _held_beside(request, task))


def _held_beside(request: TaskRequest, task: Task) -> Iterator[tuple[str, str]]:
    """Of each text of a run that another task could read: what it holds, and what reads it, as two clauses."""
    data = request.data
    for key, given in (("data.corpus", data.corpus), ("data.validation", data.validation)):
        other, file = (None, "") if given is None or not task.reads_text else beside_text(given)
        if given is not None and other is not None:
            place = "" if file == given else f" has a file {file}, which"
            yield (
                f'data.task = "{task.name}": {key} = {given}{place} holds {other.form}',
                f'data.task = "{other.name}" (model.kind = {" or ".join(other.kinds)}) reads {other.form}',
            )


def beside_text(corpus: str) -> tuple[Task | None, str]:
    """The task for which a corpus is made that is a text as well (`Task.also_text`), and the file that shows it.

    Of a folder or glob MOST_OPENED files are opened, first those that are named like JSON. No task: it is only a text.
    """
    files = sorted(corpora.own_files(corpus), key=lambda file: ".json" not in file.suffixes)
    for file in map(str, files[:MOST_OPENED]):
        if task := next((task for task in TASKS if task.also_text(file)), None):
            return task, corpus if expanded(corpus) == Path(file) else file
    return None, ""


def task_line(plan: Plan) -> str:
    """One line for people: what a run trains, on which data, with which model."""
    task, identity = task_named(plan.task.name), plan.task.identity
    aim = f": {task.aim}" if task.aim else ""
    validation = f", validated on {identity['validation']}" if identity.get("validation") else ""
    mixed = identity.get("mixture")
    data = f"mixture of {mixed}" if mixed else f"corpus {identity.get('corpus')}"
    return f"{task.name}{aim}; {data}{validation}; model {plan.model.kind}"


def request_of(data: Data, model: Model, seed: int, train: Train) -> TaskRequest:
    """The arguments of a run for its task; `data.task` is set to the task's name. Raises UserError like `task_of`.

    `data.as_text` is set if data.task is given and the corpus is a text that another task could read: that says it.
    """
    named = {key: str(value) for key in PLACES if is_hub_name(value := getattr(data, key))}
    data = data.model_copy(update={key: PLACES[key](value) for key, value in named.items()})
    request = TaskRequest(data, model, seed, train.compile, named=named, train=train)
    if data.mixture is not None:
        return _mixed(request)
    task = task_of(request)
    if data.task is not None and task.reads_text and beside_text(data.corpus)[0] is not None:
        data = data.model_copy(update={"as_text": True})
    return replace(request, data=data.model_copy(update={"task": task.name}))


def _mixed(request: TaskRequest) -> TaskRequest:
    """The request of a mixture, with one for each of its corpora. Raises UserError: they are for several tasks."""
    data, model, seed, train = request.data, request.model, request.seed, request.train
    assert train is not None
    one = {"mixture": None, "mixture_temperature": None}
    found = of_each(
        {entry.name: data.model_copy(update={**one, **entry.values()}) for entry in data.mixture or ()},
        lambda of_corpus: request_of(of_corpus, model, seed, train),
    )
    by_task: dict[str, list[str]] = {}
    for name, each in found.items():
        by_task.setdefault(str(each.data.task), []).append(name)
    if len(by_task) > 1:
        fits = ", ".join(f"{', '.join(names)} for {task}" for task, names in by_task.items())
        raise UserError(
            f"{MIXTURE}: the corpora are for different tasks ({fits}); give data.task, or corpora of one task"
        )
    named = {f"mixture.{name}.{key}": value for name, each in found.items() for key, value in each.named.items()}
    named = {key: value for key, value in named.items() if not key.endswith(".tokenizer")} | dict(request.named)
    return replace(request, data=data.model_copy(update={"task": next(iter(by_task))}), named=named, corpora=found)


def refusals(request: TaskRequest) -> Iterator[str]:
    """Messages: why the task, the model and the keys of [data] cannot be combined."""
    task = task_of(request)
    yield from task.refuse(request)
    if request.data.documents == "separate":
        yield from task.refuse_documents(request)
    for each in request.corpora.values() or [request]:
        if not each.data.as_text:
            yield from (f"{held}; {reader}; {AS_TEXT}" for held, reader in _held_beside(each, task))
        for other in TASKS:
            if other.name != task.name:
                yield from other.refuse_other(each, task.name)


def without_effect(request: TaskRequest) -> Iterator[tuple[str, str]]:
    """Keys, as "section.key", that the run's task or its corpus makes useless, each with the reason as a clause.

    A key of one corpus of a mixture is data.mixture.NAME.KEY.
    """
    task = task_of(request)
    yield from task.unused(request)
    readers: dict[str, list[str]] = {}
    for one in _known_to(request):
        read = {f"data.{name}" for name in (*one.keys, *one.reads)} | {f"train.{name}" for name in one.objective}
        for key in read.difference(one.ignores):
            readers.setdefault(key, []).append(one.name)
    readers.pop("data.documents")  # a task without documents refuses them
    for key in {*readers, *task.ignores}:
        if key in task.ignores or task.name not in readers[key]:
            only = f"needs data.task = {' or '.join(readers[key])}" if key in readers else "is for tasks with tokens"
            for place in (key, *_places_of(key, request)):
                yield place, f"{only}, and the task of this run is {task.name}"


def _places_of(key: str, request: TaskRequest) -> Iterator[str]:
    """Where single corpora of a mixture are given a key of [data]."""
    field = key.removeprefix("data.")
    yield from (f"{MIXTURE}.{name}.{field}" for name, fields in given_of_each(request).items() if field in fields)


def absent(request: TaskRequest) -> dict[str, str]:
    """The files that [data] names and that are not there, by key. Names of corpora and tokenizers are no files."""
    data = request.data
    is_file = data.corpus.endswith(FILES) and not corpora.is_present(data.corpus)  # a glob is no file, but has some
    files = {"data.corpus": data.corpus} if is_file else {}
    kind, _, vocabulary = data.tokenizer.partition(":")
    if kind != "bpe" and (vocabulary or "." in data.tokenizer or "/" in data.tokenizer):
        files["data.tokenizer"] = vocabulary or data.tokenizer
    lacking = [key for key in request.named if key in PLACES and not corpora.is_present(getattr(data, key))]
    files |= {f"data.{key}": getattr(data, key) for key in lacking}
    if data.chat_template is not None:
        files["data.chat_template"] = str(data.chat_template)
    found = {key: file for key, file in files.items() if not Path(file).exists()}
    for name, each in request.corpora.items():
        own = {key.removeprefix("data."): file for key, file in absent(each).items()}
        found |= {f"{MIXTURE}.{name}.{key}": file for key, file in own.items() if key in OF_A_CORPUS}
    return found


def _refuse_not_downloaded(request: TaskRequest, keys: Sequence[str]) -> None:
    """Raise UserError if the cache of the hub lacks what these keys of [data] name."""
    lacking = absent(request)
    if missing := [key for key in keys if key in request.named and f"data.{key}" in lacking]:
        names = {key: request.named[key] for key in missing}
        raise UserError(
            *(
                f"data.{key} = {name}: is not in the cache of the hub; download it: {command('fetch', name)}"
                for key, name in names.items()
            )
        )


def prepare(request: TaskRequest, *, progress: bool) -> Path:
    """Prepare the data of a run if it does not exist yet; return its path.
    Raises UserError: `refusals`, or the corpus or the tokenizer cannot be used.
    """
    if problems := list(refusals(request)):
        raise UserError(*problems)
    _refuse_not_downloaded(request, ("tokenizer",))
    if task_of(request).locate(request) is None:
        _refuse_not_downloaded(request, tuple(request.named))
    return task_of(request).prepare(request, progress=progress)


def prepare_and_open(request: TaskRequest, *, progress: bool) -> AnyDataset:
    """Prepare the data of a run if it does not exist yet, and open it.
    Raises UserError: as `prepare`, or the data is damaged.
    """
    return task_of(request).open(request, prepare(request, progress=progress))


def published() -> dict[str, str]:
    """Names of corpora that are no texts, each with the shipped config that trains on it."""
    return {corpus: config for task in TASKS for corpus, config in task.published.items()}


def open_corpus(corpus: str, validation_fraction: float) -> ShownDataset | None:
    """Open a corpus that a task reads without preparation; None: it is text. Raises UserError: it is damaged."""
    found = (task.open_corpus(corpus, validation_fraction) for task in TASKS)
    return next((dataset for dataset in found if dataset is not None), None)
