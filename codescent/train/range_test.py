"""In: a config, this process's rank. Out: the training loss after steps with rising learning rates.
Does not write a run folder or a checkpoint, and does not judge the losses (verbs/learning_rate.py does).

The learning-rate range test of Smith 2017, "Cyclical Learning Rates for Training Neural Networks", 3.3, with
learning rates that rise exponentially, as in fastai."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from codescent.base.agreement import together
from codescent.base.device_kinds import CPU
from codescent.base.ending import ends_soon
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.progress import ENDED
from codescent.base.rank import Rank
from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Config
from codescent.plan.line import line_of
from codescent.train.assemble import assemble
from codescent.train.choices import choose
from codescent.train.execute import Executor
from codescent.train.machine import describe
from codescent.train.open import connect, open_data
from codescent.train.references import refuse_without_run
from codescent.train.stop import STOPS, StopRequest

STEPS = 100
LOWEST, HIGHEST = 1e-7, 10.0
"""The learning rates of the first and of the last step."""
DIVERGED = 4.0
"""The test ends when the mean of `RECENT` losses is so many times its lowest value."""
RECENT = 5
SHOWN_EVERY = 5
"""Steps between printed lines."""


@dataclass
class RangeTest:
    """The result of a range test, equal on all ranks.

    Attributes:
        rates: values of optimizer.learning_rate, one per step.
        losses: the training loss after the step with each rate: that of the next batch.
        ending: why the test ended before its last step; "": it did not.
        exit_code: 0, or 128 + the number of the signal that stopped the test.
        ran: what was run on what, in a line.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ending: str = ""
    exit_code: int = 0
    ran: str = ""

    def diverged(self) -> bool:
        """Whether the last losses are far above the lowest ones."""
        if len(self.losses) <= RECENT:
            return False
        means = [sum(self.losses[end - RECENT : end]) / RECENT for end in range(RECENT, len(self.losses) + 1)]
        return means[-1] > DIVERGED * min(means)


def range_test(config: Config, this_rank: Rank) -> RangeTest:
    """Train from the initial weights with rising learning rates, as one of the ranks. The weights are not kept.

    The layout, the batches and the optimizer are those of the config. Warm-up and decay are left out. All ranks know
    the loss after each step: the command refuses replicas that train apart.

    Raises:
        UserError: on every rank: a run cannot begin with this config, data or machine.
    """
    with connect(config, this_rank) as world:
        config, plan, dataset, _ = open_data(config, world, None, resume=False)
        refuse_without_run(plan)
        compiles = choose(config, plan, world, {})["compile"]["choice"]
        with (
            StopRequest(alone=this_rank.world_size == 1, does=STOPS) as stop,
            closing(assemble(config, plan, world, dataset, 0, stop, compiles)) as trainer,
            ends_soon(this_rank.world_size),
        ):
            found = _walk(trainer.executor, config, plan.scale_ranks, shown=world.is_first)
            facts = describe(world.device, 1, 1)
            found.ran = f"{line_of(plan)}; on {facts['processor' if world.device.type == CPU else 'device']}"
            if found.ending == STOPPED:
                received = next(filter(None, together(UserError, stop.received)))
                found.exit_code = received["exit_code"]
            world.at(ENDED)
            return found


STOPPED = "it was asked to stop"


def rates() -> Iterator[float]:
    """The learning rates, as values of optimizer.learning_rate: each is the one before times the same factor."""
    factor = (HIGHEST / LOWEST) ** (1 / (STEPS - 1))
    return (LOWEST * factor**step for step in range(STEPS))


def _walk(executor: Executor, config: Config, workers: int, *, shown: bool) -> RangeTest:
    """Take the steps. The loss of a step is computed before its update, so it belongs to the rate of the step before.

    Args:
        workers: number of data-parallel ranks, for optimizer.scale_learning_rate.
        shown: whether this rank prints the losses.
    """
    found = RangeTest()
    before = math.nan
    if shown:
        kind, rows = config.optimizer.kind, ("  step  learning rate        loss",)
        say([f"{STEPS} steps of {kind} with learning rates from {LOWEST:g} to {HIGHEST:g}; no run is written", *rows])
    for number, rate in enumerate([*rates(), HIGHEST]):
        constant = {"learning_rate": rate, "min_learning_rate": 0.0, "schedule": "constant", "warmup_steps": 0}
        optimizer = config.optimizer.model_copy(update=constant)
        result = executor.step(number, learning_rate(optimizer, STEPS, workers, number))
        if result.stop:
            found.ending = STOPPED
        elif not math.isfinite(result.train_loss):
            found.ending = f"the loss is {result.train_loss}"
        elif number:
            found.rates.append(before)
            found.losses.append(result.train_loss)
            if found.diverged():
                found.ending = f"the loss is more than {DIVERGED:g} times its lowest value"
        if shown and number and (number % SHOWN_EVERY == 1 or found.ending or number == STEPS):
            say([f"{number:>6}  {before:>13.2e}  {result.train_loss:>10.4f}"])
        if found.ending:
            break
        before = rate
    return found
