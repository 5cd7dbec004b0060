"""In: the section [optimizer], the steps of a run, a step. Out: the learning rate of the step, by a table of schedules.
Does not update weights (train/optimize.py does) and does not draw (report/rate_figure.py does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from codescent.base import own_names
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.config.keys import Only, one_or_own, other_than

if TYPE_CHECKING:
    from codescent.config.optimizer import Optimizer

ScheduleName = Literal["cosine", "linear", "polynomial", "inverse-sqrt", "constant", "wsd", "constant-cooldown"]
"""The values of `optimizer.schedule`: the rows of `SCHEDULES`."""

DecayForm = Literal["1-sqrt", "linear", "cosine"]
"""The values of `optimizer.decay_form`: the rows of `FORMS`."""

MEAN_TIMESCALE = 10_000
"""Steps of `inverse-sqrt` without a warm-up, as in transformers' get_inverse_sqrt_schedule."""

Problem = tuple[tuple[str, ...], str]
"""Keys whose values contradict each other, and the problem (contradictions.py)."""


def _cosine(progress: float) -> float:
    """Loshchilov and Hutter 2017, "SGDR", eq. 5, one period."""
    return 0.5 * (1 + math.cos(math.pi * progress))


FORMS: Mapping[str, Callable[[float], float]] = {
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),  # Hägele et al. 2024, "Scaling Laws and ...", eq. 2
    "linear": lambda progress: 1 - progress,
    "cosine": _cosine,
}
"""How a decay falls: from its progress, 0 to 1, to what is left of it, 1 to 0."""


@dataclass(frozen=True)
class RatePoint:
    """A step after the warm-up, and what its rate depends on.

    Attributes:
        optimizer: the section [optimizer].
        peak: the highest rate of the run, scaled by the workers.
        lowest: the least rate, scaled as `peak`.
        end: the step at which a decay has ended, from 0.
        step: from 0.
    """

    optimizer: Optimizer
    peak: float
    lowest: float
    end: int
    step: int


class RateSchedule:
    """A schedule of the learning rate, after the linear warm-up. This base class keeps the rate constant.

    The base class of schedules of your own: `optimizer.schedule = "mymodule:MySchedule"` (docs/own_names.md). An
    object is made once, without arguments. It keeps nothing from step to step: a resumed run asks for later steps only.

    Attributes:
        reads: the keys of [optimizer] that it reads, beside `learning_rate`, `warmup_steps` and `scale_learning_rate`.
    """

    reads: tuple[str, ...] = ()

    def rate(self, at: RatePoint) -> float:
        """The learning rate of a step that is not in the warm-up."""
        return at.peak

    def begins(self, optimizer: Optimizer, end: int) -> int | None:
        """The first step from which the rate may fall, from 0; None: it never falls. `end`: see `RatePoint`."""
        return None

    def refuse(self, optimizer: Optimizer, num_steps: int | None) -> Iterator[Problem]:
        """Problems of its keys. `num_steps`: of the run; None: the steps of its epochs are not known yet."""
        yield from ()


class InverseSquareRoot(RateSchedule):
    """The rate falls with the square root of the steps, and does not end: Vaswani et al. 2017, eq. 3.

    The offset is that of transformers (`timescale`) and fairseq (timescale = warm-up). The paper counts steps from 1:
    its n warm-up steps are `warmup_steps` = n - 1 and `timescale` = n.
    """

    reads = ("min_learning_rate", "timescale")

    def rate(self, at: RatePoint) -> float:
        """peak / sqrt((step - warm-up + timescale) / timescale), and at least `lowest`."""
        warm_up = at.optimizer.warmup_steps
        scale = at.optimizer.timescale or warm_up or MEAN_TIMESCALE
        return max(at.lowest, at.peak / math.sqrt((at.step - warm_up + scale) / scale))

    def begins(self, optimizer: Optimizer, end: int) -> int | None:
        """After the warm-up."""
        return optimizer.warmup_steps


class Decay(RateSchedule):
    """The rate falls from the end of the warm-up to `decay_steps`, and then stays at its least value.

    Args:
        form: what is left of the decay by its progress, both from 0 to 1.
        more: keys that the form reads.
    """

    def __init__(self, form: Callable[[Optimizer, float], float], *more: str) -> None:
        self.form, self.reads = form, ("min_learning_rate", "decay_steps", *more)

    def rate(self, at: RatePoint) -> float:
        """Between `peak` and `lowest`, by the form."""
        begin = self.begins(at.optimizer, at.end)
        if at.step <= begin < at.end:  # the peak itself, not rounded: a constant run has the same bits
            return at.peak
        progress = min(1.0, max(0, at.step - begin) / max(1, at.end - begin))
        return at.lowest + self.form(at.optimizer, progress) * (at.peak - at.lowest)

    def begins(self, optimizer: Optimizer, end: int) -> int:
        """After the warm-up."""
        return optimizer.warmup_steps

    def refuse(self, optimizer: Optimizer, num_steps: int | None) -> Iterator[Problem]:
        """The decay would have to end in the warm-up. A short trial of a longer run may end there."""
        if optimizer.decay_steps is not None and optimizer.warmup_steps >= optimizer.decay_steps:
            yield (
                ("optimizer.warmup_steps", "optimizer.decay_steps"),
                f"given {optimizer.warmup_steps}, but the decay that follows ends at optimizer.decay_steps "
                f"({optimizer.decay_steps}); must be a whole number from 0 to {optimizer.decay_steps - 1}",
            )


