"""In: the text of the key `wire`. Out: its method, its rank and its share.
Does not know what the method does (plan/wire.py does)."""

from __future__ import annotations

import math

PLAIN = ("none", "bf16", "int8", "int4", "sign")
"""Methods that are written without a number."""

MOST_DIGITS = 9
"""Of a rank. No matrix has more rows."""

FORMS = (
    "none, bf16, int8, int4, sign, powersgd:r with a whole number r of at least 1, or topk:share with a share above 0 "
    "and at most 1"
)


def read_form(text: str) -> tuple[str, int, float]:
    """(method, rank of PowerSGD or 0, share of topk or 0). Raises ValueError, which names all forms, for other text."""
    method, colon, value = text.partition(":")
    if not colon and method in PLAIN:
        return method, 0, 0.0
    if method == "powersgd" and value.isascii() and value.isdigit() and 1 <= len(value) <= MOST_DIGITS and int(value):
        return method, int(value), 0.0
    share = _number(value) if method == "topk" else 0.0
    if 0 < share <= 1:
        return method, 0, share
    raise ValueError(f"'{text}' is no form of wire: it is {FORMS}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
