"""In: the user's corpus, tokenizer and validation fraction. Out: a `Request`: these settings, checked.
Does not read the corpus. It names the dataset's folder from the settings and a hash of the text that it is given."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base import hub_name
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.sealed import digest
from codescent.data.text import corpora
from codescent.data.text.records import FIRST_NAMES
from codescent.data.tokenizers import beside, bpe, wordpiece
from codescent.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

FORMAT = "codescent tokens 3"
"""The format of description.json. Format 2 had no bytes of the splits' texts."""
READ_FORMATS = ("codescent tokens 2", FORMAT)
TOKENS = "codescent tokens 2"
"""How a text becomes tokens. It is in a dataset's key, so a new one prepares every text again."""
ALL_TRAIN, ALL_VALIDATION = 0.0, 1.0
"""Validation fractions of a corpus that has a single split."""
KINDS = ("char", "byte", "gpt2", *wordpiece.KINDS)


@dataclass(frozen=True)
class Request:
    """A checked request for a dataset; `corpus` and `tokenizer` are as the user gave them.

    Attributes:
        kind: one of KINDS, "bpe" (trained on the corpus, with `bpe_vocab_size` ids) or "file".
        validation_fraction: share of the characters that the validation split gets.
        text_key: the column, or the key of a JSON line, that holds the text; None: it is found.
        as_text: every file is plain text, whatever it looks like.
        key: all that the dataset depends on except the corpus' text, as JSON data.
    """

    corpus: str
    tokenizer: str
    kind: str
    bpe_vocab_size: int
    validation_fraction: float
    text_key: str | None
    as_text: bool
    key: dict[str, Any]

    def partial_folder(self, root: Path) -> Path:
        """Hidden folder of this dataset until it is complete."""
        return root / f".partial-{digest(self.key)[:16]}"

    def folder(self, root: Path, corpus_name: str, corpus_sha256: str, json_lines: Sequence[str] = ()) -> Path:
        """Final folder of this dataset. Another text gets another folder; so do files that are read as JSON lines by
        their content: earlier versions read these as plain text."""
        content = [self.key, corpus_sha256, *([list(json_lines)] if json_lines else [])]
        names = {"bpe": f"bpe{self.bpe_vocab_size}", "file": expanded(self.tokenizer).stem[:40]}
        return root / f"{corpus_name}-{names.get(self.kind, self.kind)}-{digest(content)[:8]}"


def make_request(
    corpus: str,
    tokenizer: str | None,
    validation_fraction: float,
    text_key: str | None,
    train_bpe: int | None,
    *,
    as_text: bool = False,
) -> Request:
    """Check the arguments and build the request. Raises UserError: every problem of the arguments.

    Args:
        tokenizer: char, byte, gpt2, bert, bert-cased (`bert:FILE`, `bert-cased:FILE`: a vocab.txt), `bpe:VOCAB`
            (trained on the train split), or a tokenizer's JSON file; None: `train_bpe` if it is given, else char.
        train_bpe: the same as the tokenizer `bpe:VOCAB`.
    """
    problems = []
    if not (0.0 < validation_fraction <= 0.5 or validation_fraction in (ALL_TRAIN, ALL_VALIDATION)):
        problems.append(
            f"data.validation_fraction: {validation_fraction} is not in (0, 0.5], nor 0 (all is for training) or 1 "
            "(all is for validation)"
        )
    trained = f"bpe:{train_bpe}" if train_bpe is not None else None
    if trained and tokenizer not in (None, trained):
        problems.append(f"tokenizer {tokenizer} and a BPE to train: give only one of the two")
    wanted = trained or tokenizer or "char"
    size, identity = 0, wanted
    if named := wordpiece.split_name(wanted):
        kind = named[0]
        identity, wrong = _identity(wanted, wordpiece.identity)
    elif wanted.startswith("bpe:"):
        kind, (size, wrong) = "bpe", _bpe_size(wanted, validation_fraction)
        identity = f"bpe:{size}"
    elif wanted in KINDS:
        kind, wrong = wanted, []
    else:
        kind = "file"
        identity, wrong = _identity(wanted, lambda name: beside.identity(file_of(name)))
    problems += [f"tokenizer {wanted}: {problem}" for problem in wrong]
    if problems:
        raise UserError(*problems)
    key = {
        "format": TOKENS,
        "corpus": corpora.identity(corpus),
        "tokenizer": identity,
        "validation_fraction": validation_fraction,
        "text_key": text_key or FIRST_NAMES[0],  # as earlier versions wrote it
        **({"as_text": True} if as_text else {}),
    }
    return Request(corpus, wanted, kind, size, validation_fraction, text_key, as_text, key)


def _bpe_size(wanted: str, validation_fraction: float) -> tuple[int, list[str]]:
    """The vocabulary size in `bpe:VOCAB`, and problems."""
    digits, problems = wanted.removeprefix("bpe:"), list[str]()
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(bpe.MAX_BPE_VOCAB_SIZE))
    size = int(digits) if is_number else -1
    if not bpe.MIN_BPE_VOCAB_SIZE <= size <= bpe.MAX_BPE_VOCAB_SIZE:
        sizes = f"at least {bpe.MIN_BPE_VOCAB_SIZE} and at most {bpe.MAX_BPE_VOCAB_SIZE:,}"
        problems.append(f"a BPE's vocabulary size must be {sizes}")
    if validation_fraction == ALL_VALIDATION:
        problems.append(
            "is trained on the train split, and with data.validation_fraction = 1 there is none; give the "
            "tokenizer.json of the corpus that the model is trained on"
        )
    return size, problems


def _identity(wanted: str, read: Callable[[str], str]) -> tuple[str, list[str]]:
    """How a dataset's description names a tokenizer that has a file, and problems of the file."""
    try:
        return read(wanted), []
    except UserError as error:
        return wanted, list(error.problems)
    except OSError as error:
        close = difflib.get_close_matches(wanted, KINDS, 1, 0.5)
        near = f": did you mean {close[0]}?" if close else ""
        near += f"; a tokenizer of the hub is named {name}" if (name := hub_name.meant(wanted)) else ""
        kinds = ", ".join(KINDS)
        return wanted, [f"neither {kinds}, bpe:VOCAB nor a file that can be read ({error.strerror}){near}"]


def tokenizer_of(name: str) -> Tokenizer:
    """Build a tokenizer that is not made from the corpus: byte, gpt2, BERT's, or a file. Raises UserError."""
    if wordpiece.split_name(name):
        return wordpiece.bert(name)
    if name == "byte":
        return ByteTokenizer()
    return bpe.gpt2() if name == "gpt2" else beside.read(file_of(name))


def remark_on(name: str) -> str | None:
    """What is to be said of a tokenizer when it is used for the first time; None: nothing. Raises UserError."""
    return None if name in KINDS or wordpiece.split_name(name) else beside.remark(file_of(name))


def file_of(name: str) -> str:
    """The path of a tokenizer's file as `beside.read` takes it, from a value of data.tokenizer."""
    bare = beside.BARE if name.startswith(beside.BARE) else ""
    return f"{bare}{expanded(name.removeprefix(bare))}"
