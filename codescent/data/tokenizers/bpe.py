"""In: a tokenizer of the tokenizers library: GPT-2's, a JSON file's, one trained here. Out: token ids, fast, and text.
Does not do merges of its own: a word's tokens always come from the library; here they are only remembered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers as library

from codescent.base.errors import UserError
from codescent.data.text import download

SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")  # known names of the end of a document
MIN_BPE_VOCAB_SIZE = 257  # 256 bytes and the separator
MAX_BPE_VOCAB_SIZE = 10_000_000  # far above any in use
TRAINING_PIECE_CHARS = 1 << 14
_NEIGHBOURS = {"letter": "a", "number": "1", "other": "!"}


class LibraryTokenizer:
    """A tokenizer of the library. Ids of text never include control tokens: text that spells one is ordinary text."""

    context_free = False

    def __init__(self, inner: library.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._inner = inner
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.separator = next((vocabulary[name] for name in SEPARATORS if name in vocabulary), None)
        self._dtype = np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")
        fields = json.loads(inner.to_str())
        self._words = WordTable(inner, self._dtype) if _splits_like_gpt2(fields) else None
        self.chars_per_s = 1.2e7 if self._words else 1.2e6

    @classmethod
    def from_json(cls, text: str, where: str) -> LibraryTokenizer:
        """From the text of a JSON file. Raises UserError naming `where` if it is not a tokenizer of the library."""
        try:
            inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"{where}: not a tokenizer of the tokenizers library: {error}") from error
        if not inner.get_vocab_size():
            raise UserError(f"{where}: a tokenizer without a vocabulary")
        return cls(inner)

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Ids of a text, exactly those of the library's `encode(text, add_special_tokens=False)`."""
        if self._words:
            return self._words.encode(text)
        return np.array(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids, self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids, control tokens spelt out. Raises ValueError for an id outside the vocabulary."""
        ids = [int(token) for token in tokens]
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token {wrong} is outside the vocabulary of {self.vocab_size}")
        text: str = self._inner.decode(ids, skip_special_tokens=False)
        return text

    def cut_is_safe(self, left: str, right: str) -> bool:
        """Whether the two neighbours, encoded apart, give the ids that they give together."""
        apart = [*self.encode(left).tolist(), *self.encode(right).tolist()]
        together: list[int] = self.encode(left + right).tolist()
        return apart == together

    @property
    def text(self) -> str:
        """It as the library's JSON, as `save` writes it."""
        return str(self._inner.to_str())

    def save(self, path: Path) -> None:
        """Write it as the library's JSON."""
        path.write_text(self.text, encoding="utf-8")


def gpt2() -> LibraryTokenizer:
    """GPT-2's BPE: 50,257 ids, `<|endoftext|>` = 50256, from its two published files.

    Raises:
        UserError: they are neither in CODESCENT_DATA_DIR nor cached and cannot be downloaded.
    """
    vocabulary = json.loads(download.obtain(download.GPT2_VOCABULARY).read_text(encoding="utf-8"))
    lines = download.obtain(download.GPT2_MERGES).read_text(encoding="utf-8").split("\n")[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    return LibraryTokenizer(_byte_level(library.models.BPE(vocab=vocabulary, merges=merges)))


def train(texts: Iterator[str], vocab_size: int) -> LibraryTokenizer:
    """A byte-level BPE trained on texts: 256 bytes, `<|endoftext|>` (id 0), and the most frequent merges.

    The vocabulary comes out smaller than asked for where the texts have no more pairs to merge.
    """
    inner = _byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in _short(text)), trainer)
    return LibraryTokenizer(inner)


def _short(text: str) -> Iterator[str]:
    """A text in short pieces, between words: the library holds some hundreds of them at a time, taken apart."""
    start = 0
    while len(text) - start > TRAINING_PIECE_CHARS:
        space = text.rfind(" ", start + 1, start + TRAINING_PIECE_CHARS)
        end = space if space > 0 else start + TRAINING_PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _byte_level(model: Any) -> library.Tokenizer:
    inner = library.Tokenizer(model)
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    return inner


