"""In: the keys of a run that act every so many steps. Out: what is due at a step, in one table.
Does not do it (loop.py does)."""

from __future__ import annotations

from typing import NamedTuple

from codescent.config.sections import Config
from codescent.plan import Schedule

ROWS = 100_000
"""The largest number of metrics rows, about, that a run writes with log.metrics_every = auto."""


def steps_between_rows(num_steps: int) -> int:
    """The value of log.metrics_every = auto: num_steps / ROWS, rounded up."""
    return -(-num_steps // ROWS)


def row_every(config: Config) -> int:
    """The number of steps from one row of metrics to the next."""
    return config.log.metrics_every or steps_between_rows(config.train.num_steps)


class Due(NamedTuple):
    """What is due at a step.

    Attributes:
        validation: the model is validated.
        line: rank 0 prints a line, and all ranks send it their times.
        comparison: the ranks compare their copies of tensors.
        save: a checkpoint is written.
    """

    validation: bool
    line: bool
    comparison: bool
    save: bool


class Dues:
    """What is due at a step (from 1).

    Args:
        config: of the run.
        schedule: where replicas agree only after rounds, what was due within one is due at its end.
    """

    def __init__(self, config: Config, schedule: Schedule) -> None:
        train = config.train
        self._schedule, self._num_steps = schedule, train.num_steps
        self._eval_every, self._check_every = train.eval_every, train.check_every
        self._row_every = row_every(config)
        self._log_every, self._save_every, self._saves_last = (
            config.log.every,
            config.checkpoint.every,
            config.checkpoint.last,
        )

    def at(self, step: int, last: int) -> Due:
        """What is due at a step. `last`: the last step of the run."""
        before = self._schedule.agreed_before(step)
        return Due(
            _is_due(step, self._eval_every, self._num_steps),
            _since_agreed(step, self._log_every, last, before),
            _since_agreed(step, self._check_every, last, before),
            (self._saves_last and step == last) or bool(self._save_every and step % self._save_every == 0),
        )

    def row(self, step: int) -> bool:
        """Whether a step has a row of metrics, whatever comes out of it."""
        return step == self._num_steps or step % self._row_every == 0 or self.at(step, self._num_steps).validation

    def anything(self, step: int, last: int) -> bool:
        """Whether something acts at the step, so that its result is needed at once. Within a round nothing does."""
        return step == last or (self._schedule.agrees_after(step) and any(self.at(step, last)))


def _since_agreed(step: int, every: int, last: int, before: int) -> bool:
    """Whether a multiple of `every` is among the steps since the ranks agreed `before`, or `step` is the last one."""
    return bool(every) and (step == last or step // every > before // every)


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether `step` is a multiple of `every` or the last step; False if `every` is 0."""
    return bool(every) and (step == last or step % every == 0)
