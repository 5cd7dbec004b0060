"""In: GPT-2's files, a JSON file of the tokenizers library, or texts to train a BPE. Out: a tokenizer of that library.
Does not apply merges: the library does, and tiktoken where it gives the same ids (byte_pairs.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tokenizers as library

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.reading import read_json, read_text
from codescent.data.text import download
from codescent.data.tokenizers.byte_pairs import SameIds, same_ids

SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")  # known names of the document separator
KIND, RECORDED = "codescent_tokenizer", "library"
"""Key of a file of our own, and its value for a tokenizer of the library of which more is known than its JSON says."""
MIN_BPE_VOCAB_SIZE = 257  # 256 bytes and the separator
MAX_BPE_VOCAB_SIZE = 10_000_000  # far above any in use
TRAINING_PIECE_CHARS = 1 << 14
SHORT_CHARS = 1 << 18
"""The library encodes so many characters before an encoding of tiktoken is made, which takes as long as they do."""


@contextmanager
def of_the_library(said: str) -> Iterator[None]:
    """A block whose errors are a UserError that begins with `said`.

    The library raises bare Exceptions. Its panics are none, and their class has no public name.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{said}: {error}") from error


class LibraryTokenizer:
    """A tokenizer of the tokenizers library. Text that spells a control token is encoded as ordinary text.

    Args:
        inner: of the library.
        obeys: whether its post-processor decides what begins and ends a text; False: nothing does, as in files that
            earlier versions wrote.
    """

    context_free = False

    def __init__(self, inner: library.Tokenizer, *, obeys: bool = False) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._inner = inner
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.separator = next((vocabulary[name] for name in SEPARATORS if name in vocabulary), None)
        self.opening, self.closing = around(inner, vocabulary) if obeys else ((), ())
        self.is_recorded = bool(self.opening or self.closing)
        self._dtype = np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")
        self._encoded_chars = 0

    @classmethod
    def from_json(cls, text: str, where: str, *, obeys: bool = False, recorded: bool = False) -> LibraryTokenizer:
        """Parse the text of a JSON file. `obeys`: see the class. `recorded`: the text is not that of a user's file.

        Raises UserError with `where`: it is not a tokenizer of the library, or its ids would be drawn at random.
        """
        with of_the_library(f"{where}: not a tokenizer of the tokenizers library"):
            inner = library.Tokenizer.from_str(text)
        if not inner.get_vocab_size():
            raise UserError(f"{where}: a tokenizer without a vocabulary")
        model = json.loads(text)["model"]
        for name in ("dropout", "alpha", "nbest_size"):
            if model.get(name):
                raise UserError(
                    f"{where}: model.{name} = {model[name]}: ids would be drawn at random, others in each "
                    "preparation; set it to null"
                )
        try:
            with of_the_library("the tokenizers library cannot apply it"):
                made = cls(inner, obeys=obeys)
        except UserError as error:
            raise UserError(*(f"{where}: {problem}" for problem in error.problems)) from error
        made.is_recorded = made.is_recorded or recorded
        return made

    def ended_by(self, separator: int | None) -> Self:
        """The tokenizer with this id as the end of a document, which its file records."""
        self.is_recorded = self.is_recorded or separator != self.separator
        self.separator = separator
        return self

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        found: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Ids of a text, equal to those of the library's `encode(text, add_special_tokens=False)`.

        Raises UserError: the library cannot, for example because a word is unknown and there is no token for that.
        """
        self._encoded_chars += len(text)
        fast = self._fast if self._encoded_chars > SHORT_CHARS else None
        with of_the_library("the tokenizer cannot encode the text"):
            if fast and (ids := fast.encode(text)) is not None:
                return np.asarray(ids, self._dtype)
            return np.array(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids, self._dtype)

    @cached_property
    def _fast(self) -> SameIds | None:
        return same_ids(self._inner, json.loads(self.library_text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids, including control tokens. Raises ValueError for an id outside the vocabulary."""
        ids = [int(token) for token in tokens]
        check_range(ids, self.vocab_size)
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def cut_is_safe(self, left: str, right: str) -> bool:
        """Whether encoding the two neighbours separately gives the ids of encoding them together."""
        apart = [*self.encode(left).tolist(), *self.encode(right).tolist()]
        together: list[int] = self.encode(left + right).tolist()
        return apart == together

    @property
    def library_text(self) -> str:
        """The tokenizer as JSON of the library."""
        return str(self._inner.to_str())

    @property
    def text(self) -> str:
        """The text of its file: JSON of the library; if more is known than that says, inside an object of our own."""
        if not self.is_recorded:
            return self.library_text
        fields = {KIND: RECORDED, "end": self.separator, "tokenizer": json.loads(self.library_text)}
        return json.dumps(fields, ensure_ascii=False)

    def save(self, path: Path) -> None:
        """Write `text`."""
        replace_file(path, self.text)


