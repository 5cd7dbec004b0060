"""In: an open run. Out: the commands that continue it, in words, and the learning rates of further steps.
Does not decide whether a run can continue (preflight.py does)."""

from __future__ import annotations

from codescent.base.command import resume_command
from codescent.config.sections import Optimizer
from codescent.train.open import OpenRun
from codescent.train.optimize import learning_rate


def how_to_continue(run: OpenRun) -> str:
    """The command that continues a run that was stopped. Without a launcher it starts as many ranks as before."""
    launched = run.world.place.world_size != run.config.parallel.ranks
    return f"continue{', with your launcher' if launched else ''}: {resume_command(run.path)}"


def how_to_extend(run: OpenRun, step: int) -> list[str]:
    """Lines for a run that has done all its steps, `step` of them: the command for as many steps again, or for those
    that are left of a schedule that has not ended. They name the learning rates, because the schedule may change.
    """
    optimizer = run.config.optimizer
    decay_steps = None if optimizer.schedule == "constant" else optimizer.decay_steps
    steps = 2 * step if decay_steps is None or decay_steps <= step else min(2 * step, decay_steps)
    before, overrides = _rate(run, optimizer, step, step), [f"train.num_steps={steps}"]
    if _rate(run, optimizer, steps, steps) == 0:  # optimizer.decay_steps is a number: the last steps would not train
        overrides.append(f"optimizer.decay_steps={steps}")
        optimizer = _decaying(optimizer, steps)
    first, last = (_rate(run, optimizer, steps, at) for at in (step + 1, steps))
    lines = [
        f"{run.path} has all its {step} steps. For {steps - step} more: {resume_command(run.path, *overrides)}",
        f"The learning rate was {before:.3g} at step {step}. It is then {first:.3g} at step {step + 1} and {last:.3g} "
        f"at step {steps}.",
    ]
    lowest = _rate(run, _decaying(optimizer, step), steps, steps)
    if optimizer.schedule != "constant" and decay_steps is None and lowest and step > optimizer.warmup_steps:
        lines.append(f"To keep it at {lowest:.3g}, also give optimizer.decay_steps={step}.")
    return lines


def _decaying(optimizer: Optimizer, decay_steps: int) -> Optimizer:
    return optimizer.model_copy(update={"decay_steps": decay_steps})


def _rate(run: OpenRun, optimizer: Optimizer, num_steps: int, step: int) -> float:
    """The learning rate of a step, numbered from 1, in a run of `num_steps` steps."""
    return learning_rate(optimizer, num_steps, run.plan.mesh.dp, step - 1)
