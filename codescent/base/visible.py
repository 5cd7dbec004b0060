"""In: text of which a user, a file or a model has a part. Out: what may be printed: a terminal obeys none of it.
Does not print, and does not quote: newlines and tabs stay."""

from __future__ import annotations

import re

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters of ASCII and Latin-1, those that break lines, and those that turn the order of text around."""


def visible(text: str) -> str:
    r"""The text with each control character as Python writes it: ESC is \x1b."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
