"""In: a value of a cluster file, such as "300GB/s,3us". Out: the value, or what would be right.
Does not know the keys (sections.py does) and does not read a file."""

from __future__ import annotations

import argparse
import difflib
import re
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator

from codescent.base.amounts import of_bytes, of_rate, of_seconds
from codescent.base.sizes import memory_size, size_bytes
from codescent.clusters.cluster import OVERLAPS
from codescent.clusters.link import PER_SECOND, CurvePoint, Link

LINK = 'must be a bandwidth and a latency, such as "300GB/s,3us" or "200gbit,5us"'
RATE = 'must be a bandwidth, such as "2039GB/s"'
MEMORY_RATES = (1e8, 1e14)
"""The least and the most bytes per second of the memory of a device."""
NODE_RATES = (1e7, 2e13)
"""Those of a link inside a node. The fastest one of 2025 has 1.8e12 in both directions."""
CARD_RATES = (1e4, 2e12)
"""Those of a network card."""
PEAKS = (1e8, 1e17)
"""The least and the most FLOP/s of a device."""
MOST_LATENCY_S = 10.0
CURVE = 'must be two or more points, each a message and its bandwidth, such as [["64KiB", "1GB/s"], ["1MiB", "5GB/s"]]'
LONG_BYTES, LEAST_SHORT = 1 << 20, 1.0
"""Of a curve: from these bytes on, a message has a bandwidth in the range of its link. Shorter ones have latencies."""
_ONLY_LATENCY = re.compile(rf"[\s,]*[\d.]+\s*({'|'.join(PER_SECOND)})\s*", re.ASCII | re.IGNORECASE)


def _read(text: str, form: str, rates: tuple[float, float]) -> Link:
    """A link or a rate. Its range tells bits from bytes where the value is in the wrong one."""
    try:
        link = Link.parse(text)
    except ValueError:
        missing = "has no bandwidth; " if _ONLY_LATENCY.fullmatch(text) else ""
        raise ValueError(f"{missing}{form}") from None
    if rates[0] <= link.bytes_per_s <= rates[1]:
        return link
    meant, factor = ("bytes", 8) if "bit" in text.lower() else ("bits", 1 / 8)
    raise ValueError(
        f"that is {of_rate(link.bytes_per_s, 'B/s')}, or {of_rate(link.bytes_per_s * factor, 'B/s')} if {meant} are "
        f"meant; must be {of_rate(rates[0], 'B/s')} to {of_rate(rates[1], 'B/s')}"
    )


def _check_link(text: str, rates: tuple[float, float]) -> str:
    link = _read(text, LINK, rates)
    if link.latency_s > MOST_LATENCY_S:
        raise ValueError(f"the latency is {of_seconds(link.latency_s)}; must be at most {of_seconds(MOST_LATENCY_S)}")
    return text


def curve_of(points: list[list[str]]) -> tuple[CurvePoint, ...]:
    """The points of a curve that was checked."""
    return tuple(CurvePoint(size_bytes(size), Link.parse(rate).bytes_per_s) for size, rate in points)


def _check_curve(points: list[list[str]], rates: tuple[float, float]) -> list[list[str]]:
    """No points, or two and more, of messages that are longer from point to point."""
    if any(len(point) != 2 for point in points) or len(points) == 1:
        raise ValueError(CURVE)
    for number, (size, rate) in enumerate(points):
        try:
            message_bytes = size_bytes(size)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"point {number + 1}: {error}") from None
        if "," in rate:
            raise ValueError(f'point {number + 1}: "{rate}" {RATE}: that of a message has its latency in it')
        least = rates[0] if message_bytes >= LONG_BYTES else LEAST_SHORT
        try:
            _read(rate, RATE, (least, rates[1]))
        except ValueError as error:
            raise ValueError(f'point {number + 1}: "{rate}": {error}') from None
    found = curve_of(points)
    for number, (low, high) in enumerate(zip(found, found[1:]), 2):
        if high.message_bytes <= low.message_bytes:
            sizes = f"{of_bytes(high.message_bytes)} after {of_bytes(low.message_bytes)}"
            raise ValueError(f"point {number}: {sizes}; must be longer messages from point to point")
    return points


def _check_bandwidth(text: str) -> str:
    if "," in text:
        raise ValueError(RATE)
    _read(text, RATE, MEMORY_RATES)
    return text


def _check_memory(text: str) -> str:
    try:
        memory_size(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    return text


def _check_peak(value: float) -> float:
    if not PEAKS[0] <= value <= PEAKS[1]:
        least, most = (of_rate(peak, "FLOP/s") for peak in PEAKS)
        raise ValueError(f"must be FLOP/s, {least} to {most}; 312 TFLOP/s are 312e12")
    return value


def _check_overlaps(values: list[str]) -> list[str]:
    for value in values:
        if value not in OVERLAPS:
            near = difflib.get_close_matches(value, OVERLAPS, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(OVERLAPS)}"
            raise ValueError(f'"{value}" is no trait of this kind; {hint}')
    return values


def _check_band(values: list[float]) -> list[float]:
    if len(values) != 2 or not 0 < values[0] <= values[1]:
        raise ValueError("must be two numbers above 0, the smaller one first, such as [0.8, 1.5]")
    return values


NodeLink = Annotated[str, AfterValidator(partial(_check_link, rates=NODE_RATES))]
CardLink = Annotated[str, AfterValidator(partial(_check_link, rates=CARD_RATES))]
NodeCurve = Annotated[list[list[str]], AfterValidator(partial(_check_curve, rates=NODE_RATES))]
CardCurve = Annotated[list[list[str]], AfterValidator(partial(_check_curve, rates=CARD_RATES))]
Bandwidth = Annotated[str, AfterValidator(_check_bandwidth)]
Memory = Annotated[str, AfterValidator(_check_memory)]
Peak = Annotated[float, AfterValidator(_check_peak)]
Overlaps = Annotated[list[str], AfterValidator(_check_overlaps)]
Band = Annotated[list[float], AfterValidator(_check_band)]
NumberFormat = Literal["", "fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
