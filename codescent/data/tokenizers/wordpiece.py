"""In: BERT's vocabulary, published or the user's. Out: its WordPiece tokenizer: ids and character spans of a text.
Does not cut texts into windows and does not mask tokens (tasks do)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers as library

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.reading import read_bytes
from codescent.data.text import download
from codescent.data.tokenizers.bpe import LibraryTokenizer

KINDS = {"bert": download.BERT_UNCASED, "bert-cased": download.BERT_CASED}
CONTROLS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"  # prefix of a piece that is not the first of its word
MAX_PROBLEMS = 20


class Pieces(NamedTuple):
    """A text's tokens: int64 ids [N], and the characters [begin, end) of each token, int32 [N, 2]."""

    ids: npt.NDArray[np.int64]
    characters: npt.NDArray[np.int32]


class WordPiece(LibraryTokenizer):
    """BERT's tokenizer: it splits at white space, punctuation and Chinese characters, then into the longest pieces.

    An uncased tokenizer first converts to lower case and strips accents. Words outside the vocabulary become [UNK].

    Attributes:
        pad, unknown, begin, end, mask: the ids of [PAD], [UNK], [CLS], [SEP] and [MASK]. Encoding a text gives
            none of them except [UNK].
    """

    def __init__(self, inner: library.Tokenizer, *, obeys: bool = False) -> None:
        super().__init__(inner)  # the tasks of BERT put [CLS] and [SEP] around a text
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.pad, self.unknown, self.begin, self.end, self.mask = (vocabulary[name] for name in CONTROLS)

    def normalise(self, chinese: bool, accents: bool | None) -> None:
        """Split Chinese characters or not; strip accents or not (None: if it lowers the text)."""
        lower = bool(json.loads(self._inner.to_str())["normalizer"]["lowercase"])
        self._inner.normalizer = library.normalizers.BertNormalizer(
            handle_chinese_chars=chinese, strip_accents=accents, lowercase=lower
        )

    def pieces(self, texts: Sequence[str]) -> list[Pieces]:
        """Tokens of each text, with their character spans in the original text."""
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        spans = (np.array(found.offsets, np.int32).reshape(-1, 2) for found in encodings)
        return [Pieces(np.array(found.ids, np.int64), span) for found, span in zip(encodings, spans)]


def is_wordpiece(fields: Any) -> bool:
    """Whether the library's JSON is a WordPiece tokenizer with all five control tokens."""
    match fields:
        case {"model": {"type": "WordPiece", "vocab": dict(vocabulary)}}:
            return all(name in vocabulary for name in CONTROLS)
    return False


def split_name(name: str) -> tuple[str, str] | None:
    """Split "bert", "bert-cased", "bert:PATH" or "bert-cased:PATH" into (kind, path or ""); None for other names."""
    kind, _, path = name.partition(":")
    return (kind, path) if kind in KINDS and (path or kind == name) else None


def identity(name: str) -> str:
    """Its name in a dataset's key: kind, and sha256 of a user's vocabulary. Raises UserError: that cannot be read."""
    kind, path = split_name(name) or (name, "")
    return f"{kind}:{hashlib.sha256(_read(expanded(path))).hexdigest()}" if path else kind


def bert(name: str) -> WordPiece:
    """Build BERT's tokenizer for a name that `split_name` accepts.

    "bert" is google-bert/bert-base-uncased's (30,522 ids), "bert-cased" bert-base-cased's (28,996). ":PATH" reads the
    vocabulary from a vocab.txt, one token per line.

    Raises:
        UserError: the published file is missing and cannot be downloaded; every problem of the user's vocabulary.
    """
    kind, path = split_name(name) or (name, "")
    vocabulary = _vocabulary(expanded(path) if path else download.obtain(KINDS[kind]))
    inner = library.Tokenizer(
        library.models.WordPiece(vocab=vocabulary, unk_token="[UNK]", continuing_subword_prefix=CONTINUES)
    )
    inner.normalizer = library.normalizers.BertNormalizer(lowercase=kind == "bert")
    inner.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    inner.decoder = library.decoders.WordPiece(prefix=CONTINUES)
    inner.add_special_tokens(list(CONTROLS))
    return WordPiece(inner)


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        lines = _read(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: byte {error.object[error.start]:#x} at {error.start}") from error
    tokens = [line.rstrip("\r") for line in lines]
    if tokens and not tokens[-1]:
        tokens.pop()
    first: dict[str, int] = {}
    problems = []
    for number, token in enumerate(tokens):
        if not token:
            problems.append(f"{path}: line {number + 1}: empty: a vocabulary has a token on each line")
        elif token in first:
            problems.append(f"{path}: line {number + 1}: {token!r} is on line {first[token] + 1} already")
        first.setdefault(token, number)
    problems += [f"{path}: no token {name}: BERT needs {', '.join(CONTROLS)}" for name in CONTROLS if name not in first]
    if problems:
        more = [f"{path}: {len(problems) - MAX_PROBLEMS} more problems"] if len(problems) > MAX_PROBLEMS else []
        raise UserError(*problems[:MAX_PROBLEMS], *more)
    return first


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise UserError(f"{path}: this vocabulary cannot be read: {error.strerror}") from error
