"""In: a text as ids of BERT's tokenizer. Out: the task "mlm": predict the original tokens at masked positions.
Does not order samples (data/loader.py does). Does not store masks: each is computed from seed and sample number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.sealed import digest
from codescent.data.samples import Numbers, Samples, in_range
from codescent.data.text.request import KINDS
from codescent.data.text.split import Split
from codescent.data.tokenizers.wordpiece import CONTROLS, WordPiece, split_name
from codescent.models.shape import Shape
from codescent.plan import TaskFacts
from codescent.tasks.task import Task, TaskRequest
from codescent.tasks.text import TextDataset, TextTask

if TYPE_CHECKING:
    from codescent.config.sections import Data

# Devlin et al. 2018, section 3.1
SHARE = 0.15  # share of the tokens that are selected
MASKED = 0.8  # share of the selected tokens that become [MASK]
RANDOM = 0.1  # share of the selected tokens that become a random token; the others stay unchanged
MASKINGS = 10  # times that each piece of training text is masked, as in BERT's own data (dupe_factor)
VERSION = 1  # increase it when the function from (seed, number) to a sample changes
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class MaskedSource:
    """A split cut into samples of [CLS], `seq_len` - 2 tokens, [SEP], in which some tokens are masked.

    Every sample has K = max(1, round(0.15 (seq_len - 2))) masked tokens. The choice is a function of (seed, number of
    the sample). Each piece of text gives `maskings` samples with different masks: sample masking * num_pieces + piece.
    So an epoch reads the text `maskings` times, as BERT's own training data did. Ends of documents ([SEP]) are masked
    only where no other token is left. Raises UserError: samples too short to mask a token.
    """

    def __init__(self, split: Split, tokenizer: WordPiece, seq_len: int, seed: int, maskings: int) -> None:
        self.pieces_len = seq_len - 2
        if self.pieces_len < 1:
            raise UserError(f"data.seq_len: {seq_len}: [CLS], text and [SEP] need 3 positions or more")
        self.name = split.name
        self.num_pieces = split.num_samples(self.pieces_len)
        self.num_samples = self.num_pieces * maskings
        self.num_masked = num_masked(seq_len)
        self.losses_per_sample: int | None = self.num_masked
        self._split, self._tokenizer = split, tokenizer
        self._key = int.from_bytes(hashlib.blake2b(f"{seed} {split.name}".encode(), digest_size=8).digest(), "little")

    def read(self, numbers: Numbers) -> Samples:
        """inputs int64 [n, seq_len]; targets int64 [n, seq_len]: the original of a selected token, else -1.
        Raises UserError: a token outside the vocabulary (in which file, at which byte); IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        text = self._split.read(numbers % max(1, self.num_pieces), self.pieces_len)[:, :-1]
        draws = _draws(self._key, numbers, self.pieces_len + 2 * self.num_masked)
        order, kinds, tokens = np.split(draws, [self.pieces_len, self.pieces_len + self.num_masked], 1)
        order = np.where(text == self._tokenizer.end, np.uint64(2**64 - 1), order)
        chosen = np.argsort(order, 1, kind="stable")[:, : self.num_masked]
        originals = np.take_along_axis(text, chosen, 1)
        replaced = _replaced(originals, kinds, tokens, self._tokenizer)

        inputs = np.empty((len(numbers), self.pieces_len + 2), np.int64)
        inputs[:, 0], inputs[:, 1:-1], inputs[:, -1] = self._tokenizer.begin, text, self._tokenizer.end
        targets = np.full_like(inputs, -1)
        np.put_along_axis(inputs, chosen + 1, replaced, 1)
        np.put_along_axis(targets, chosen + 1, originals, 1)
        extras = {"segments_BT": np.zeros_like(inputs), "lengths_B": np.full(len(numbers), inputs.shape[1], np.int64)}
        return Samples(inputs, targets, extras)

    def losses(self, numbers: Numbers) -> Numbers:
        """`losses_per_sample` for each."""
        return np.full(len(numbers), self.num_masked, np.int64)


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
        """A hash of the tokens, of the tokenizer (its ids replace tokens), and of the constants of masking."""
        return digest(["masked", VERSION, SHARE, MASKED, RANDOM, MASKINGS, self.tokenizer_text, self.text.fingerprint])

    def source(self, split: str, seq_len: int, num_targets: int) -> MaskedSource:
        """The samples of a split; each piece of validation text gives one sample. `num_targets` is not used."""
        tokens, maskings = (self.text.train, MASKINGS) if split == "train" else (self.text.validation, 1)
        assert isinstance(self.text.tokenizer, WordPiece)
        return MaskedSource(tokens, self.text.tokenizer, seq_len, self.seed, maskings)


def num_masked(seq_len: int) -> int:
    """How many tokens of a sample are selected. [CLS] and [SEP] are never among them."""
    return max(1, round(SHARE * (seq_len - 2)))


class MaskedTokens(TextTask):
    """Predict masked tokens (Devlin et al. 2018, section 3.1)."""

    name = head = "mlm"
    aim = "predict masked tokens"
    kinds = ("bert", "transformers")
    undivided = "BERT predicts masked tokens from both sides, and its [SEP] says where a text ends"
    unit = "masked tokens"

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`."""
        refuse_no_wordpiece(self, request.data)
        return super().vocab_size(request)

    def facts(self, request: TaskRequest, shape: Shape) -> TaskFacts:
        """See `Task`. Every sample has the same number of masked tokens, so the head reads exactly this share."""
        length = request.data.seq_len or shape.seq_len
        return replace(super().facts(request, shape), head_share=num_masked(length) / length)

    def open(self, request: TaskRequest, path: Path) -> MaskedDataset:
        """See `Task`."""
        return MaskedDataset(self.text(request, path), request.seed)


def _replaced(originals: Numbers, kinds: npt.NDArray[Any], tokens: npt.NDArray[Any], tokenizer: WordPiece) -> Numbers:
    """What the model reads in place of each selected token: [MASK], a random token, or the token itself."""
    kind = (kinds >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
    random_tokens = ((tokens >> np.uint64(32)) * np.uint64(tokenizer.vocab_size)) >> np.uint64(32)
    replaced = np.where(kind < MASKED + RANDOM, random_tokens.astype(np.int64), originals)
    return np.where(kind < MASKED, tokenizer.mask, replaced)


def _draws(key: int, numbers: Numbers, count: int) -> npt.NDArray[np.uint64]:
    """Random uint64 [n, count], functions of (key, number, column): SplitMix64 (Steele, Lea and Flood, 2014)."""
    seeds = _mixed(_mixed(numbers.astype(np.uint64)) ^ np.uint64(key))
    return _mixed(seeds[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def refuse_no_wordpiece(task: Task, data: Data) -> None:
    """Raise UserError if data.tokenizer names a tokenizer that is not BERT's."""
    if data.tokenizer in KINDS and split_name(data.tokenizer) is None:
        raise UserError(
            f'data.tokenizer = "{data.tokenizer}": data.task = "{task.name}" reads BERT\'s WordPiece; take "bert", '
            '"bert-cased" or "bert:FILE"'
        )