def _splits_like_gpt2(fields: dict[str, Any]) -> bool:
    """Whether a tokenizer is BPE inside GPT-2's words and nothing else: a word's ids depend on the word alone."""
    words = fields["pre_tokenizer"] or {}
    return bool(
        fields["normalizer"] is None
        and words.get("type") == "ByteLevel"
        and words["use_regex"]
        and not words["add_prefix_space"]
        and fields["model"]["type"] == "BPE"
        and not fields["model"]["dropout"]
        and all(token["special"] for token in fields["added_tokens"])
    )


class WordTable:
    """GPT-2's words of a text, each looked up in a table of words whose ids the library has told before.

    The words are those of GPT-2's pattern (Radford et al. 2019, encoder.py):
    `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`. Which characters are letters,
    numbers and white space is asked of the library, a character at a time, when one is first met, so that its
    Unicode and ours cannot differ. A text has few different words, so this is two to three times as fast as asking for
    all of them (docs/data.md, "Speed").
    """

    MAX_WORDS = 1 << 19
    MAX_CHARS = 1 << 25

    def __init__(self, inner: library.Tokenizer, dtype: np.dtype[Any]) -> None:
        self._inner = inner
        self._dtype = dtype
        self._kinds: dict[str, str] = {}
        self._forget()
        self._meet({chr(point) for point in range(128)})

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Ids of a text."""
        if not text.isascii() and (unmet := set(text).difference(self._kinds)):
            self._meet(unmet)
        words = self._pattern.findall(text)
        if len(self._index) > self.MAX_WORDS or self._num_chars > self.MAX_CHARS:
            self._forget()
        if unknown := set(words).difference(self._index):
            self._learn(list(unknown))
        rows = np.fromiter(map(self._index.__getitem__, words), np.int64, len(words))
        lengths = self._lengths[rows]
        ends = lengths.cumsum()
        shifts = self._starts[rows] - ends + lengths
        return self._ids[np.repeat(shifts, lengths) + np.arange(int(ends[-1]) if len(words) else 0)]

    def _forget(self) -> None:
        self._index: dict[str, int] = {}
        self._num_chars = 0
        self._ids = np.empty(0, self._dtype)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)

    def _learn(self, words: list[str]) -> None:
        told = [encoding.ids for encoding in self._inner.encode_batch_fast(words, add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in told], np.int64)
        starts = len(self._ids) + lengths.cumsum() - lengths
        self._index.update(zip(words, range(len(self._index), len(self._index) + len(words))))
        self._num_chars += sum(map(len, words))
        self._ids = np.concatenate([self._ids, np.array([token for ids in told for token in ids], self._dtype)])
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, lengths])

    def _meet(self, characters: set[str]) -> None:
        """Ask the library of which kind each character is: between two of a kind, one of it makes no new word."""
        split = self._inner.pre_tokenizer.pre_tokenize_str
        for char in characters:
            together = (kind for kind, near in _NEIGHBOURS.items() if len(split(near + char + near)) == 1)
            self._kinds[char] = next(together, "space")
        letter, number, space = (_character_class(self._kinds, kind) for kind in ("letter", "number", "space"))
        self._pattern = re.compile(
            f"'(?:s|t|re|ve|m|ll|d)| ?[{letter}]+| ?[{number}]+| ?[^{space}{letter}{number}]+"
            f"|[{space}]+(?![^{space}])|[{space}]+"
        )


def _character_class(kinds: dict[str, str], kind: str) -> str:
    """The inside of a regular expression's class of one kind; a range may run over characters that were never met."""
    runs: list[list[str]] = []
    last = ""
    for char in sorted(kinds):
        if kinds[char] == kind:
            if last == kind:
                runs[-1][1] = char
            else:
                runs.append([char, char])
        last = kinds[char]
    return "".join(f"\\U{ord(first):08x}-\\U{ord(end):08x}" for first, end in runs)
