"""In: prepared prompts, later the answers of a model. Out: samples that hold a prompt with all its answers, each pair a
document.
Does not tokenise (encode.py does) and does not write answers (train/rollouts.py does)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from codescent.base.counted import counted
from codescent.data.documents import extras_of
from codescent.data.file_array import FileArray
from codescent.data.prepared import SPLITS, TOKENIZER, Description, Fields, Splits
from codescent.data.samples import NO_TARGET, AnswerTokens, Numbers, Rewards, Samples, in_range
from codescent.data.tokenizers.tokenizer import Tokenizer, load
from codescent.tasks.conversations.dataset import ResponseDataset
from codescent.tasks.rewarded.encode import ARRAYS
from codescent.tasks.rewarded.rewards import Rewards as RewardsOf

NO_SPAN = -1
"""The span of a position whose target belongs to no answer."""


class _PromptSplit(Fields):
    prompts: int
    tokens: int


class _PromptsDescription(Description):
    format: Literal["codescent prompts 1"]
    splits: Splits[_PromptSplit]
    end: int | None


class RewardedSource:
    """The prompts of a split. A sample has a prompt with each of its answers, one behind the other, and then padding.

    Each pair is a document: positions begin again, and no token sees another document.

    Args:
        tokens, begins: the tokens of all prompts, and where each begins, and the last one ends.
        lines: of each prompt in its file, from 1.
        texts, text_begins: the same of the lines themselves, as JSON in UTF-8.
        file: that the lines are from.
        seq_len: positions of a sample.
        group: answers of a sample.
        times: see `PromptSource`.
        end: the token that ends an answer; None: there is none.
        tokenizer: decodes answers.
        rewards: makes what gives rewards, when the first ones are wanted.
    """

    def __init__(
        self,
        name: str,
        tokens: npt.NDArray[Any] | FileArray,
        begins: Numbers,
        lines: Numbers,
        texts: npt.NDArray[Any] | FileArray,
        text_begins: Numbers,
        *,
        file: str,
        seq_len: int,
        group: int,
        times: int,
        end: int | None,
        tokenizer: Tokenizer,
        rewards: Callable[[], RewardsOf],
    ) -> None:
        self.name, self.file, self.group, self.end = name, file, group, end
        self.num_samples, self.times = len(lines), times
        self.losses_per_sample: int | None = group
        self.vocab_size = tokenizer.vocab_size
        self._tokens, self._begins, self._lines, self._seq_len = tokens, begins, lines, seq_len
        self._texts, self._text_begins, self._tokenizer, self._make_rewards = texts, text_begins, tokenizer, rewards
        self._complete: Callable[[Any, int], Any] | None = None

    @cached_property
    def _rewards(self) -> RewardsOf:
        return self._make_rewards()

    def complete(self, portion: Any, step: int) -> Any:
        """See `PromptSource`."""
        return portion if self._complete is None else self._complete(portion, step)

    def answer_by(self, complete: Callable[[Any, int], Any] | None) -> None:
        """See `PromptSource`."""
        self._complete = complete

    def without_room(self, new_tokens: int) -> Iterator[tuple[int, int]]:
        """Prompts whose answers need more positions than a sample has: the line, and these positions."""
        needed = self.group * (np.diff(self._begins) + new_tokens - 1)  # the last token of an answer is a target only
        for number in np.flatnonzero(needed > self._seq_len).tolist():
            yield int(self._lines[number]), int(needed[number])

    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(np.diff(self._begins).max(initial=0))

    def prompts(self, numbers: Numbers) -> list[list[int]]:
        """See `PromptSource`."""
        return [self._tokens[self._begins[one] : self._begins[one + 1]].tolist() for one in numbers.tolist()]

    def read(self, numbers: Numbers) -> Samples:
        """Samples without an answer, see `answered`. Raises IndexError: no such sample; UserError: the file has
        changed."""
        numbers = in_range(numbers, self.num_samples, self.name)
        return self.answered(numbers, [[] for _ in numbers], np.zeros((len(numbers), self.group)))

    def answered(self, numbers: Numbers, answers: Sequence[Sequence[AnswerTokens]], rewards: Rewards) -> Samples:
        """inputs and targets int64 [n, seq_len]; the extras of `extras_of`, and those of `operators.policy`.

        The tokens of answers are targets. Padding is token 0.
        """
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets, spans = np.full_like(inputs, NO_TARGET), np.full_like(inputs, NO_SPAN)
        is_last, cut = np.zeros(inputs.shape, np.bool_), np.zeros(rewards.shape, np.int64)
        for row, (prompt, of_prompt) in enumerate(zip(self.prompts(numbers), answers, strict=True)):
            start = 0
            for number, answer in enumerate(of_prompt):
                tokens = [*prompt, *answer.tokens]
                place, first = slice(start, start + len(tokens) - 1), start + len(prompt) - 1
                inputs[row, place] = tokens[:-1]
                targets[row, first : place.stop], spans[row, first : place.stop] = answer.tokens, number
                is_last[row, place.stop - 1], cut[row, number] = True, answer.cut
                start = place.stop
        extras = {**extras_of(is_last), "spans_BT": spans, "cut_BG": cut, "rewards_BG": rewards}
        return Samples(inputs, targets, extras)

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of losses in each sample: one of each answer."""
        return np.full(len(numbers), self.group, np.int64)

    def rewards(self, number: int, answers: Sequence[AnswerTokens], when: str) -> list[float]:
        """See `PromptSource`."""
        where = f"{self.file}:{int(self._lines[number])}, {when}"
        return self._rewards(self._line(number), [self._text(one) for one in answers], where)

    def shown(self, number: int, answers: Sequence[AnswerTokens]) -> dict[str, Any]:
        """See `PromptSource`."""
        (prompt,) = self.prompts(np.array([number]))
        texts = [self._text(one) for one in answers]
        where = f"{self.file}:{int(self._lines[number])}"
        return {"line": where, "prompt": self._tokenizer.decode(prompt), "answers": texts}

    def _line(self, number: int) -> dict[str, Any]:
        text = self._texts[self._text_begins[number] : self._text_begins[number + 1]]
        found: dict[str, Any] = json.loads(np.asarray(text).tobytes())
        return found

    def _text(self, answer: AnswerTokens) -> str:
        return self._tokenizer.decode(answer.tokens if answer.cut else answer.tokens[:-1])


