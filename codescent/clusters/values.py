"""In: a value of a cluster file, such as "300GB/s,3us". Out: the value, or what would be right.
Does not know the keys (sections.py does) and does not read a file."""

from __future__ import annotations

import argparse
import difflib
import re
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator

from codescent.base.amounts import of_rate, of_seconds
from codescent.base.sizes import memory_size
from codescent.clusters.cluster import OVERLAPS
from codescent.clusters.link import PER_SECOND, Link

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
Bandwidth = Annotated[str, AfterValidator(_check_bandwidth)]
Memory = Annotated[str, AfterValidator(_check_memory)]
Peak = Annotated[float, AfterValidator(_check_peak)]
Overlaps = Annotated[list[str], AfterValidator(_check_overlaps)]
Band = Annotated[list[float], AfterValidator(_check_band)]
NumberFormat = Literal["", "fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
