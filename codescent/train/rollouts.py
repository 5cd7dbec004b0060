"""In: a run whose model writes answers to prompts before each step. Out: portions with these answers and their rewards.
Does not choose prompts (the loader does), and knows no reward: the source of the prompts gives it. The engine
(codescent/inference) reads the weights of the training where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from codescent.base.agreement import decided, together
from codescent.base.errors import RunFailed, UserError
from codescent.base.progress import ANSWERS, OwnPage
from codescent.data.loader import Batch, Portion
from codescent.data.prepared import SPLITS
from codescent.data.samples import AnswerTokens, Numbers, PromptSource
from codescent.inference.answers import answers_of, capacity_of
from codescent.inference.engine import Engine
from codescent.inference.ranks import LeadingReader, follow
from codescent.inference.request import Sampling
from codescent.models.decoder import Decoder
from codescent.plan.objective import Policy
from codescent.strategies import ThisRank
from codescent.strategies.whole_sequences import whole_sequences
from codescent.train.execute import Executor
from codescent.train.gathered import GatheredPart
from codescent.train.initial_copy import InitialWeights
from codescent.train.kept_answers import KeptAnswers
from codescent.train.open import OpenRun
from codescent.train.trainer import Trainer

KNOWN = ("begins_BT", "ends_BM", "spans_BT")
"""What is known of samples before their rewards and log-probabilities are."""
Written = list[list[AnswerTokens]]
"""The answers to each of several prompts."""


class Rollouts:
    """The answers of a run's model, and their rewards. A run without a policy has none, and nothing is done.

    Random numbers of an answer depend on the run's seed, the step, and the place of the answer in the global batch. So
    they are those of any layout, and of a run that was resumed.

    Args:
        run: of this rank.

    Attributes:
        needs_initial: whether a reference is needed: the initial weights, also where a run is resumed.
    """

    def __init__(self, run: OpenRun) -> None:
        self.run, self.policy = run, run.plan.objective.policy
        self.needs_initial = self.policy is not None and self.policy.kl > 0.0

    def attach(self, trainer: Trainer) -> None:
        """Let the model of a trainer, which has its initial weights, write the answers from now on."""
        if self.policy is None:
            return
        run, executor = self.run, trainer.executor
        this_rank = ThisRank(run.plan, run.world.this_rank.rank, run.world.groups)
        initial = InitialWeights(trainer.optimizer.weights) if self.needs_initial else None
        for split, source in self._sources().items():
            writer = AnswerWriter(executor, this_rank, source, self.policy)
            complete = _Training(run, executor, writer, initial) if split == SPLITS[0] else _Validation(run, writer)
            source.answer_by(complete)

    def detach(self) -> None:
        """Let go of this trainer: nothing writes answers until `attach` is called again."""
        for source in self._sources().values():
            source.answer_by(None)

    def _sources(self) -> dict[str, PromptSource]:
        """The prompts of each split; none without a policy."""
        sources = dict[str, PromptSource]()
        for split in SPLITS if self.policy is not None else ():
            source = self.run.source(split)
            assert isinstance(source, PromptSource), "the objective learns from rewards, and the samples are no prompts"
            sources[split] = source
        return sources


class AnswerWriter:
    """Writes answers to prompts with the part of an executor.

    Under tp the first rank of a group chooses the tokens, and the others read the same passes. Every rank of a mesh
    calls `write` equally often.

    Args:
        executor: its part, and its device.
        this_rank: this rank, with its groups.
        source: of the prompts.
        policy: how tokens are chosen.
    """

    def __init__(self, executor: Executor, this_rank: ThisRank, source: PromptSource, policy: Policy) -> None:
        self.executor, self.source, self.policy = executor, source, policy
        self._gathered = GatheredPart(executor.chunks[0].part, this_rank)
        self._group = this_rank.groups["tp"] if this_rank.plan.mesh.tp > 1 else None
        self.is_shared, self.leads = self._group is not None, this_rank.coordinates["tp"] == 0
        self.leader = this_rank.plan.mesh.group("tp", this_rank.rank)[0]

    def write(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[AnswerTokens]:
        """The answer to each prompt; on the other ranks of tp nothing. Raises RunFailed: logits are not finite."""
        with self._reading() as module:
            capacity = capacity_of(module, prompts, self.policy.new_tokens)
            if not self.leads:
                assert self._group is not None
                follow(module, capacity, self._group)
                return []
            reader = None if self._group is None else LeadingReader(module, capacity, self._group)
            stops = () if self.source.end is None else (self.source.end,)
            engine = Engine(module, None, capacity, stops=stops, vocab_size=self.source.vocab_size, reader=reader)
            try:
                return answers_of(engine, prompts, samplings, self.source.end)
            finally:
                if reader is not None:
                    reader.close()

    @contextmanager
    def _reading(self) -> Iterator[Decoder]:
        """A block with this rank's part as the engine reads it: whole weights, and all positions of a text."""
        was_training = self._gathered.part.training
        with self._gathered.whole() as module:
            assert isinstance(module, Decoder)
            module.eval()
            try:
                with nullcontext() if self._group is None else whole_sequences(module, self._group):
                    yield module
            finally:
                self._gathered.part.train(was_training)


