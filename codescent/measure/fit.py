"""In: seconds of collectives by payload. Out: the latency and the bandwidth of the link that they crossed.
Does not measure. What a collective counts of both is what the price counts (cost/collective_time.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.clusters.link import CurvePoint, Link
from codescent.cost.collective_time import BETWEEN, INSIDE, seconds
from codescent.plan import Collective, Mesh, Traffic, Verb

_EXACT = Software(inside_efficiency=1.0, between_efficiency=1.0, collective_s=0.0, hop_s=0.0)
_FASTEST = Link(math.inf)
_DEVICE = ClusterDevice("", "cpu", 1, 1.0, {"fp32": 1.0})
_AXIS = "dp_replicate"
MOST_ERROR = 0.25
MISSED = 2
"""A line that is more than MOST_ERROR from so many payloads is not the link. From one alone: it was disturbed."""
DIGITS = 4
"""Of a measured number: its spread is wider than the next one."""
NEARER = 0.8
"""A curve has at most this share of the error of the line in the middle. Else collectives differ, and not sizes."""
LARGE_BYTES = 1 << 20
"""From this payload on the error of a fit is told apart."""
ROUNDS, SMALL = 50, 1e-4
"""Of least squares, and the relative error below which a weight grows no more."""
LEAST_SHARE = 1e-3
"""Of the seconds of a small payload: where the bytes of a large one take less, they take nothing that is known."""
Numbers = npt.NDArray[np.float64]


class _Terms(NamedTuple):
    """Of a collective: how often it has the latency of the link, the bytes that a rank sends over it, what it takes
    inside of nodes besides; and what was measured."""

    steps: float
    sent_bytes: float
    inside_s: float
    seconds: float


@dataclass(frozen=True)
class TimedCollective:
    """A collective that was measured.

    Attributes:
        payload_bytes: as in `Traffic`.
        ranks: of its group.
        devices: of them on each node.
        seconds: of one run.
    """

    collective: Collective
    payload_bytes: int
    ranks: int
    devices: int
    seconds: float

    @property
    def link(self) -> str:
        """The slowest link that it crosses."""
        return BETWEEN if self.ranks > self.devices else INSIDE

    def predicted_s(self, link: Link, inside: Link = _FASTEST) -> float:
        """What the price says, with this link as `self.link`. `inside`: of nodes, where the group crosses both."""
        between = link if self.link == BETWEEN else _FASTEST
        cluster = Cluster("", "", _DEVICE, self.devices, 1, inside if self.link == BETWEEN else link, between, _FASTEST)
        record = Traffic(self.collective, _AXIS, self.payload_bytes, "fp32", Verb.STEP, None, "")
        return seconds(record, Mesh(dp_replicate=self.ranks), 0, cluster, _EXACT)[1]


@dataclass(frozen=True)
class LinkFit:
    """A link, perhaps with a curve, and how far its price is from what was measured: `median`, `worst` of all payloads,
    and `worst_large` of those from LARGE_BYTES; relative to what was measured. NaN: there is none."""

    link: Link
    median: float
    worst: float
    worst_large: float


def fit(measured: Sequence[TimedCollective], inside: Link = _FASTEST) -> LinkFit:
    """The link with which the price is nearest to what was measured: latency and bytes add up (Hockney 1994).

    Where the line is more than MOST_ERROR from some payloads, the link has a curve of messages, if this is nearer.

    Relative errors count, so a short message counts as much as a long one. An all-reduce may go around a ring of ranks
    or over a tree of nodes: both are tried.

    Args:
        measured: collectives over the same link, with at least two payloads.
        inside: the link inside of nodes, where the groups cross both.

    Raises ValueError: all have the same payload, so nothing tells latency from bandwidth.
    """
    if len({one.payload_bytes for one in measured}) < 2:
        raise ValueError("one payload alone")
    ways = [*_ways(measured, inside)]
    found = [_errors(measured, _nearest(terms), inside) for terms in ways]
    nearest = min(found, key=lambda one: one.median)
    if sum(_error(one, nearest.link, inside) > MOST_ERROR for one in measured) < MISSED:
        return nearest
    curves = (_errors(measured, on_curve(nearest.link, _curve(terms)), inside) for terms in ways)
    curve = min(curves, key=lambda one: one.median)
    return curve if curve.median < NEARER * nearest.median else nearest


def _curve(terms: Sequence[_Terms]) -> tuple[CurvePoint, ...]:
    """What a message takes, by its bytes: several of about one size are one point, the one in the middle."""
    near: dict[int, list[CurvePoint]] = {}
    for one in terms:
        message_bytes, seconds = one.sent_bytes / one.steps, (one.seconds - one.inside_s) / one.steps
        if message_bytes >= 1.0 and seconds > 0.0:
            near.setdefault(round(math.log2(message_bytes)), []).append(
                CurvePoint(message_bytes, message_bytes / seconds)
            )
    return tuple(_middle(near[size]) for size in sorted(near))


def _middle(points: Sequence[CurvePoint]) -> CurvePoint:
    """Whole bytes, as a file has them."""
    message_bytes, bytes_per_s = (statistics.median(numbers) for numbers in zip(*points))
    return CurvePoint(float(round(message_bytes)), float(f"{bytes_per_s:.{DIGITS}g}"))


def on_curve(link: Link, curve: Sequence[CurvePoint]) -> Link:
    """The link with a curve, as a file takes it: no message is faster than the latency, or far above the bandwidth.

    A line that is far from short messages may have a latency that is longer than they are.
    """
    if len(curve) < 2:
        return link
    latency_s = min(link.latency_s, *(point.seconds for point in curve))
    bytes_per_s = max(link.bytes_per_s, *(point.bytes_per_s / 2 for point in curve))
    return Link(bytes_per_s, latency_s, curve=tuple(curve))


def line(points: Sequence[tuple[float, float]]) -> Link:
    """Seconds by bytes as a latency and a bandwidth. Raises ValueError: more bytes take no longer."""
    return _nearest([_Terms(1.0, amount, 0.0, seconds) for amount, seconds in points])


def _ways(measured: Sequence[TimedCollective], inside: Link) -> Iterator[list[_Terms]]:
    """The terms of each collective, for each way of an all-reduce: long latencies go over a tree, short ones around."""
    inside = replace(inside, bytes_per_s=math.inf, curve=())
    for tried_s in (1e3, 1e-12):
        found = []
        for one in measured:
            at_s, twice_s = (one.predicted_s(Link(math.inf, times * tried_s), inside) for times in (1.0, 2.0))
            steps = round((twice_s - at_s) / tried_s)
            sent_bytes = one.predicted_s(Link(1.0), inside) - one.predicted_s(Link(math.inf), inside)
            found.append(_Terms(steps, sent_bytes, max(0.0, at_s - steps * tried_s), one.seconds))
        yield found


def _nearest(terms: Sequence[_Terms]) -> Link:
    """The least sum of relative errors, by least squares whose weights follow the errors. Neither number is below 0.

    A sum of errors, not of squares: between short and long messages a library changes its way, and a line fits neither.
    """
    rows = np.array([(one.steps / one.seconds, one.sent_bytes / one.seconds) for one in terms])
    wanted = np.array([1.0 - one.inside_s / one.seconds for one in terms])
    weights = np.ones(len(terms))
    for _ in range(ROUNDS):
        found = _least_squares(rows * weights[:, None], wanted * weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(rows @ found - wanted), SMALL))
    if not found[1] * max(one.sent_bytes for one in terms) > LEAST_SHARE * min(one.seconds for one in terms):
        raise ValueError("large payloads take no longer than small ones")
    return Link(float(1.0 / found[1]), float(found[0]))


def _least_squares(rows: Numbers, wanted: Numbers) -> Numbers:
    """Both numbers, or where one would be below 0 the other one alone."""
    found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    if found.min() >= 0:
        return np.asarray(found)
    alone = [float(column @ wanted / (column @ column)) for column in rows.T]
    left = [float(np.abs(column * max(0.0, one) - wanted).sum()) for column, one in zip(rows.T, alone, strict=True)]
    kept = int(np.argmin(left))
    return np.array([max(0.0, one) if number == kept else 0.0 for number, one in enumerate(alone)])


def _error(one: TimedCollective, link: Link, inside: Link) -> float:
    return abs(one.predicted_s(link, inside) / one.seconds - 1.0)


def _errors(measured: Sequence[TimedCollective], link: Link, inside: Link) -> LinkFit:
    errors = [_error(one, link, inside) for one in measured]
    large = [error for one, error in zip(measured, errors, strict=True) if one.payload_bytes >= LARGE_BYTES]
    return LinkFit(link, statistics.median(errors), max(errors), max(large, default=math.nan))
