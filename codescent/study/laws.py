"""In: numbers of workers, and seconds of each repeat. Out: laws of scaling fitted to them, with intervals.
Does not choose the points (evaluate.py does). Each law is linear in its parameters: its fit has a closed form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codescent.base.amounts import of_measured, of_measured_share, of_share
from codescent.base.counted import counted
from codescent.results import Interval
from codescent.results.statistics import LEVEL, RESAMPLES, Values
from codescent.study.result import Fit

CURVE = 64
"""Numbers of workers, at most, at which a curve is given between the measured ones."""


@dataclass(frozen=True)
class Law:
    """A law: `terms` of the number of workers p, whose weighted sum is `measured`.

    Attributes:
        name: as in `Fit`.
        terms: p [points] to [points, terms].
        measured: p and throughput X [.., points] to the left side of the law.
        throughput: p and left side to X: the inverse of `measured`.
        parameters: coefficients [.., terms] to the law's parameters.
        said: the parameters' values in words.
    """

    name: str
    terms: Callable[[Values], Values]
    measured: Callable[[Values, Values], Values]
    throughput: Callable[[Values, Values], Values]
    parameters: Callable[[Values], Mapping[str, Values]]
    said: Callable[[Mapping[str, Interval]], str]

    @property
    def fewest(self) -> int:
        """Points that a fit needs: one more than parameters."""
        return int(self.terms(np.ones(1)).shape[1]) + 1


def _share(coefficients: Values) -> Mapping[str, Values]:
    return {"serial share": coefficients[..., 0] / coefficients.sum(axis=-1)}


def _amdahl_said(found: Mapping[str, Interval]) -> str:
    share = found["serial share"]
    most = "no limit shows"
    if share.value > 0:
        low, high = (1 / end if end > 0 else math.inf for end in (share.high, share.low))
        most = f"at most {of_measured(1 / share.value, (high - low) / 2)} times as fast as one"
    return f"serial share {_percent(share)}: {most}"


def _gustafson_said(found: Mapping[str, Interval]) -> str:
    share = found["serial share"]
    adds = of_measured_share(1 - share.value, share.half)
    return f"serial share {_percent(share)}: each further worker adds {adds} of one"


def _universal(coefficients: Values) -> Mapping[str, Values]:
    return {
        "contention": coefficients[..., 1] / coefficients[..., 0],
        "coherency": coefficients[..., 2] / coefficients[..., 0],
    }


def _universal_said(found: Mapping[str, Interval]) -> str:
    contention, coherency = found["contention"], found["coherency"]
    best = "no maximum shows"
    if coherency.value > 1e-9:
        # Gunther 2007, equation 4.33: the maximum of the throughput.
        best = f"fastest with {max(1, round(math.sqrt(max(0.0, 1 - contention.value) / coherency.value)))}"
    return f"contention {_percent(contention)}, coherency {_percent(coherency)}: {best}"


AMDAHL = Law(
    # Amdahl 1967: time = serial + parallel / p.
    "Amdahl",
    terms=lambda p: np.stack([np.ones_like(p), 1 / p], axis=-1),
    measured=lambda p, x: 1 / x,
    throughput=lambda p, y: 1 / y,
    parameters=_share,
    said=_amdahl_said,
)
GUSTAFSON = Law(
    # Gustafson 1988: scaled speed-up = serial + (1 - serial) p.
    "Gustafson",
    terms=lambda p: np.stack([np.ones_like(p), p], axis=-1),
    measured=lambda p, x: x,
    throughput=lambda p, y: y,
    parameters=_share,
    said=_gustafson_said,
)
UNIVERSAL = Law(
    # Gunther 2007, equation 4.31: X = X1 p / (1 + contention (p - 1) + coherency p (p - 1)).
    "universal scalability law",
    terms=lambda p: np.stack([np.ones_like(p), p - 1, p * (p - 1)], axis=-1),
    measured=lambda p, x: p / x,
    throughput=lambda p, y: p / y,
    parameters=_universal,
    said=_universal_said,
)


def fitted(law: Law, workers: Sequence[int], speeds: Sequence[Sequence[float]], per: float = 1.0) -> Fit:
    """Fit a law to the medians of the repeats, by least squares of relative deviations, no coefficient negative.

    The interval of a parameter is that of its fits to resampled repeats (LEVEL); it is NaN if a point has one repeat.

    Args:
        law: one of this file.
        workers: their number at each point.
        speeds: throughput of each repeat of each point, in any unit.
        per: throughput of the point to which the speed-up of `curve` refers.
    """
    if len(set(workers)) < law.fewest:
        said = f"too few points: {counted(len(set(workers)), 'number')} of workers, it needs {law.fewest}"
        return Fit(law.name, {}, said)
    p = np.asarray(workers, dtype=np.float64)
    whole = np.array([[float(np.median(values)) for values in speeds]])
    coefficients = _least_squares(law, p, whole)
    single = any(len(values) < 2 for values in speeds)
    resampled = law.parameters(coefficients if single else _least_squares(law, p, _resampled(speeds)))
    found = {}
    for name, value in law.parameters(coefficients).items():
        ends = np.quantile(resampled[name], ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        low, high = (math.nan, math.nan) if single else (float(ends[0]), float(ends[1]))
        found[name] = Interval(float(value[0]), low, high)
    worst = float(np.max(np.abs(law.throughput(p, law.terms(p) @ coefficients[0]) / whole[0] - 1)))
    between = np.unique(np.round(np.geomspace(p.min(), p.max(), CURVE)))
    drawn = np.union1d(between, p)
    curve = law.throughput(drawn, law.terms(drawn) @ coefficients[0]) / per
    points = {int(number): float(speed_up) for number, speed_up in zip(drawn, curve, strict=True)}
    return Fit(law.name, found, f"{law.said(found)}; within {of_share(worst)} of the points", points, worst)


def _resampled(speeds: Sequence[Sequence[float]]) -> Values:
    """Medians of resampled repeats: [RESAMPLES, points]. The same repeats always give the same ones."""
    generator = np.random.default_rng(0)
    columns = []
    for values in map(np.asarray, speeds):
        drawn = values[generator.integers(len(values), size=(RESAMPLES, len(values)))]
        columns.append(np.median(drawn, axis=-1))
    return np.stack(columns, axis=-1)


def _least_squares(law: Law, p: Values, x: Values) -> Values:
    """Non-negative coefficients [fits, terms] for throughputs [fits, points], the first one positive.

    With two or three terms all sets of zero coefficients can be tried: the best feasible one is the solution.
    """
    y = law.measured(p, x)
    rows = law.terms(p)[None] / y[..., None]  # relative deviations: each row says 1
    terms = rows.shape[-1]
    best, least = np.zeros((len(x), terms)), np.full(len(x), np.inf)
    free = range(1, terms) if law is UNIVERSAL else range(terms)
    for number in range(len(free) + 1):
        for zeros in itertools.combinations(free, number):
            kept = [term for term in range(terms) if term not in zeros]
            if not kept:
                continue
            solved = np.einsum("ftp,fp->ft", np.linalg.pinv(rows[..., kept]), np.ones(x.shape))
            residual = ((np.einsum("fpt,ft->fp", rows[..., kept], solved) - 1) ** 2).sum(axis=-1)
            better = (solved >= 0).all(axis=-1) & (residual < least - 1e-15)
            best[better] = 0
            best[np.ix_(better, kept)] = solved[better]
            least = np.where(better, residual, least)
    return best


def _percent(found: Interval) -> str:
    """A share with its interval."""
    value = of_measured_share(found.value, found.half)
    if math.isnan(found.low):
        return value
    low, high = (of_measured(100 * end, 100 * found.half) for end in (found.low, found.high))
    return f"{value} ({low} to {high} %)"
