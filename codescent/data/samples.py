"""In: nothing. Out: `Samples` (inputs, targets), and the interfaces of a dataset (`AnyDataset`) and of the samples of
one of its splits (`Source`).
Does not read files: the classes that implement the interfaces do (in data/text and in each task)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
References = npt.NDArray[np.float64]
Rewards = npt.NDArray[np.float64]
NO_TARGET = -1  # target of a position without a loss


def in_range(numbers: npt.NDArray[np.integer[Any]], count: int, name: str) -> Numbers:
    """Sample numbers as int64. Raises IndexError: a number is outside [0, count); the message names the split."""
    found = np.asarray(numbers, np.int64)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < count:
        raise IndexError(f"samples of the {name} split lie in [0, {count})")
    return found


@dataclass(frozen=True)
class Samples:
    """n samples.

    Attributes:
        inputs: the model's input: int64 [n, T] tokens, or float32 [n, X, D] vectors.
        targets: int64 [n, T] the token after each input (negative: no loss at this position), int64 [n, 2] where an
            answer begins and ends, or float32 [n, X, D] vectors.
        extras: further inputs, which layers at every depth read: argument name of the model ("segments_BT",
            "lengths_B") -> array with n rows, int64; of references fp64.
        not_finite: rows that hold NaN or infinity, each with the place of the numbers in words.
    """

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    not_finite: Mapping[int, str] = field(default_factory=dict)


class Source(Protocol):
    """The samples of one split ("train" or "validation"), by number.

    `losses_per_sample` is the number of losses (one per token or question) of each sample; None: it varies.
    """

    name: str
    num_samples: int
    losses_per_sample: int | None

    def read(self, numbers: Numbers) -> Samples:
        """Read samples. Raises UserError: a file is damaged; IndexError: a number is outside [0, num_samples)."""

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of losses of each of these samples. The mean loss of a step divides by their sum."""


@runtime_checkable
class PaddedSource(Source, Protocol):
    """A source whose samples have padding."""

    def padding(self, numbers: Numbers) -> Numbers:
        """How many positions of each of these samples are padding."""


@runtime_checkable
class ReferencedSource(Source, Protocol):
    """A source whose samples may have numbers that the model with its initial weights computes of them.

    Attributes:
        key: identifies the samples.
        references: these numbers, [num_samples, K]; None: they are not known.
    """

    key: str
    references: References | None

    def refer(self, references: References) -> None:
        """Keep the numbers. From then on `read` gives them with the samples."""


class AnswerTokens(NamedTuple):
    """Tokens that a model has written, with the one that ends them; `cut`: they ended at their limit, without one."""

    tokens: list[int]
    cut: bool


@runtime_checkable
class PromptSource(Source, Protocol):
    """A source of prompts. The model that learns writes the answers, just before the step that learns from them.

    `read` gives samples without an answer, in the form that they have with some.

    Attributes:
        end: the token that ends an answer; None: only its limit does.
        vocab_size: ids of the tokenizer, of which answers are made.
        times: steps that learn from the same answers, one after the other.
    """

    end: int | None
    vocab_size: int
    times: int

    def complete(self, portion: Any, step: int) -> Any:
        """A loader's `Portion` of step `step` (from 0), with answers: by what `answer_by` was given."""

    def answer_by(self, complete: Callable[[Any, int], Any] | None) -> None:
        """Set what completes portions; None: nothing does."""

    def prompts(self, numbers: Numbers) -> list[list[int]]:
        """The tokens of prompts."""

    def rewards(self, number: int, answers: Sequence[AnswerTokens], when: str) -> list[float]:
        """The reward of each answer to a prompt. Raises UserError: whoever gives rewards has failed; it names the
        prompt, and `when`, such as "step 3"."""

    def answered(self, numbers: Numbers, answers: Sequence[Sequence[AnswerTokens]], rewards: Rewards) -> Samples:
        """Samples of prompts with their answers, and the rewards [n, G] of these."""

    def shown(self, number: int, answers: Sequence[AnswerTokens]) -> dict[str, Any]:
        """A prompt and its answers as text, and where the prompt is from, as JSON data."""


class AnyDataset(Protocol):
    """An open dataset of any task."""

    @property
    def path(self) -> Path:
        """Folder or file of the dataset."""

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary; None: samples are vectors."""

    @property
    def description(self) -> dict[str, Any]:
        """How the dataset was made, as JSON."""

    @property
    def fingerprint(self) -> str:
        """A hash of the samples. A checkpoint is only resumed on the same fingerprint, or on the `earlier` one."""

    @property
    def earlier(self) -> str | None:
        """The fingerprint of the same samples in earlier versions of codescent; None: it was equal."""

    @property
    def tokenizer_text(self) -> str | None:
        """Text of the tokenizer's file; None: there is no tokenizer."""

    def source(self, split: str, seq_len: int, num_targets: int) -> Source:
        """The samples of a split: `seq_len` positions each, the last `num_targets` of which have a target."""