@dataclass(frozen=True)
class RewardedDataset(ResponseDataset):
    """Open prepared prompts. What is not in the folder are settings of a run: see `RewardedSource`.

    `reward_timeout_s`, `reward`, `prompt_key`, `answer_key`: see `rewards.Rewards`.
    """

    format = "codescent prompts 1"
    read_formats: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[type[Description]] = _PromptsDescription
    what = "prepared prompts"

    group: int = 1
    times: int = 1
    reward: str = ""
    prompt_key: str = ""
    answer_key: str = ""
    reward_timeout_s: float = 0.0
    _of_length: dict[tuple[str, int], RewardedSource] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def source(self, split: str, seq_len: int, num_targets: int) -> RewardedSource:  # type: ignore[override]
        """See `AnyDataset`. A second call returns the same object. `num_targets` is not used."""
        if (split, seq_len) not in self._of_length:
            tokens, begins, lines, texts, text_begins = (self.arrays[f"{split}_{name}"] for name in ARRAYS)
            self._of_length[split, seq_len] = RewardedSource(
                split,
                tokens,
                begins[:],
                lines[:],
                texts,
                text_begins[:],
                file=self.file_of(split),
                seq_len=seq_len,
                group=self.group if split == SPLITS[0] else 1,
                times=self.times,
                end=self.description["end"],
                tokenizer=self._tokenizer,
                rewards=lambda: RewardsOf(self.reward, self.prompt_key, self.answer_key, self.reward_timeout_s),
            )
        return self._of_length[split, seq_len]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load(self.path / TOKENIZER)

    def file_of(self, split: str) -> str:
        """The file that a split was prepared from."""
        named = self.description.get("validation") if split == "validation" else None
        return str(named or self.description["source"])

    def summary(self) -> list[str]:
        """See `FolderDataset`."""
        tokenizer, splits = self.description["tokenizer"], self.description["splits"]
        return [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}",
            *(
                f"{name}: {counted(splits[name]['prompts'], 'prompt')}, {splits[name]['tokens']:,} tokens"
                for name in SPLITS
            ),
        ]
