"""In: configs with overrides, as words of a command line. Out: the learning rates of their steps, to be drawn.
Does not draw (report/rate_figure.py does) and does not start a run. It does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from codescent import preflight
from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.rate_schedules import learning_rate, of_optimizer
from codescent.config.sections import Config
from codescent.verbs.arguments import OVERRIDE

if TYPE_CHECKING:
    from codescent.report.rate_figure import RateCurve

POINTS = 600
"""Steps of a curve that are computed, beside those where a phase begins."""


def rate_curves(words: Sequence[str]) -> list[RateCurve]:
    """The curve of each config.

    Args:
        words: after --schedule: configs, each followed by its overrides.

    Raises:
        UserError: all problems of the words and the configs.
    """
    problems: list[str] = []
    curves = []
    for name, *overrides in _configs(words):
        try:
            if OVERRIDE.match(name):
                raise UserError(f"--schedule {name}: is an override; give it behind a config")
            curves.append(_curve(" ".join([name, *overrides]), load(name, overrides).config))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return curves


def _configs(words: Sequence[str]) -> list[list[str]]:
    """Each config with its overrides."""
    found: list[list[str]] = []
    for word in words:
        if found and OVERRIDE.match(word):
            found[-1].append(word)
        else:
            found.append([word])
    return found


def _curve(name: str, config: Config) -> RateCurve:
    from codescent.report.rate_figure import RateCurve  # matplotlib

    num_steps, workers = _steps(config), _workers(config)
    numbers = sorted(set(_shown(config, num_steps)))
    rates = [learning_rate(config.optimizer, num_steps, workers, number) for number in numbers]
    return RateCurve(name, config.optimizer.schedule, num_steps, [number + 1 for number in numbers], rates)


def _steps(config: Config) -> int:
    """The steps of the run; those of epochs are known once the data is prepared."""
    if config.train.num_epochs is None:
        return config.train.num_steps
    if (dataset := preflight.prepared(config)) is None:
        raise UserError(
            f"train.num_epochs = {config.train.num_epochs:g}: the steps are unknown until the data is prepared, which "
            "`codescent train` does first; to draw the schedule now, give train.num_steps"
        )
    return preflight.settled(config, dataset).train.num_steps


def _workers(config: Config) -> int:
    """The workers by which the rates are multiplied. Only then the layout counts."""
    if config.optimizer.scale_learning_rate == "none":
        return 1
    return preflight.plan_of(config, config.parallel.ranks).scale_ranks


def _shown(config: Config, num_steps: int) -> Iterator[int]:
    """Steps, from 0: evenly spaced ones, the first, the last, and those beside which the curve has a corner."""
    count = min(POINTS, num_steps)
    yield from (number * (num_steps - 1) // max(1, count - 1) for number in range(count))
    optimizer = config.optimizer
    end = num_steps if optimizer.decay_steps is None else optimizer.decay_steps
    corners = (optimizer.warmup_steps, of_optimizer(optimizer).begins(optimizer, end), end)
    for corner in corners:
        if corner is not None:
            yield from (number for number in (corner - 1, corner, corner + 1) if 0 <= number < num_steps)
