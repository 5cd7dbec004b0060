"""In: words. Out: the files of the package in whose text one of them stands, parsed.
Does not look for anything in the trees: the tests do. To parse all files takes seconds, and most say nothing of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import codescent

PACKAGE = Path(codescent.__file__).parent


@cache
def texts() -> dict[str, str]:
    """The text of each file of the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
    }


def sources(*words: str) -> Iterator[tuple[str, ast.Module]]:
    """Each file with one of these words, parsed. Without words: each file."""
    for file, text in texts().items():
        if not words or any(word in text for word in words):
            yield file, ast.parse(text)
