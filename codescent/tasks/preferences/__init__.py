"""In: prompts with answers of which one is preferred. Out: the task "dpo": learn which answers are preferred.
Does not build samples (encode.py and samples.py do) and does not compute the loss (operators/preferences.py does)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codescent import models
from codescent.base.counted import counted
from codescent.data.samples import AnyDataset, Source
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.plan import Plan, TaskFacts
from codescent.plan.objective import BETAS, CHOSEN, Preference
from codescent.tasks.conversations import template_of
from codescent.tasks.conversations.answers import AnswersTask
from codescent.tasks.folder import FolderTask
from codescent.tasks.preferences.encode import PAIRED, write_preferences
from codescent.tasks.preferences.samples import PreferenceDataset
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data

FIELDS = ("template", "prompt_key", "response_key", "chosen_key", "rejected_key", "label_key", "validation_fraction")
"""Keys of [data] that the samples depend on, in addition to the corpus, the tokenizer and the chat template."""
SINGLE = "kto"
"""The loss of answers that are judged one by one."""
MOST_LINES = 5
"""Lines that a message names."""


class Preferences(AnswersTask):
    """Learn from pairs of answers of which one is preferred, or from answers that are wanted or not."""

    name = "dpo"
    aim = "prefer the chosen answers"
    lines = "a prompt, a chosen and a rejected answer, or with a judged answer (codescent docs preferences)"
    form = "prepared preferences"
    keys = ("corpus", "tokenizer", "validation", "chat_template", "answers_per_sample", *FIELDS)
    objective = ("preference", "beta", "margin", "chosen_weight", "rejected_weight")
    unit = "pairs"
    fields = FIELDS
    dataset = PreferenceDataset

    def preference(self, request: TaskRequest) -> Preference:
        """See `Task`: train.preference with its factors."""
        train = request.train
        if train is None:
            return Preference("dpo", BETAS["dpo"])
        kind = train.preference
        beta = BETAS[kind] if train.beta is None else train.beta
        margin, weights = (train.margin if kind == "simpo" else 0.0), (1.0, 1.0)
        if kind == SINGLE:
            weights = train.chosen_weight, train.rejected_weight
        return Preference(kind, beta, margin, *weights, answers=self._answers(request))

    def _answers(self, request: TaskRequest) -> int:
        """Answers of a sample that are judged one by one; 0: samples are pairs."""
        return request.data.answers_per_sample if request.train and request.train.preference == SINGLE else 0

    def refuse(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`; also a prepared folder of the other kind of samples, and one key for two parts of a line."""
        yield from super().refuse(request)
        singles = ("response_key", "label_key") if self._answers(request) else ()
        yield from _same_keys(request.data, ("prompt_key", "chosen_key", "rejected_key", *singles))
        if not self.dataset.is_at(request.data.corpus):
            return
        before, answers = self.dataset.open(Path(request.data.corpus).expanduser()).documents, self._answers(request)
        if before != (2 * answers or PAIRED):
            had = "pairs" if before == PAIRED else f"{before // 2} answers a sample"
            wanted = f"{answers} answers a sample (data.answers_per_sample)" if answers else "pairs"
            yield f"data.corpus = {request.data.corpus}: was prepared with {had}, and this run needs {wanted}"

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """See `Task`: what it reads beside responses, no other task can be given."""
        yield from ()

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`."""
        for key, why in FolderTask.unused(self, request):
            if key != "data.answers_per_sample":  # `refuse` compares it
                yield key, why
        if not self._answers(request):
            yield "data.response_key", 'is for answers that are judged one by one (train.preference = "kto")'

    def parts(self, request: TaskRequest) -> Mapping[str, Any]:
        """See `FolderTask`."""
        return {**super().parts(request), "answers": self._answers(request)}

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """See `Task`: the answers of a sample are documents."""
        found, answers = super().facts(request, shape), self._answers(request)
        without = () if answers else ("answers_per_sample", "label_key", "response_key")
        identity = {key: value for key, value in found.identity.items() if key not in without}
        return replace(found, documents=True, identity=identity)

    def open(self, request: TaskRequest, path: Path) -> PreferenceDataset:
        """See `Task`."""
        return self.dataset.open(path)

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `FolderTask`."""
        return write_preferences(request.data, template_of(request), folder, progress, answers=self._answers(request))

    def misfits(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """See `Task`: lines whose prompts leave no room for an answer."""
        assert isinstance(dataset, PreferenceDataset)
        work = plan.work
        for split in ("train", "validation"):
            lacks = dataset.source(split, work.seq_len, work.positions(-1)).without_room()
            found = list(dict.fromkeys(lacks))  # both answers of a line may lack it
            path = dataset.file_of(split)
            for line, needed in found[:MOST_LINES]:
                yield (
                    f"{path}:{line}: the prompts of a sample need {needed:,} positions, and data.seq_len = "
                    f"{work.seq_len} leaves no room for an answer; raise data.seq_len, or leave the line out"
                )
            if len(found) > MOST_LINES:
                yield f"{path}: {counted(len(found) - MOST_LINES, 'more line')} with such a prompt"

    def shortened(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """See `Task`: answers that are cut."""
        assert isinstance(dataset, PreferenceDataset)
        work = plan.work
        for split in ("train", "validation"):
            cut, documents, longest = dataset.source(split, work.seq_len, work.positions(-1)).cut
            if cut:
                yield (
                    f"{split}: {cut:,} of {counted(documents, 'answer')} are cut at their ends: data.seq_len = "
                    f"{work.seq_len}, and the longest sample has {longest:,} positions"
                )

    def example(self, open_validation: Callable[[], Source]) -> list[int] | None:
        """See `Task`: the first prompt of the validation split."""
        if (source := open_validation()).num_samples < 1:
            return None
        samples = source.read(np.arange(1))
        before = int(np.argmax(samples.extras["spans_BT"][0] == CHOSEN))  # its target is the first token of the answer
        prompt: list[int] = samples.inputs[0, : before + 1].tolist()
        return prompt

    def keys_of_folder(
        self, folder: Path, tokenizer: Tokenizer, data: Data, *, has_corpus: bool
    ) -> Mapping[str, str | Path]:
        """See `Task`: a folder is imported for this task if data.task names it."""
        if data.task != self.name:
            return {}
        return super().keys_of_folder(folder, tokenizer, data, has_corpus=False)

    def score(self, request: ScoreRequest) -> Scores:
        """See `Task`: how often the model finds the chosen answer more probable."""
        from codescent.tasks.preferences.evaluate import scores_of  # noqa: PLC0415 - planning does without torch

        return scores_of(self, request)


def _same_keys(data: Data, names: Sequence[str]) -> Iterator[str]:
    """A problem for each key of a line that two parts of it would have."""
    for first, second in combinations(names, 2):
        if (key := getattr(data, first)) == getattr(data, second):
            yield f"data.{first}, data.{second}: both are {json.dumps(key)}; each part of a line has a key of its own"
