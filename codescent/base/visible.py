"""In: text from a user, a file or a model. Out: the text with control characters escaped, safe for a terminal.
Does not print. Newlines stay in `visible`; tabs stay in both."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of ASCII and Latin-1, line separators, characters that reverse the text direction, and halves of
characters (surrogates), as names of files have them that are not UTF-8: no stream can write these."""


def visible(text: str) -> str:
    r"""The text with each control character escaped as in Python: ESC becomes \x1b."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The text in one line: newlines are escaped, too. So a name with a newline cannot look like a second message."""
    return visible(text).replace("\n", "\\n")


def is_one_line(text: str) -> bool:
    """Whether a text is one line, of characters that can be printed and written as UTF-8."""
    return visible(text) == text and "\n" not in text and "\t" not in text
