"""In: a text such as "49mbit,0.2ms". Out: `Link`: bytes per second and latency of a network card or a link.
Does not simulate what travels (cost/network.py does) and does not measure."""

from __future__ import annotations

import math
import re
from bisect import bisect
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

_OF_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
RATES = {**_OF_BYTES, **{f"{unit}it": bytes_per_s / 8 for unit, bytes_per_s in _OF_BYTES.items()}}
"""Bytes per second of each unit of a rate, in lower case: bits as tc(8) writes them, or bytes (B)."""
MOST = 1e9
"""No rate is larger in GB a second, no latency in its unit."""
PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""How many of each unit of a latency a second has."""
_LINK = re.compile(r"([\d.]+)\s*([kmgt]?(?:bit|b))(?:/s)?(?:\s*,\s*([\d.]+)\s*(us|ms|s))?", re.ASCII | re.IGNORECASE)


class CurvePoint(NamedTuple):
    """A message that was measured: its bytes, and its bytes per second from its begin to its end, latency included."""

    message_bytes: float
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        """Of the message."""
        return self.message_bytes / self.bytes_per_s

    def later(self, seconds: float) -> CurvePoint:
        """The same message, which takes so much longer."""
        return self._replace(bytes_per_s=self.message_bytes / (self.seconds + seconds)) if seconds else self


@dataclass(frozen=True)
class Link:
    """The network card of a host.

    Attributes:
        bytes_per_s: payload that a card sends, and at the same time receives: headers are not counted.
        latency_s: from a card to another one like it, beside the time of the bytes. Each has half of it.
        queue_s: a small message waits so long behind others, where the card is busy. The default: it overtakes them.
        curve: messages that were measured, each longer than the one before: where no line of latency and bandwidth is
            near to them. None is faster than the latency. Empty: the line holds for all.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    queue_s: float = 0.0
    curve: tuple[CurvePoint, ...] = ()

    def seconds(self, message_bytes: float) -> float:
        """Of one message, whose latency is in it."""
        return self.latency_s + self.moved_s(message_bytes)

    def moved_s(self, sent_bytes: float, messages: float = 1) -> float:
        """Seconds of bytes in so many messages of one size, beside the latency of each."""
        if not self.curve:
            return sent_bytes / self.bytes_per_s
        return messages * (self._on_curve_s(sent_bytes / messages) - self.latency_s)

    def _on_curve_s(self, message_bytes: float) -> float:
        """Between two points the logarithms of bytes and seconds are on a line. Below the first one the seconds fall to
        the latency; above the last one they grow with the bandwidth."""
        first, last = self.curve[0], self.curve[-1]
        if message_bytes <= first.message_bytes:
            share = message_bytes / first.message_bytes
            return self.latency_s * (1.0 - share) + first.seconds * share
        if message_bytes >= last.message_bytes:
            return last.seconds + (message_bytes - last.message_bytes) / self.bytes_per_s
        at = bisect(self.curve, (message_bytes,))
        low, high = self.curve[at - 1], self.curve[at]
        share = math.log(message_bytes / low.message_bytes) / math.log(high.message_bytes / low.message_bytes)
        return low.seconds * math.pow(high.seconds / low.seconds, share)

    @property
    def fastest(self) -> Link:
        """A link without latency on which no message takes longer than on this one."""
        return Link(max(self.bytes_per_s, *(point.bytes_per_s for point in self.curve), 0.0))

    def shared(self, factor: float) -> Link:
        """So many of these links as one: a message is cut into as many pieces, which leave together. A factor below 1
        is a share of a link."""
        curve = tuple(CurvePoint(factor * one.message_bytes, factor * one.bytes_per_s) for one in self.curve)
        return replace(self, bytes_per_s=factor * self.bytes_per_s, curve=curve)

    @property
    def takes_time(self) -> bool:
        """Whether messages over it take any time: see `AT_ONCE`."""
        return self.bytes_per_s < math.inf or self.latency_s > 0

    @classmethod
    def parse(cls, text: str, latency_s: float = 0.0) -> Link:
        """Read a text such as "49mbit,0.2ms", "6.12MB/s". Without a latency it has `latency_s`.

        Raises ValueError, which names the forms, for any other text.
        """
        found = _LINK.fullmatch(text.strip())
        rate, latency = (_number(found[1]) * RATES[found[2].lower()], _number(found[3])) if found else (math.nan, 0.0)
        if found is None or not (0 < rate <= MOST * RATES["gb"] and latency <= MOST):
            raise ValueError(
                f"'{text}' is no link: it is a rate above 0 in kbit, mbit, gbit, tbit, kB, MB, GB or TB a second, and "
                "a latency in us, ms or s, such as 49mbit,0.2ms or 6.12MB/s"
            )
        return cls(rate, latency_s if found[3] is None else latency / PER_SECOND[found[4].lower()])

    def text(self) -> str:
        """The text that `parse` reads as this link without its curve, such as "300GB/s,3us".

        Raises ValueError: it has `queue_s`, which no text says.
        """
        if self.queue_s:
            raise ValueError("a link with queue_s has no text")
        return rate_text(self.bytes_per_s) + (f",{_latency_text(self.latency_s)}" if self.latency_s else "")


AT_ONCE = Link(math.inf)
"""Nothing is known of a link: what it sends is there at once. Whoever shows a time says so."""


def rate_text(bytes_per_s: float) -> str:
    """The text of a rate, such as "2039GB/s", which `Link.parse` reads as the same number."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        number = _digits(bytes_per_s, power)
        if float(number) >= 1 and float(number) * RATES[unit.lower()] == bytes_per_s:
            return f"{number}{unit}/s"
    return f"{_digits(bytes_per_s)}B/s"


def _latency_text(latency_s: float) -> str:
    for unit, power in (("s", 0), ("ms", -3), ("us", -6)):
        number = _digits(latency_s, power)
        if float(number) >= 1 and float(number) / PER_SECOND[unit] == latency_s:
            return number + unit
    return f"{_digits(latency_s)}s"


def _digits(value: float, power: int = 0) -> str:
    """All digits of a value divided by ten to the `power`, without an exponent."""
    return format(Decimal(repr(float(value))).scaleb(-power).normalize(), "f")


def _number(text: str | None) -> float:
    """The number of a text; NaN: it is none."""
    try:
        return float(text or 0)
    except ValueError:  # such as 1.2.3
        return math.nan
