"""In: the plan of a run, another plan, the steps that are done. Out: whether these had the same learning rates in both.
Does not decide whether a run may go on (preflight.py does)."""

from __future__ import annotations

from codescent.config.optimizer import Optimizer
from codescent.config.rate_schedules import SCHEDULES, learning_rate
from codescent.plan import DECAY_STEPS, Plan

SCHEDULE_KEYS = {
    DECAY_STEPS,
    *(f"optimizer.{key}" for schedule in SCHEDULES.values() for key in schedule.reads),
    "optimizer.schedule",
    "optimizer.warmup_steps",
}
"""The keys of a trajectory that change nothing but the learning rates of some steps."""


def same_rates(saved: Plan, plan: Plan, steps: int) -> bool:
    """Whether each of the first `steps` steps has the same learning rate with both plans, bit by bit."""
    before, after = _optimizer(saved), _optimizer(plan)
    return all(_rate(saved, before, step) == _rate(plan, after, step) for step in range(steps))


def _optimizer(plan: Plan) -> Optimizer:
    """The section [optimizer] with the keys that a plan keeps."""
    kept = {name: value for name, value in plan.update.items() if name in Optimizer.model_fields}
    return Optimizer.model_validate(kept)


def _rate(plan: Plan, optimizer: Optimizer, step: int) -> float:
    return learning_rate(optimizer, optimizer.decay_steps or 1, plan.scale_ranks, step)
