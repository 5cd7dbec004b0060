"""In: the text of the key `wire`. Out: its method, its rank and its share; the text again.
Does not know what the method does (plan/wire.py does)."""

from __future__ import annotations

import re

PLAIN = ("none", "bf16", "int8", "int4", "sign")
"""Methods that are written without a number."""

FORMS = (
    f"{', '.join(PLAIN)}, powersgd:r with a whole number r of at least 1, or topk:share with a share above 0 and at "
    "most 1"
)
_RANK = re.compile(r"0*([1-9]\d{0,8})", re.ASCII)  # no matrix has a thousand million rows
_SHARE = re.compile(r"(\d{1,30}\.?|\d{0,30}\.\d{1,30})(e[-+]?\d{1,3})?", re.ASCII | re.IGNORECASE)


def read_form(text: str) -> tuple[str, int, float]:
    """(method, rank of PowerSGD or 0, share of topk or 0). Raises ValueError, which names all forms, for other text."""
    method, colon, value = text.partition(":")
    if not colon and method in PLAIN:
        return method, 0, 0.0
    if method == "powersgd" and (rank := _RANK.fullmatch(value)):
        return method, int(rank[1]), 0.0
    if method == "topk" and _SHARE.fullmatch(value) and 0 < float(value) <= 1:
        return method, 0, float(value)
    raise ValueError(f"'{text}' is no form of wire: it is {FORMS}")


def text_of(method: str, rank: int, share: float) -> str:
    """The text that `read_form` reads."""
    return method + (f":{rank}" if rank else f":{share!r}" if share else "")
