"""In: a folder. Out: a small WordPiece vocabulary and small files of SQuAD's form there.
Does not decide what is tested: the tests that import it do."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

WORDS = (
    "the a of in and who when where what is was born died river city king queen ran to sea he she it walk ##ed ##ing"
)
CONTEXT = "The king was born in the city. He walked to the river, and the queen ran to the sea: it was Ötzi's 1990s."


def vocabulary(folder: Path) -> Path:
    """A vocab.txt: control tokens, some words, every letter, digit and mark, alone and inside a word."""
    letters = [*string.ascii_lowercase, *string.digits]
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *string.punctuation]
    tokens += [letter for letter in letters if letter not in tokens] + [f"##{letter}" for letter in letters]
    path = folder / "vocab.txt"
    path.write_text("\n".join(tokens) + "\n")
    return path


def question(name: str, text: str, *answers: str, context: str = CONTEXT) -> dict[str, Any]:
    """One of SQuAD's `qas`; each answer is put where it first comes in the context."""
    return {"id": name, "question": text, "answers": [{"text": a, "answer_start": context.find(a)} for a in answers]}


def squad(*paragraphs: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A file's value: one article of paragraphs, each a context and its questions."""
    found = [{"context": context, "qas": asked} for context, asked in paragraphs]
    return {"version": "1.1", "data": [{"title": "Places", "paragraphs": found}]}


def files(folder: Path) -> tuple[Path, Path]:
    """A training and a validation file; the second's context is longer than a window of 32 tokens."""
    long = " ".join(f"The king of city {number} was born in {1800 + number}." for number in range(12))
    train = [
        question("t1", "Who was born?", "The king"),
        question("t2", "Where?", "city"),
        question("t3", "When?", "1990"),
    ]
    valid = [
        question("v1", "When was the king of city 7 born?", "1807", context=long),
        question("v2", "Who?", "The king", "king", context=long),
    ]
    paths = folder / "train.json", folder / "dev.json"
    for path, value in zip(paths, (squad((CONTEXT, train)), squad((long, valid), (CONTEXT, train[:1])))):
        path.write_text(json.dumps(value))
    return paths
