"""In: prompts, and what gives answers a reward. Out: the task "grpo": write answers that have higher rewards.
Does not build samples (encode.py and samples.py do) and does not compute the loss (operators/policy.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codescent import models
from codescent.base.counted import counted
from codescent.base.own_names import is_own_name
from codescent.data.samples import AnyDataset, PromptSource, Source
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.plan import Plan, TaskFacts
from codescent.plan.objective import POLICY_KEYS, Policy
from codescent.tasks.conversations import template_of
from codescent.tasks.conversations.answers import AnswersTask
from codescent.tasks.folder import FolderTask
from codescent.tasks.rewarded.encode import write_prompts
from codescent.tasks.rewarded.samples import RewardedDataset
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data

FIELDS = ("template", "prompt_key", "reward", "answer_key", "validation_fraction")
"""Keys of [data] that the samples depend on, in addition to the corpus, the tokenizer and the chat template."""
MOST_LINES = 5
"""Lines that a message names."""


class Rewarded(AnswersTask):
    """Learn from rewards of answers that the model itself writes: group relative policy optimization."""

    name = "grpo"
    aim = "write answers that have higher rewards"
    lines = "a prompt (codescent docs grpo)"
    form = "prepared prompts"
    keys = ("corpus", "tokenizer", "validation", "chat_template", *FIELDS)
    reads = ("reward_timeout_s",)
    objective = tuple(POLICY_KEYS.values())
    unit = "answers"
    fields = FIELDS
    dataset = RewardedDataset

    def policy(self, request: TaskRequest) -> Policy:
        """See `Task`: the keys of [train] that this task alone reads."""
        train = request.train
        assert train is not None, "a run has a section [train]"
        values = {name: getattr(train, key) for name, key in POLICY_KEYS.items()}
        return Policy(**{**values, "clip_high": train.clip if train.clip_high is None else train.clip_high})

    def refuse_other(self, request: TaskRequest, name: str) -> Iterator[str]:
        """See `Task`: what it reads beside responses, no other task can be given."""
        yield from ()

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`."""
        for key, why in FolderTask.unused(self, request):
            if key != "data.reward_timeout_s":  # it has an effect on prepared prompts, too
                yield key, why
        if is_own_name(request.data.reward):
            yield "data.answer_key", 'is for data.reward = "exact"; a function of rewards gets all keys of a line'
        else:
            yield "data.reward_timeout_s", "is for a function of yours (data.reward)"

    def facts(self, request: TaskRequest, shape: models.Shape) -> TaskFacts:
        """See `Task`: the answers of a sample are documents."""
        return replace(super().facts(request, shape), documents=True)

    def open(self, request: TaskRequest, path: Path) -> RewardedDataset:
        """See `Task`; group and rewards are settings of the run."""
        data, found = request.data, self.dataset.open(path)
        group, times = (1, 1) if request.train is None else (request.train.group_size, request.train.updates_per_answer)
        return replace(
            found,
            group=group,
            times=times,
            reward=data.reward,
            prompt_key=data.prompt_key,
            answer_key=data.answer_key,
            reward_timeout_s=data.reward_timeout_s,
        )

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `FolderTask`."""
        return write_prompts(request.data, template_of(request), folder, progress)

    def misfits(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """See `Task`: lines whose prompts leave no room for answers."""
        assert isinstance(dataset, RewardedDataset)
        work, policy = plan.work, plan.objective.policy
        assert policy is not None
        for split in ("train", "validation"):
            source = dataset.source(split, work.seq_len, work.positions(-1))
            found = list(source.without_room(policy.new_tokens))
            for line, needed in found[:MOST_LINES]:
                yield (
                    f"{source.file}:{line}: the prompt with {counted(source.group, 'answer')} of up to "
                    f"{counted(policy.new_tokens, 'token')} needs {needed:,} positions, and data.seq_len = "
                    f"{work.seq_len}; raise data.seq_len, lower train.group_size or train.new_tokens, or "
                    "leave the line out"
                )
            if len(found) > MOST_LINES:
                yield f"{source.file}: {counted(len(found) - MOST_LINES, 'more line')} with such a prompt"

    def shortened(self, dataset: AnyDataset, plan: Plan) -> Iterator[str]:
        """See `Task`: nothing is cut."""
        yield from ()

    def example(self, open_validation: Callable[[], Source]) -> list[int] | None:
        """See `Task`: the first prompt of the validation split."""
        source = open_validation()
        assert isinstance(source, PromptSource)
        return source.prompts(np.arange(1))[0] if source.num_samples else None

    def keys_of_folder(
        self, folder: Path, tokenizer: Tokenizer, data: Data, *, has_corpus: bool
    ) -> Mapping[str, str | Path]:
        """See `Task`: a folder is imported for this task if data.task names it."""
        if data.task != self.name:
            return {}
        return super().keys_of_folder(folder, tokenizer, data, has_corpus=False)

    def score(self, request: ScoreRequest) -> Scores:
        """See `Task`: the mean reward of the likeliest answers to the prompts of the validation split."""
        name, source = request.validation(self)
        assert isinstance(source, PromptSource)
        assert request.answer is not None
        numbers, new_tokens = np.arange(source.num_samples), self.policy(request.task).new_tokens
        module = request.make_module()
        answers = request.answer(module, source.prompts(numbers), new_tokens, source.end, source.vocab_size)
        found = [source.rewards(number, [answer], "evaluate")[0] for number, answer in enumerate(answers)]
        reward, tokens = float(np.mean(found)), float(np.mean([len(answer.tokens) for answer in answers]))
        cut = sum(answer.cut for answer in answers) / len(answers)
        lines = [
            f"{name}: the likeliest answers to {counted(len(found), 'prompt')} have a mean reward of {reward:.4f}",
            f"{tokens:.1f} tokens an answer; {cut:.1%} ended at their limit (train.new_tokens = {new_tokens})",
        ]
        facts = {"data": name, "reward": reward, "answer_tokens": tokens, "answers_cut": cut, "count": len(found)}
        return Scores(lines, {**facts, "unit": "prompts"})
