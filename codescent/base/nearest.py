"""In: a number, and a divisor or factor that does not fit it. Out: the nearest valid numbers, for error messages.
Does not raise errors and knows no key of the config."""

from __future__ import annotations

import math
from collections.abc import Iterable


def divisors(value: int) -> list[int]:
    """All divisors of `value`."""
    small = [number for number in range(1, math.isqrt(value) + 1) if value % number == 0]
    return [*small, *(value // number for number in small)]


def nearest(numbers: Iterable[int], wanted: float) -> list[int]:
    """The largest number below `wanted` and the smallest above it, as far as they exist."""
    numbers = list(numbers)
    below = max((number for number in numbers if number < wanted), default=None)
    above = min((number for number in numbers if number > wanted), default=None)
    return [number for number in (below, above) if number is not None]


def nearest_divisors(value: int, wanted: float) -> list[int]:
    """The largest divisor of `value` below `wanted` and the smallest above it, as far as they exist."""
    return nearest(divisors(value), wanted)


def nearest_multiples(value: int, factor: int) -> list[int]:
    """The nearest positive multiples of `factor` at or below and at or above `value`."""
    return [number for number in (value // factor * factor, -(-value // factor) * factor) if number]


def in_words(numbers: list[int]) -> str:
    """The numbers as text, joined with "or"."""
    return " or ".join(map(str, numbers))


def near_divisors(value: int, wanted: float) -> str:
    """`nearest_divisors` in words."""
    return in_words(nearest_divisors(value, wanted))


def near_multiples(value: int, factor: int) -> str:
    """`nearest_multiples` in words."""
    return in_words(nearest_multiples(value, factor))
