"""In: a number of bytes, seconds or operations, a share. Out: the number as people read it, with its unit.
Does not compute. Numbers that are no numbers (None, NaN) become NOTHING."""

from __future__ import annotations

import math

NOTHING = "–"
"""What stands for a number that is not known."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def of_bytes(number: float | None) -> str:
    """Such as "1.50 GiB", "12 bytes"."""
    if number is None or not math.isfinite(number):
        return NOTHING
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"


def of_seconds(number: float | None) -> str:
    """Such as "1.53 s", "12.3 ms", "45 µs", "3.2 min"; three digits."""
    if number is None or not math.isfinite(number):
        return NOTHING
    size = abs(number)
    for least, scale, unit in ((3600.0, 1 / 3600, "h"), (120.0, 1 / 60, "min"), (1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if size >= least:
            return f"{three_digits(number * scale)} {unit}"
    return f"{number * 1e6:.0f} µs" if size >= 5e-7 else "0 s"


def of_rate(number: float | None, unit: str) -> str:
    """Such as "12.3 GFLOP/s" for the unit "FLOP/s"; three digits and a prefix."""
    if number is None or not math.isfinite(number):
        return NOTHING
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{three_digits(number / size)} {prefix}{unit}".rstrip()
    return f"{three_digits(number)} {unit}".rstrip()


def of_share(number: float | None) -> str:
    """Such as "12 %", "3.4 %"; one digit after the point below 10 %."""
    if number is None or not math.isfinite(number):
        return NOTHING
    if number == 0:
        return "0 %"
    return f"{100 * number:.{1 if abs(number) < 0.0995 else 0}f} %"


def of_change(share: float) -> str:
    """A change as a share, such as "+3.1 %", "+312 %"."""
    return f"{100 * share:+.{1 if abs(share) < 1 else 0}f} %"


def of_number(number: float | None) -> str:
    """Such as "13,400", "3.21": three digits that count, and whole numbers above a hundred."""
    if number is None or not math.isfinite(number):
        return NOTHING
    return three_digits(float(f"{number:.4g}"))


def of_measured(value: float | None, half: float = math.nan, least: int = 1) -> str:
    """A measured number down to the digit in which the half width of its interval begins, such as "4,800", "2.2".

    At least `least` digits count, and at most three where they are behind the point. `half`: NaN or 0 give `of_number`.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if not value or not math.isfinite(half) or not half:
        return of_number(value)
    first = math.floor(math.log10(abs(value)))
    place = min(first + 1 - least, max(first - 2, math.floor(math.log10(abs(half)))))
    return f"{round(value, -place):,.{max(0, -place)}f}"


def of_measured_share(value: float | None, half: float = math.nan) -> str:
    """A measured share in per cent, with the digits that its interval allows; else as `of_share`."""
    if value is None or not math.isfinite(half) or not half:
        return of_share(value)
    return f"{of_measured(100 * value, 100 * half)} %"


def three_digits(number: float) -> str:
    """The number with three digits that count; more before the point stay."""
    if number == 0:
        return "0"
    size = abs(float(f"{number:.3g}"))  # 9.999 is shown as 10.0
    return f"{number:,.{max(0, 2 - math.floor(math.log10(size)))}f}"


def rounded(number: float) -> str:
    """A finite number with two digits, such as 1.2e-3."""
    digits, _, exponent = f"{number:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"
