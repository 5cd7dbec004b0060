"""In: an open run. Out: the commands that continue it, in words, and the learning rates of further steps.
Does not decide whether a run can continue (preflight.py does) or ends early (validations.py does)."""

from __future__ import annotations

from typing import Any

from codescent.base.command import resume_command
from codescent.base.counted import counted
from codescent.base.output import say
from codescent.config.effects import value_of
from codescent.config.load import load, to_toml
from codescent.config.rate_schedules import end_of_decay, learning_rate
from codescent.config.sections import Optimizer
from codescent.record import CONFIG
from codescent.train.open import OpenRun
from codescent.train.outcome import Outcome
from codescent.train.validations import Validations

FILES = ("data.tokenizer", "data.chat_template")
"""Keys that may name a file whose content, not its place, decides the losses."""


def how_to_continue(run: OpenRun) -> str:
    """The command that continues a run that was stopped. Without a launcher it starts as many ranks as before."""
    launched = run.world.this_rank.world_size != run.config.parallel.ranks
    return f"continue{', with your launcher' if launched else ''}: {resume_command(run.path)}"


def done_already(run: OpenRun) -> Outcome | None:
    """The outcome of a resumed run that has nothing to do; None: it has steps to do. Collective.

    Nothing in its folder changes, except new places of its files, which other commands need.
    """
    lines = nothing_to_do(run)
    if not lines:
        return None
    keys: list[str] = run.world.from_first(lambda: write_new_places(run))
    if run.world.is_first:
        say([*lines, *([f"{run.path} now has the new value of {' and '.join(keys)}"] if keys else [])])
    is_early, keeps_best = run.first_step < run.config.train.num_steps, run.config.checkpoint.keep_best
    suggests_best = is_early and keeps_best and run.checkpoints.best_loss() is not None
    return Outcome(run.path, run.first_step, 0, suggests_best, has_trained=False)


def nothing_to_do(run: OpenRun) -> list[str]:
    """Lines for people if a resumed run has nothing to do; none if it has. Collective.

    Raises:
        UserError: on every rank: a file of metrics is damaged.
    """
    step, num_steps = run.first_step, run.config.train.num_steps
    if step > num_steps:
        return [f"train.num_steps = {num_steps}: {run.path} has {step} steps already; nothing is changed"]
    if run.ended is None or run.ended != step:
        return []
    if step == num_steps:
        return how_to_extend(run, step)
    validations = Validations(run.config.train.stop_after)
    validations.recall(run)
    return [ended_early(run, step, validations)] if validations.exhausted else []


def write_new_places(run: OpenRun) -> list[str]:
    """For a run that has nothing to do, on rank 0: write the new places of its files to its config.toml.

    Returns:
        the keys that name them.

    Raises:
        UserError: config.toml is damaged.
    """
    before = load(run.path / CONFIG).config
    keys = [key for key in ("model.weights", *FILES) if value_of(run.config, key) != value_of(before, key)]
    sections: dict[str, Any] = {}
    for section, name in (key.split(".") for key in keys):
        latest = sections.get(section, getattr(before, section))
        sections[section] = latest.model_copy(update={name: getattr(getattr(run.config, section), name)})
    if keys:
        assert run.folder is not None
        run.folder.write_config(to_toml(before.model_copy(update=sections)), run.folder.plan)
    return keys


def ended_early(run: OpenRun, step: int, validations: Validations) -> str:
    """Why `train.stop_after` has ended the run at `step`, and the command that goes on."""
    count, lowest, at = validations.without_gain, validations.lowest, validations.lowest_step
    return (
        f"ended early at step {step} (train.stop_after = {validations.stop_after}): {counted(count, 'validation')} "
        f"without a loss below {lowest:.4f} of step {at}; to go on: {resume_command(run.path, 'train.stop_after=0')} "
        f"(or more than {count})"
    )