class StableDecay(Decay):
    """The rate stays at its peak, and falls in the last steps: Hu et al. 2024, "MiniCPM", 4.1; Hägele et al. 2024.

    Args:
        length: the steps of the decay, of a run whose decay ends at a step.
        key: the key that decides it.
    """

    def __init__(self, length: Callable[[Optimizer, int], int], key: str) -> None:
        super().__init__(lambda optimizer, progress: FORMS[optimizer.decay_form](progress), key, "decay_form")
        self.length, self.name, self.key = length, key, f"optimizer.{key}"

    def begins(self, optimizer: Optimizer, end: int) -> int:
        """So many steps before the end. A trial that is too short for its warm-up is refused (`refuse`)."""
        return end - self.length(optimizer, end)

    def refuse(self, optimizer: Optimizer, num_steps: int | None) -> Iterator[Problem]:
        """Warm-up and decay need more steps than there are, or the decay would begin after the run."""
        problems = [*self._without_steps(optimizer), *super().refuse(optimizer, num_steps)]
        end = num_steps if optimizer.decay_steps is None else optimizer.decay_steps
        if problems or end is None:
            yield from problems
            return
        ends = "train.num_steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
        warm_up, begin = optimizer.warmup_steps, self.begins(optimizer, end)
        if begin < warm_up:
            yield (
                (self.key, "optimizer.warmup_steps", ends),
                f"a decay of {counted(end - begin, 'step')} and a warm-up of {counted(warm_up, 'step')} "
                f"(optimizer.warmup_steps) are more than the {counted(end, 'step')} of {ends}; give fewer "
                "of one, or more steps",
            )
        elif num_steps is not None and begin >= num_steps:
            yield (
                ("optimizer.decay_steps", "train.num_steps"),
                f"given {end}, so the decay would begin after {counted(begin, 'step')}, but the run has {num_steps} "
                f'(train.num_steps); give at most {num_steps}, or optimizer.schedule = "constant": a later run may go '
                "on from it with this schedule",
            )

    def _without_steps(self, optimizer: Optimizer) -> Iterator[Problem]:
        if getattr(optimizer, self.name) is None:
            yield (
                (self.key, "optimizer.schedule"),
                f'not given, but optimizer.schedule = "{optimizer.schedule}" needs it; give a whole number >= 1',
            )


SCHEDULES: Mapping[ScheduleName, RateSchedule] = {
    "cosine": Decay(lambda _, progress: _cosine(progress)),
    "linear": Decay(lambda _, progress: 1 - progress),
    "polynomial": Decay(lambda optimizer, progress: (1 - progress) ** optimizer.decay_power, "decay_power"),
    "inverse-sqrt": InverseSquareRoot(),
    "constant": RateSchedule(),
    "wsd": StableDecay(lambda optimizer, end: max(1, round(optimizer.decay_share * end)), "decay_share"),
    "constant-cooldown": StableDecay(lambda optimizer, _: optimizer.cooldown_steps or 0, "cooldown_steps"),
}
"""Every schedule by its name. No other code knows the names."""

KEY = "optimizer.schedule"


def of_schedule(key: str) -> Only:
    """The condition of a key of [optimizer] that only some schedules read. One of the user may read it, too."""
    reading = [name for name, schedule in SCHEDULES.items() if key in schedule.reads]
    others = [name for name in SCHEDULES if name not in reading]
    return other_than(KEY, others[0]) if len(others) == 1 else one_or_own(KEY, *reading)


def of_optimizer(optimizer: Optimizer) -> RateSchedule:
    """The schedule that the section names. Raises UserError: a name of the user that stands for none."""
    if optimizer.schedule in SCHEDULES:
        return SCHEDULES[cast(ScheduleName, optimizer.schedule)]
    return own_names.instance(KEY, optimizer.schedule, RateSchedule, needs=("rate",))


def refused_schedule(optimizer: Optimizer, num_steps: int | None) -> Iterator[Problem]:
    """Problems of the schedule and its keys, as far as they are known without running code of the user."""
    if optimizer.schedule in SCHEDULES:
        yield from of_optimizer(optimizer).refuse(optimizer, num_steps)


def unread(optimizer: Optimizer) -> set[str]:
    """The keys that some schedules read, and this one does not."""
    return {key for schedule in SCHEDULES.values() for key in schedule.reads} - set(of_optimizer(optimizer).reads)


def end_of_decay(optimizer: Optimizer, num_steps: int | None) -> int | None:
    """The step at which the decay has ended; None: the schedule has no end, or the steps are not known."""
    if "decay_steps" not in of_optimizer(optimizer).reads:
        return None
    return num_steps if optimizer.decay_steps is None else optimizer.decay_steps


def learning_rate(optimizer: Optimizer, num_steps: int, num_workers: int, step: int) -> float:
    """Learning rate of the step with number `step` (from 0): linear warm-up, then the schedule.

    With `scale_learning_rate` the whole curve is multiplied by the number of data-parallel workers ("linear": Goyal et
    al. 2017, 2.1) or its square root ("sqrt": Krizhevsky 2014, "One weird trick", 3.2); "none" leaves it, since the
    global batch does not grow with the workers.
    """
    scale = {"none": 1.0, "linear": float(num_workers), "sqrt": math.sqrt(num_workers)}[optimizer.scale_learning_rate]
    peak, lowest = optimizer.learning_rate * scale, optimizer.min_learning_rate * scale
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / (optimizer.warmup_steps + 1)
    end = num_steps if optimizer.decay_steps is None else optimizer.decay_steps
    rate = of_optimizer(optimizer).rate(RatePoint(optimizer, peak, lowest, end, step))
    if optimizer.schedule not in SCHEDULES and not (isinstance(rate, int | float) and 0 <= rate < math.inf):
        raise UserError(f"{KEY} = {optimizer.schedule}: rate of step {step} is {rate!r}; must be a number >= 0")
    return rate
