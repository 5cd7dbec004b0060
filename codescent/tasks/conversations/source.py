"""In: a folder of prepared examples. Out: its samples by number; only tokens of responses are targets.
Does not prepare them (prepare.py does) and does not order them (data/loader.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from codescent.data.prepared import DESCRIPTION, SPLITS, Described, Part, Splits
from codescent.data.samples import Numbers, Samples, in_range
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.tasks.folder import FolderDataset

ARRAYS = ("tokens", "begins", "wanted")
NOTHING = -1  # where nothing is wanted


class _Split(Part):
    examples: int
    tokens: int


class _Description(Described):
    format: Literal["codescent responses 2"]
    splits: Splits[_Split]


class ResponseSource:
    """The examples of a split. A sample is one example, cut after `seq_len` tokens or padded at its end.

    Targets are the wanted pieces of an example: a response and its end, or every turn of the assistant. Examples
    without a wanted token inside the sample are left out. Padding is token 0; it has no targets.

    Args:
        name: "train" or "validation".
        tokens: all examples, one after the other.
        begins: [examples + 1], where each example begins, and where the last one ends.
        wanted: [pieces, 2], where each piece begins and ends in `tokens`, in order; a piece is inside one example, is
            not empty, and does not have the example's first token.
        seq_len: tokens of a sample.
    """

    losses_per_sample: int | None = None

    def __init__(self, name: str, tokens: npt.NDArray[Any], begins: Numbers, wanted: Numbers, seq_len: int) -> None:
        self.name, self._tokens, self._wanted, self._seq_len = name, tokens, wanted, seq_len
        lengths = np.minimum(begins[1:] - begins[:-1], seq_len + 1)
        pieces = np.searchsorted(wanted[:, 0], begins)  # number of the first piece of each example
        owners = np.repeat(np.arange(len(lengths)), np.diff(pieces))
        ends = np.minimum(wanted[:, 1], (begins[:-1] + lengths)[owners])
        losses = np.zeros(len(lengths), np.int64)
        np.add.at(losses, owners, np.maximum(ends - wanted[:, 0], 0))
        kept = losses > 0
        self._begins, self._lengths, self._losses = begins[:-1][kept], lengths[kept], losses[kept]
        self._pieces = pieces[:-1][kept], pieces[1:][kept]
        self.num_samples = len(self._begins)
        self.left_out = len(kept) - self.num_samples

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len], extras `lengths_B`: tokens of each that are not padding.
        Raises IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets = np.full_like(inputs, NOTHING)
        first, stop = self._pieces
        for row, number in enumerate(numbers.tolist()):
            begin, length = int(self._begins[number]), int(self._lengths[number])
            tokens = self._tokens[begin : begin + length]
            inputs[row, : length - 1] = tokens[:-1]
            for start, end in (self._wanted[first[number] : stop[number]] - begin).tolist():
                targets[row, start - 1 : end - 1] = tokens[start:end]  # both slices end where the sample does
        return Samples(inputs, targets, {"lengths_B": self._lengths[numbers] - 1})

    def losses(self, numbers: Numbers) -> Numbers:
        """Wanted tokens inside each sample."""
        counts: Numbers = self._losses[numbers]
        return counts


@dataclass(frozen=True)
class ResponseDataset(FolderDataset):
    """Prepared prompts and responses or conversations, open."""

    format = "codescent responses 2"
    form = _Description
    what = "prepared responses"

    @property
    def chat(self) -> ChatFiles | None:
        """The chat template by which it was prepared; None: by none."""
        return chat_of(self.path, self.description["request"])

    def source(self, split: str, seq_len: int, num_targets: int) -> ResponseSource:
        """The examples of a split: see `AnyDataset`. `num_targets` is not used."""
        tokens, begins, wanted = (self.arrays[f"{split}_{name}"] for name in ARRAYS)
        return ResponseSource(split, tokens, begins, wanted, seq_len)

    def summary(self) -> list[str]:
        """See `FolderDataset`."""
        tokenizer, splits = self.description["tokenizer"], self.description["splits"]
        return [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}",
            *(f"{name}: {splits[name]['examples']:,} examples, {splits[name]['tokens']:,} tokens" for name in SPLITS),
        ]


def chat_of(path: Path, request: Mapping[str, Any]) -> ChatFiles | None:
    """The chat template in the key of a request, as a folder's description has it; None: there is none."""
    fields = request.get("chat_template")
    return None if fields is None else ChatFiles.of_kept(str(path / DESCRIPTION), fields)