def schedule_is_over(run: OpenRun) -> str | None:
    """A warning if a run that had ended gets more steps, but no new schedule; None: the learning rate goes on."""
    optimizer, steps = run.config.optimizer, run.config.train.num_steps
    if (end := end_of_decay(optimizer, None)) is None or run.ended is None:
        return None
    if run.first_step < end:
        return None
    rate = _rate(run, optimizer, steps, steps)
    return (
        f"warning: optimizer.decay_steps = {end}: the schedule is over, so the learning rate of all "
        f"further steps is {rate:.3g}{'' if rate else ', which changes no weight'}; once they are done, more steps "
        "with another optimizer.decay_steps have a schedule again"
    )


def how_to_extend(run: OpenRun, step: int) -> list[str]:
    """Lines for a run that has done all its steps, `step` of them: the command for as many steps again, or for those
    that are left of a schedule that has not ended. They name the learning rates, because the schedule may change.
    """
    optimizer = run.config.optimizer
    decay_steps = end_of_decay(optimizer, None)
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
    decays = end_of_decay(optimizer, step) is not None
    if decays and decay_steps is None and lowest and step > optimizer.warmup_steps:
        lines.append(f"To keep it at {lowest:.3g}, also give optimizer.decay_steps={step}.")
    return lines


def after_culprit(run: OpenRun, culprit: str, step: int) -> str:
    """What to do where one rank alone gave what is not finite, and the command that goes on after `step`."""
    return (
        f"in all of them only {culprit} gave what is not finite: look at its host, device and data, then continue from "
        f"step {step}: {resume_command(run.path)}"
    )


def lower_rates(run: OpenRun, step: int) -> list[str]:
    """What to change in a run whose loss or gradients are not finite, and the command that goes on after `step`."""
    optimizer, rates = run.config.optimizer, ["learning_rate"]
    if optimizer.kind == "muon" and optimizer.muon_learning_rate is not None:  # None: that of the other tensors
        rates.append("muon_learning_rate")
    lower = [f"optimizer.{rate}={getattr(optimizer, rate) / 10:.3g}" for rate in rates]
    outer = run.config.parallel
    slower = f"parallel.outer_learning_rate={outer.outer_learning_rate / 10:.3g}"
    anew = [f"or begin a new run.name with {slower}: a resumed run keeps its outer optimizer"]
    return [
        f"change keys of [optimizer] and continue from step {step}: {resume_command(run.path, *lower)} (or "
        "another optimizer.max_grad_norm, optimizer.warmup_steps and so on)",
        *(anew if outer.outer_optimizer != "none" else []),
    ]


def after_spike(run: OpenRun) -> list[str]:
    """What else helps a run that spikes have ended, where its update is right."""
    keys = run.config.survive
    accept = resume_command(run.path, f"survive.spike_factor={2 * keys.spike_factor:g}")
    skip = " (or survive.on_spike=skip, which leaves out their updates)" if keys.on_spike != "skip" else ""
    return [f"or accept such steps, and continue from the newest checkpoint: {accept}{skip}"]


def _decaying(optimizer: Optimizer, decay_steps: int) -> Optimizer:
    return optimizer.model_copy(update={"decay_steps": decay_steps})


def _rate(run: OpenRun, optimizer: Optimizer, num_steps: int, step: int) -> float:
    """The learning rate of a step, numbered from 1, in a run of `num_steps` steps."""
    return learning_rate(optimizer, num_steps, run.plan.scale_ranks, step - 1)


def length_of(run: OpenRun) -> str:
    """Steps and epochs of a run, and what may end it before."""
    train = run.config.train
    epochs = train.num_steps / (run.source("train").num_samples // train.global_batch_size)
    said = counted(round(epochs, 2), "epoch") if epochs >= 0.01 else "less than 0.01 epochs"
    ends_early = train.stop_after and train.eval_every
    early = f"; {counted(train.stop_after, 'validation')} without a lower loss end it earlier" if ends_early else ""
    return f"{counted(train.num_steps, 'step')} ({said}){early}"
