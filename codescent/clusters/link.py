"""In: a text such as "49mbit,0.2ms". Out: `Link`: bytes per second and latency of a network card or a link.
Does not simulate what travels (cost/network.py does) and does not measure."""

from __future__ import annotations

import re
from dataclasses import dataclass

RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
"""Bytes per second of each unit of a rate, in lower case: bits as tc(8) writes them, or bytes (B)."""
MOST = 1e9
"""No rate or latency is a larger number of its unit."""
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(r"([\d.]+)\s*([kmg]?(?:bit|b))(?:/s)?(?:\s*,\s*([\d.]+)\s*(us|ms|s))?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """The network card of a host.

    Attributes:
        bytes_per_s: payload that a card sends, and at the same time receives: headers are not counted.
        latency_s: from a card to another one like it, beside the time of the bytes. Each has half of it.
        queue_s: a small message waits so long behind others, where the card is busy. The default: it overtakes them.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    queue_s: float = 0.0

    @classmethod
    def parse(cls, text: str, latency_s: float = 0.0) -> Link:
        """Read a text such as "49mbit,0.2ms", "6.12MB/s". Without a latency it has `latency_s`.

        Raises ValueError, which names the forms, for any other text.
        """
        found = _LINK.fullmatch(text.strip())
        numbers = [_number(found[group]) for group in (1, 3)] if found else [None, None]
        if found is None or not numbers[0] or numbers[1] is None:
            raise ValueError(
                f"'{text}' is no link: it is a rate above 0 in kbit, mbit, gbit, kB, MB or GB a second, and a latency "
                "in us, ms or s, such as 49mbit,0.2ms or 6.12MB/s"
            )
        rate = numbers[0] * RATES[found[2].lower()]
        return cls(rate, latency_s if found[3] is None else numbers[1] * TIMES[found[4].lower()])


def _number(text: str | None) -> float | None:
    try:
        found = float(text or 0)
    except ValueError:  # such as 1.2.3
        return None
    return found if found <= MOST else None
