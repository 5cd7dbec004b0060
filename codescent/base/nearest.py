"""In: a number, and a divisor or factor that does not fit it. Out: the nearest valid numbers, for error messages.
Does not raise errors and knows no key of the config."""

from __future__ import annotations

import math


def nearest_divisors(value: int, wanted: float) -> list[int]:
    """The largest divisor of `value` below `wanted` and the smallest above it, as far as they exist."""
    small = [number for number in range(1, math.isqrt(value) + 1) if value % number == 0]
    divisors = [*small, *(value // number for number in small)]
    below = max((number for number in divisors if number < wanted), default=None)
    above = min((number for number in divisors if number > wanted), default=None)
    return [number for number in (below, above) if number is not None]


def in_words(numbers: list[int]) -> str:
    """The numbers as text, joined with "or"."""
    return " or ".join(map(str, numbers))


def near_divisors(value: int, wanted: float) -> str:
    """`nearest_divisors` in words."""
    return in_words(nearest_divisors(value, wanted))


def near_multiples(value: int, factor: int) -> str:
    """The nearest positive multiples of `factor` at or below and at or above `value`, in words."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return in_words([number for number in (below, above) if number])