class _Training:
    """Completes the portion of a step: each prompt with a group of answers, drawn at random. Collective.

    Where several steps learn from the same answers, the first one's portion is kept for the others.
    """

    def __init__(self, run: OpenRun, executor: Executor, writer: AnswerWriter, initial: InitialWeights | None) -> None:
        self.run, self.executor, self.writer, self.initial = run, executor, writer, initial
        self.kept = KeptAnswers(run, writer.source)
        self.first, self.portion = -1, Portion([], 1, 1)  # the step that has the present answers, and its portion

    def __call__(self, portion: Portion, step: int) -> Portion:
        """The portion of step `step` (from 0)."""
        times = self.writer.policy.updates
        if step // times * times != self.first or step == self.first:
            self.first, self.portion = step // times * times, self._answered(portion, step)
        return self.portion

    def _answered(self, portion: Portion, step: int) -> Portion:
        assert portion.numbers is not None
        policy, numbers, seed = self.writer.policy, portion.numbers, seed_of(self.run.plan.seed, step)
        first = self.run.plan.samples(self.run.world.this_rank.rank, 0).start * policy.group
        one = Sampling(policy.temperature, policy.top_k, policy.top_p, seed=seed, max_new_tokens=policy.new_tokens)
        samplings = [replace(one, number=first + place) for place in range(len(numbers) * policy.group)]
        with _in_section(ANSWERS):
            answered = rewarded(self.writer, numbers, samplings, f"step {step + 1}")
        self.kept.training(step + 1, numbers, *answered)
        batches = batches_of(self.writer.source, numbers, *answered, [len(one.inputs) for one in portion.batches])
        return replace(portion, batches=self._compared(batches))

    def _compared(self, batches: list[Batch]) -> list[Batch]:
        """The batches with the log-probabilities of their tokens that the loss compares with."""
        if self.writer.policy.updates > 1:
            batches = self._with_logs(batches, "old_BT")
        if self.initial is not None:
            with self.initial.in_place_of_weights():
                batches = self._with_logs(batches, "reference_BT")
        return batches

    def _with_logs(self, batches: list[Batch], name: str) -> list[Batch]:
        """The batches with the log-probability of each token by the present weights."""
        return [replace(one, extras={**one.extras, name: logs_of(self.executor, one)}) for one in batches]


class _Validation:
    """Completes a pass of a validation: each prompt with its likeliest answer. Collective."""

    def __init__(self, run: OpenRun, writer: AnswerWriter) -> None:
        self.run, self.writer, self.kept = run, writer, KeptAnswers(run, writer.source)

    def __call__(self, portion: Portion, step: int) -> Portion:
        assert portion.numbers is not None
        numbers, number = portion.numbers, self.writer.executor.number + 1
        samplings = [Sampling(temperature=0.0, max_new_tokens=self.writer.policy.new_tokens)] * len(numbers)
        with _in_section(ANSWERS):
            answered = rewarded(self.writer, numbers, samplings, f"validation after step {number}")
        batches = batches_of(self.writer.source, numbers, *answered, [len(numbers)])
        if step == 0:
            self.kept.validation(number, numbers, *answered)
        return replace(portion, batches=batches)


@contextmanager
def _in_section(section: str) -> Iterator[None]:
    """A block that the page of this rank shows as a section: nobody knows how long answers and their rewards take."""
    page = OwnPage.current
    before = "" if page is None else page.enter(section)
    try:
        yield
    finally:
        if page is not None:
            page.enter(before)


def rewarded(
    writer: AnswerWriter, numbers: Numbers, samplings: Sequence[Sampling], when: str
) -> tuple[Written, np.ndarray[Any, Any]]:
    """The answers to prompts, equally many to each, and their rewards [n, G]. Collective.

    Raises:
        UserError: on every rank: what gives rewards has failed on one.
        RunFailed: on every rank: logits are not finite on one.
    """
    source, group = writer.source, len(samplings) // len(numbers)
    prompts = [prompt for prompt in source.prompts(numbers) for _ in range(group)]
    own = list[AnswerTokens]()

    def written() -> list[Any]:
        try:
            own.extend(writer.write(prompts, samplings))
        except RunFailed as error:
            raise RunFailed(f"{when}: {error}") from error
        return list(own) if writer.is_shared else []

    of_ranks = together(RunFailed, written)
    answers = [AnswerTokens(*one) for one in of_ranks[writer.leader]] if writer.is_shared else own
    of_each = [answers[place * group : (place + 1) * group] for place in range(len(numbers))]

    def judged() -> dict[str, Any]:
        pairs = zip(numbers.tolist(), of_each, strict=True)
        try:
            rewards = [source.rewards(number, of_prompt, when) for number, of_prompt in pairs] if writer.leads else []
        except UserError as error:
            return {"problem": str(error)}
        return {"rewards": rewards}

    return of_each, np.array(decided(UserError, judged, _without_problem)[writer.leader], np.float64)


def _without_problem(of_ranks: list[dict[str, Any]]) -> list[Any]:
    """The rewards of each rank. Raises UserError: the problem of the first rank that has one; others are alike."""
    for one in of_ranks:
        if "problem" in one:
            raise UserError(one["problem"])
    return [one["rewards"] for one in of_ranks]


def batches_of(
    source: PromptSource, numbers: Numbers, answers: Written, rewards: np.ndarray[Any, Any], sizes: Sequence[int]
) -> list[Batch]:
    """The samples of prompts with answers, cut into micro-batches of these sizes."""
    whole, start, batches = Batch.of(source.answered(numbers, answers, rewards)), 0, []
    for size in sizes:
        batches.append(whole[start : start + size])
        start += size
    return batches


def logs_of(executor: Executor, batch: Batch) -> torch.Tensor:
    """The log-probability of each token of answers by the present weights, [B, T]. Collective."""
    without = {name: value for name, value in batch.extras.items() if name in KNOWN}
    with executor.evaluating() as evaluate:
        return evaluate(replace(batch, extras=without))


def seed_of(seed: int, step: int) -> int:
    """The seed of the answers of a step, in [0, 2^63): BLAKE2b of both numbers."""
    digest = hashlib.blake2b(f"answers {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
