"""In: plans with their clusters, and measured seconds of a step. Out: the constants of a software that explain them.
Does not measure, and does not read runs (those that call it do)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.lanes import StageLanes, lanes_of
from codescent.cost.price import Price, price
from codescent.cost.time_parts import TimeParts
from codescent.plan import Plan

NOISE = 0.06
"""Standard deviation of the logarithm of a measured time, relative to a perfect prediction."""
OUTLIER = 2.0
"""Residuals of more standard deviations count less, by the square: a run that the model does not explain has hardly a
part in its constants (Huber 1981, "Robust Statistics", section 4.8: redescending estimates)."""
ROUNDS = 4
LONGEST = 0.7
"""The longest step of the logarithm of a constant."""
STEP = 1.1
"""By this factor a constant is changed, where its effect is computed from two prices."""
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Constant:
    """A number of `Software` that can be fitted.

    Attributes:
        name: of its field.
        parts: the parts of a price that are in proportion to it; none: two prices are compared.
        sense: -1: they fall in proportion to it.
        spread: standard deviation of its logarithm, before anything is measured.
    """

    name: str
    parts: tuple[str, ...]
    sense: int
    spread: float


CONSTANTS = (
    Constant("product_efficiency", ("products_s", "attention_s"), -1, 0.2),
    Constant("host_s", (), 1, 0.8),
    Constant("between_efficiency", ("between_s",), -1, 0.5),
    Constant("inside_efficiency", ("inside_s",), -1, 0.4),
    Constant("attention_efficiency", ("attention_s",), -1, 0.3),
    Constant("memory_efficiency", ("moved_s", "update_s"), -1, 0.3),
    Constant("step_s", ("step_s",), 1, 0.5),
    Constant("microbatch_s", ("microbatch_s",), 1, 0.7),
)
"""Most are known to a third. What a host does beside operators is known to a factor of two."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run to fit with. `software`: its traits, with the constants to begin with. `weight`: of its residual."""

    plan: Plan
    cluster: Cluster
    software: Software
    step_s: float
    weight: float = 1.0

    @cached_property
    def lanes(self) -> StageLanes:
        """Of its plan."""
        return lanes_of(self.plan.computing)

    def priced(self, changes: Vector, constants: Sequence[Constant]) -> Price:
        """Its price with changed constants. `changes` [constants]: logarithms of factors."""
        return price(self.plan, self.cluster, changed(self.software, changes, constants), self.lanes)


def changed(software: Software, changes: Vector, constants: Sequence[Constant]) -> Software:
    """The software with each constant times the exponential of its change."""
    factors = {one.name: getattr(software, one.name) * float(np.exp(change)) for one, change in zip(constants, changes)}
    return replace(software, **factors)


@dataclass(frozen=True)
class Fitted:
    """Constants that were fitted.

    Attributes:
        constants: which.
        changes: [constants], logarithms of factors.
        residuals: [runs], logarithms of measured time over predicted.
        effects: [runs, constants], derivatives of the logarithm of the predicted time.
        weights: [runs].
    """

    constants: tuple[Constant, ...]
    changes: Vector
    residuals: Vector
    effects: Vector
    weights: Vector

    def software(self, start: Software) -> Software:
        """The software whose constants these are. `start`: with which the fit began."""
        return changed(start, self.changes, self.constants)

    def left_out_residuals(self, runs: Sequence[MeasuredRun]) -> Vector:
        """[runs], logarithms of measured time over predicted, each with the constants that the others give."""
        predicted = [run.priced(self.without([at]), self.constants).step_s for at, run in enumerate(runs)]
        measured = [run.step_s for run in runs]
        return np.asarray(np.log(np.array(measured) / np.array(predicted)), dtype=np.float64)

    def without(self, left_out: Sequence[int]) -> Vector:
        """The changes that all runs but these give: one more step from the fit with all of them."""
        stays = np.ones(len(self.residuals), dtype=bool)
        stays[list(left_out)] = False
        return self.changes + _step(
            self.constants, self.changes, self.residuals[stays], self.effects[stays], self.weights[stays]
        )


def fit(runs: Sequence[MeasuredRun], constants: Sequence[Constant] = CONSTANTS) -> Fitted:
    """The constants with the highest probability: those of the start are known to their `spread`.

    Residuals are logarithms: a prediction that is twice as long errs as much as one that is half as long.
    """
    changes = np.zeros(len(constants))
    weights = np.array([run.weight for run in runs])
    residuals, effects = np.zeros(len(runs)), np.zeros((len(runs), len(constants)))
    for turn in range(ROUNDS + 1):
        for number, run in enumerate(runs):
            found = run.priced(changes, constants)
            residuals[number] = np.log(run.step_s / found.step_s)
            if turn < ROUNDS:
                effects[number] = _effects(run, found, changes, constants)
        if turn < ROUNDS:
            changes = changes + _step(constants, changes, residuals, effects, weights)
    return Fitted(tuple(constants), changes, residuals, effects, weights)


def _step(
    constants: Sequence[Constant], changes: Vector, residuals: Vector, effects: Vector, weights: Vector
) -> Vector:
    """A step of Gauss and Newton, with outliers that count less."""
    noise = np.maximum(1.0, np.abs(residuals) / (OUTLIER * NOISE)) ** 2
    scale = weights / (NOISE**2 * noise)
    prior = np.array([one.spread**-2 for one in constants])
    normal = effects.T @ (effects * scale[:, None]) + np.diag(prior)
    step = np.linalg.solve(normal, effects.T @ (scale * residuals) - prior * changes)
    return np.asarray(np.clip(step, -LONGEST, LONGEST), dtype=np.float64)


def most_telling(runs: Sequence[MeasuredRun], most: int) -> tuple[Constant, ...]:
    """The constants that change the predictions of these runs most, within their spread: not what was measured."""
    unchanged = np.zeros(len(CONSTANTS))
    effects = np.array([_effects(run, run.priced(unchanged, CONSTANTS), unchanged, CONSTANTS) for run in runs])
    telling = np.abs(effects).mean(axis=0) * np.array([one.spread for one in CONSTANTS])
    return tuple(CONSTANTS[number] for number in sorted(np.argsort(-telling)[:most]))


def _effects(run: MeasuredRun, found: Price, changes: Vector, constants: Sequence[Constant]) -> Vector:
    """What each constant does to the time. Where stages wait for one another, they wait in proportion."""
    computed = found.step_s - found.parts.bubble_s
    effects = []
    for number, one in enumerate(constants):
        if one.parts:
            effects.append(one.sense * _sum(found.parts, one.parts) / computed)
            continue
        other = changes.copy()
        other[number] += np.log(STEP)
        effects.append(float(np.log(run.priced(other, constants).step_s / found.step_s) / np.log(STEP)))
    return np.array(effects)


def _sum(parts: TimeParts, names: Sequence[str]) -> float:
    return float(sum(getattr(parts, name) for name in names))
