"""In: a text of BERT's tokens. Out: the task "mlm": samples with some tokens masked, and what they were is wanted.
Does not order samples (data/loader.py does) and has no state: a mask is a function of seed and number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.sealed import digest
from codescent.data.samples import Numbers, Samples, in_range
from codescent.data.text.dataset import open_dataset
from codescent.data.text.split import Split
from codescent.data.tokenizers.wordpiece import CONTROLS, WordPiece
from codescent.tasks.task import TaskRequest, refuse_no_wordpiece
from codescent.tasks.text import TextDataset, TextTask

# Devlin et al. 2018, section 3.1
SHARE = 0.15  # share of the tokens that is chosen
MASKED = 0.8  # share of the chosen tokens that becomes [MASK]
RANDOM = 0.1  # share of them that becomes a random token; the rest stays as it is
MASKINGS = 10  # times that each piece of training text is masked, as in BERT's own data (dupe_factor)
VERSION = 1  # of the function from (seed, number) to a sample; count on when it changes
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class MaskedSource:
    """A split cut into samples of [CLS], `seq_len` - 2 tokens, [SEP], in which some tokens are masked.

    Every sample has K = max(1, round(0.15 (seq_len - 2))) masked tokens. Which ones is a function of (seed, number of
    the sample). Each piece of text is there as `maskings` samples with different masks, numbered masking * pieces +
    piece: an epoch reads the text that many times, as BERT's own training data did. Ends of documents ([SEP]) are
    masked only where no other token is left. Raises UserError: samples too short to mask anything.
    """

    def __init__(self, split: Split, tokenizer: WordPiece, seq_len: int, seed: int, maskings: int) -> None:
        self.pieces_len = seq_len - 2
        if self.pieces_len < 1:
            raise UserError(f"data.seq_len: {seq_len}: [CLS], text and [SEP] need 3 positions or more")
        self.name = split.name
        self.num_pieces = split.num_samples(self.pieces_len)
        self.num_samples = self.num_pieces * maskings
        self.num_hidden = max(1, round(SHARE * self.pieces_len))
        self.losses_per_sample: int | None = self.num_hidden
        self._split, self._tokenizer = split, tokenizer
        self._key = int.from_bytes(hashlib.blake2b(f"{seed} {split.name}".encode(), digest_size=8).digest(), "little")

    def read(self, numbers: Numbers) -> Samples:
        """inputs int64 [n, seq_len]; targets int64 [n, seq_len]: the token that was masked, -1 elsewhere.
        Raises UserError: a token outside the vocabulary: which file, at which byte; IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        text = self._split.read(numbers % max(1, self.num_pieces), self.pieces_len)[:, :-1]
        draws = _draws(self._key, numbers, self.pieces_len + 2 * self.num_hidden)
        order, kinds, tokens = np.split(draws, [self.pieces_len, self.pieces_len + self.num_hidden], 1)
        order = np.where(text == self._tokenizer.end, np.uint64(2**64 - 1), order)
        chosen = np.argsort(order, 1, kind="stable")[:, : self.num_hidden]
        told = np.take_along_axis(text, chosen, 1)
        hidden = _hidden(told, kinds, tokens, self._tokenizer)

        inputs = np.empty((len(numbers), self.pieces_len + 2), np.int64)
        inputs[:, 0], inputs[:, 1:-1], inputs[:, -1] = self._tokenizer.begin, text, self._tokenizer.end
        targets = np.full_like(inputs, -1)
        np.put_along_axis(inputs, chosen + 1, hidden, 1)
        np.put_along_axis(targets, chosen + 1, told, 1)
        extras = {"segments_BT": np.zeros_like(inputs), "lengths_B": np.full(len(numbers), inputs.shape[1], np.int64)}
        return Samples(inputs, targets, extras)

    def losses(self, numbers: Numbers) -> Numbers:
        """`losses_per_sample` for each."""
        return np.full(len(numbers), self.num_hidden, np.int64)


@dataclass(frozen=True)
class MaskedDataset(TextDataset):
    """A prepared text of BERT's tokens whose samples are masked. Raises UserError: the tokenizer is not BERT's."""

    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.text.tokenizer, WordPiece):
            raise UserError(
                f"{self.path}: masked language modelling needs a tokenizer with {', '.join(CONTROLS)}: "
                'data.tokenizer = "bert", "bert-cased", or the JSON file of a WordPiece tokenizer'
            )

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the tokens, the tokenizer, which decides what replaces a token, and the way of masking."""
        return digest(["masked", VERSION, SHARE, MASKED, RANDOM, MASKINGS, self.tokenizer_text, self.text.fingerprint])

    def source(self, split: str, seq_len: int, num_targets: int) -> MaskedSource:
        """The samples of a split; each piece of validation text comes once. `num_targets` is not used."""
        tokens, maskings = (self.text.train, MASKINGS) if split == "train" else (self.text.validation, 1)
        assert isinstance(self.text.tokenizer, WordPiece)
        return MaskedSource(tokens, self.text.tokenizer, seq_len, self.seed, maskings)


class MaskedTokens(TextTask):
    """Predict masked tokens (Devlin et al. 2018, section 3.1)."""

    name = head = "mlm"
    kinds = ("bert",)
    unit = "masked tokens"

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`."""
        refuse_no_wordpiece(self, request.data)
        return super().vocab_size(request)

    def open(self, request: TaskRequest, path: Path) -> MaskedDataset:
        """See `Task`."""
        return MaskedDataset(open_dataset(path), request.seed)


def _hidden(told: Numbers, kinds: npt.NDArray[Any], tokens: npt.NDArray[Any], tokenizer: WordPiece) -> Numbers:
    """The tokens that the model reads in place of the chosen ones."""
    kind = (kinds >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
    drawn = ((tokens >> np.uint64(32)) * np.uint64(tokenizer.vocab_size)) >> np.uint64(32)
    hidden = np.where(kind < MASKED + RANDOM, drawn.astype(np.int64), told)
    return np.where(kind < MASKED, tokenizer.mask, hidden)


def _draws(key: int, numbers: Numbers, count: int) -> npt.NDArray[np.uint64]:
    """uint64 [n, count], each a function of (key, number, place): SplitMix64 (Steele, Lea and Flood, 2014)."""
    seeds = _mixed(_mixed(numbers.astype(np.uint64)) ^ np.uint64(key))
    return _mixed(seeds[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
