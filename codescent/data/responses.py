"""In: prepared prompts and responses. Out: samples in which the tokens of responses alone are wanted.
Does not prepare them (response_prepare.py does) and does not order them (loader.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from codescent.data.described import described, fingerprint_of, is_described
from codescent.data.request import TOKENIZER
from codescent.data.samples import Numbers, Samples, in_range

FORMAT = "codescent responses 1"
SPLITS = ("train", "validation")
ARRAYS = ("tokens", "begins", "responses")
NOTHING = -1  # where nothing is wanted


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)  # other fields are there for people


class _Tokenizer(_Part):
    kind: str
    vocab_size: Annotated[int, Field(ge=1)]


class _Split(_Part):
    examples: int
    tokens: int


class _Splits(_Part):
    train: _Split
    validation: _Split


class _Description(_Part):
    format: Literal["codescent responses 1"]
    request: dict[str, Any]
    tokenizer: _Tokenizer
    splits: _Splits
    files: dict[str, str]  # name -> sha256


class ResponseSource:
    """The examples of a split, one a sample: prompt and response, cut after `seq_len` tokens, padded behind.

    Nothing is wanted of the prompt. Of the response every token is, the one that ends the document too, where the
    tokenizer has one. Examples whose prompt fills the sample are left out. Padding is token 0: no position sees those
    behind it, and nothing is wanted there.

    Args:
        name: "train" or "validation".
        tokens: of all examples, one after the other.
        begins: [examples + 1], where each begins; the last number is where the last one ends.
        responses: [examples], where the response of each begins.
        seq_len: tokens that a model reads of a sample.
    """

    losses_per_sample: int | None = None

    def __init__(self, name: str, tokens: npt.NDArray[Any], begins: Numbers, responses: Numbers, seq_len: int) -> None:
        self.name, self._tokens, self._seq_len = name, tokens, seq_len
        lengths = np.minimum(begins[1:] - begins[:-1], seq_len + 1)
        prompts = responses - begins[:-1]
        kept = lengths > prompts
        self._begins, self._lengths, self._prompts = begins[:-1][kept], lengths[kept], prompts[kept]
        self.num_samples = len(self._begins)
        self.left_out = len(kept) - self.num_samples

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len], beside them `lengths_B`: tokens of each that are not padding.

        Raises:
            IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets = np.full_like(inputs, NOTHING)
        for row, number in enumerate(numbers.tolist()):
            begin, length, prompt = (int(part[number]) for part in (self._begins, self._lengths, self._prompts))
            tokens = self._tokens[begin : begin + length]
            inputs[row, : length - 1] = tokens[:-1]
            targets[row, prompt - 1 : length - 1] = tokens[prompt:]
        return Samples(inputs, targets, {"lengths_B": self._lengths[numbers] - 1})

    def losses(self, numbers: Numbers) -> Numbers:
        """Tokens of the response, as many as there is room for."""
        counts: Numbers = self._lengths[numbers] - self._prompts[numbers]
        return counts


@dataclass(frozen=True)
class ResponseDataset:
    """Prepared prompts and responses, open.

    Attributes:
        arrays: by split, its tokens, where examples begin, where responses do.
        fingerprint: changes with any byte of these.
    """

    path: Path
    vocab_size: int
    arrays: dict[str, tuple[npt.NDArray[Any], ...]]
    description: dict[str, Any]
    fingerprint: str

    @property
    def tokenizer_text(self) -> str:
        """The tokenizer as a file holds it."""
        return (self.path / TOKENIZER).read_text(encoding="utf-8")

    def source(self, split: str, seq_len: int, num_targets: int) -> ResponseSource:
        """The examples of a split: see `AnyDataset`. `num_targets` are not asked for."""
        tokens, begins, responses = self.arrays[split]
        return ResponseSource(split, tokens, begins, responses, seq_len)

    def summary(self) -> list[str]:
        """What there is to say of it in a few lines."""
        tokenizer, splits = self.description["tokenizer"], self.description["splits"]
        return [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}",
            *(f"{name}: {splits[name]['examples']:,} examples, {splits[name]['tokens']:,} tokens" for name in SPLITS),
        ]


def is_response_folder(path: Path) -> bool:
    """Whether a folder says that it holds prepared prompts and responses."""
    return is_described(path, FORMAT)


def open_responses(path: Path) -> ResponseDataset:
    """Open prepared prompts and responses; every byte of them is compared with its sha256.

    Raises:
        UserError: there are none there, or all that is damaged.
    """
    description = described(path, _Description, "prepared responses")
    fingerprint = fingerprint_of(path, description["files"])
    arrays = {
        split: tuple(np.load(path / f"{split}_{array}.npy", mmap_mode="r") for array in ARRAYS) for split in SPLITS
    }
    return ResponseDataset(path, description["tokenizer"]["vocab_size"], arrays, description, fingerprint)
