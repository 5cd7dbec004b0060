"""In: the error with which a JSON file could not be read. Out: what is wrong with it, in plain words.
Does not read files and does not say what a file should hold."""

from __future__ import annotations

import json
import re

from codescent.base.published import in_words

BEGUN = re.compile(r"tr?u?|fa?l?s?|nu?l?|[-+.eE0-9]*")
"""What is left of the last word of a text that was cut; "": nothing."""


def json_problem(error: Exception) -> str:
    """Such as "cut short at line 3 column 7", for behind "not JSON: ". Words of codescent are said as they are.

    A text of one line has no number of a line: who has read it says it.
    """
    if isinstance(error, OSError):
        return in_words(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text from byte {error.start} on"
    if isinstance(error, json.JSONDecodeError):
        return _of_text(error)
    return "a number has too many digits" if "integer string conversion" in str(error) else str(error)


def _of_text(error: json.JSONDecodeError) -> str:
    written = error.doc.rstrip()
    if not written:
        return "empty"
    line = f"line {error.lineno} " if "\n" in written else ""
    is_cut = BEGUN.fullmatch(written[error.pos :]) or error.msg.startswith("Unterminated")
    return f"{'cut short' if is_cut else 'wrong'} at {line}column {error.colno}"
