"""In: a number that does not divide. Out: the nearest ones that would, in words, for a refusal.
Does not refuse anything."""

from __future__ import annotations

import math


def near_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` next below and next above `value`."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return f"{below} or {above}" if below else str(above)


def near_divisors(value: int, wanted: int) -> str:
    """The divisors of `value` next below and next above `wanted`."""
    small = [number for number in range(1, math.isqrt(value) + 1) if value % number == 0]
    divisors = [*small, *(value // number for number in small)]
    below = max((number for number in divisors if number < wanted), default=None)
    above = min((number for number in divisors if number > wanted), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)