def is_recorded(text: str) -> bool:
    """Whether a tokenizer's file says more than JSON of the library: see `LibraryTokenizer.is_recorded`."""
    return text.startswith(json.dumps({KIND: RECORDED})[:-1])


def around(inner: library.Tokenizer, vocabulary: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after the tokens of one text.

    It is applied to a text of one token, whose id no vocabulary has. Raises UserError: it does not keep the text once.
    """
    if inner.post_processor is None:
        return (), ()
    text = (1 << 31) - 1
    probe = library.Tokenizer(library.models.WordLevel(vocab={"x": text}, unk_token="x"))
    probe.post_processor = inner.post_processor
    ids = probe.encode("x").ids
    unknown = sorted(set(ids) - {text} - set(vocabulary.values()))
    if ids.count(text) != 1 or unknown:
        adds = f"adds the ids {unknown}, which no token has" if unknown else f"has a text {ids.count(text)} times"
        raise UserError(f"its post_processor {adds}: each text is needed once, between tokens of the vocabulary")
    place = ids.index(text)
    return tuple(ids[:place]), tuple(ids[place + 1 :])


def check_range(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a token outside [0, vocab_size)."""
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token {wrong} is outside the vocabulary of {vocab_size}")


def gpt2() -> LibraryTokenizer:
    """GPT-2's BPE: 50,257 ids, `<|endoftext|>` = 50256. Raises UserError: a file is missing, see `download.obtain`."""
    vocabulary = read_json(download.obtain(download.GPT2_VOCABULARY))
    merges = read_text(download.obtain(download.GPT2_MERGES))
    return LibraryTokenizer(from_merges(vocabulary, merges))


def train(texts: Iterator[str], vocab_size: int) -> LibraryTokenizer:
    """Train a byte-level BPE of at most `vocab_size` ids: `<|endoftext|>` (id 0), bytes, most frequent merges."""
    inner = byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in _short(text)), trainer)
    return LibraryTokenizer(inner)


def _short(text: str) -> Iterator[str]:
    """Split a text between words into short pieces. The library holds hundreds of pieces in memory."""
    start = 0
    while len(text) - start > TRAINING_PIECE_CHARS:
        space = text.rfind(" ", start + 1, start + TRAINING_PIECE_CHARS)
        end = space if space > 0 else start + TRAINING_PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def from_merges(vocabulary: dict[str, int], merges: str) -> library.Tokenizer:
    """A byte-level BPE from the text of a merges.txt: a pair per line, after a line `#version`."""
    lines = (line.partition(" ") for line in merges.split("\n") if line and not line.startswith("#version"))
    pairs = [(left, right) for left, _, right in lines]
    return byte_level(library.models.BPE(vocab=vocabulary, merges=pairs))


def byte_level(model: Any, *, use_regex: bool = True) -> library.Tokenizer:
    """A tokenizer of the library that applies `model` to bytes; `use_regex` splits a text into GPT-2's words first."""
    inner = library.Tokenizer(model)
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = library.decoders.ByteLevel()
    return inner
