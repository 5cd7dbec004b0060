"""In: sections [optimizer], runs. Out: each schedule has the rates of its formula, of torch and of transformers.
Does not check the warm-up and cosine of the first version (test_train_optimize.py does)."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forker import Forker
from runs import losses
from transformers import optimization

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import read_tensors
from codescent.config.load import load
from codescent.config.optimizer import Optimizer
from codescent.config.rate_schedules import FORMS, SCHEDULES, DecayForm, ScheduleName, learning_rate, unread
from codescent.record import RunFolder

PEAK, LOWEST, WARM_UP, STEPS = 3e-3, 1e-4, 17, 240
RATIO = LOWEST / PEAK


def rates(steps: int = STEPS, peak: float = PEAK, **keys: object) -> list[float]:
    section = Optimizer.model_validate({"learning_rate": peak, "warmup_steps": WARM_UP, **keys})
    return [learning_rate(section, STEPS, 1, step) for step in range(steps)]


def of_torch(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> list[float]:
    """The rates of a scheduler of torch, or of transformers, which makes such ones."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_every_schedule_and_form_has_a_row() -> None:
    """A value of a key without a row would end in a KeyError in the middle of a start."""
    assert tuple(SCHEDULES) == typing.get_args(ScheduleName)
    assert tuple(FORMS) == typing.get_args(DecayForm)
    assert {key for row in SCHEDULES.values() for key in row.reads} <= set(Optimizer.model_fields)


@pytest.mark.parametrize("share", [0.1, 0.25])
@pytest.mark.parametrize("form", FORMS)
def test_wsd_and_cooldown_are_those_of_transformers(form: str, share: float) -> None:
    """Rates of stable and decaying steps. The warm-up of transformers begins at 0, one step earlier."""
    decay = round(share * STEPS)
    theirs = of_torch(
        lambda one: optimization.get_wsd_schedule(
            one, WARM_UP, decay, num_training_steps=STEPS, decay_type=form, min_lr_ratio=RATIO
        )
    )
    ours = rates(schedule="wsd", decay_share=share, decay_form=form, min_learning_rate=LOWEST)
    again = rates(schedule="constant-cooldown", cooldown_steps=decay, decay_form=form, min_learning_rate=LOWEST)
    assert ours == again
    assert ours[WARM_UP:] == pytest.approx(theirs[WARM_UP:], rel=1e-12)
    assert set(ours[WARM_UP : STEPS - decay + 1]) == {PEAK}
    assert ours[STEPS - decay + 1] < PEAK


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_is_that_of_transformers_and_torch(power: float) -> None:
    theirs = of_torch(
        lambda one: optimization.get_polynomial_decay_schedule_with_warmup(
            one, WARM_UP, STEPS, lr_end=LOWEST, power=power
        )
    )
    ours = rates(schedule="polynomial", decay_power=power, min_learning_rate=LOWEST)
    assert ours[WARM_UP:] == pytest.approx(theirs[WARM_UP:], rel=1e-12)
    plain = of_torch(lambda one: torch.optim.lr_scheduler.PolynomialLR(one, STEPS, power))
    assert rates(schedule="polynomial", decay_power=power, warmup_steps=0) == pytest.approx(plain, rel=1e-11)


@pytest.mark.parametrize("timescale", [None, 60])
def test_inverse_square_root_is_that_of_transformers(timescale: int | None) -> None:
    theirs = of_torch(lambda one: optimization.get_inverse_sqrt_schedule(one, WARM_UP, timescale))
    ours = rates(schedule="inverse-sqrt", timescale=timescale)
    assert ours[WARM_UP:] == pytest.approx(theirs[WARM_UP:], rel=1e-12)
    bounded = rates(schedule="inverse-sqrt", timescale=timescale, min_learning_rate=PEAK / 2)
    assert bounded == [rate if step < WARM_UP else max(rate, PEAK / 2) for step, rate in enumerate(ours)]


def test_inverse_square_root_is_equation_3_of_vaswani() -> None:
    """Its steps count from 1: a shift by one, as in many copies of this formula, would be seen."""
    width, warm_up = 512, 40
    papers = [width**-0.5 * min(n**-0.5, n * warm_up**-1.5) for n in range(1, STEPS + 1)]
    keys = {"schedule": "inverse-sqrt", "warmup_steps": warm_up - 1, "timescale": warm_up}
    assert rates(peak=width**-0.5 * warm_up**-0.5, **keys) == pytest.approx(papers, rel=1e-12)
    # fairseq's inverse_sqrt: its update u is our step u
    keys = {"schedule": "inverse-sqrt", "warmup_steps": warm_up}
    fairseq = [PEAK * warm_up**0.5 * update**-0.5 for update in range(warm_up, STEPS)]
    assert rates(**keys)[warm_up:] == pytest.approx(fairseq, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_any_schedule_are_bounded(name: ScheduleName) -> None:
    """No rate is above the peak, below the least, or 0; after the end of a decay each is the least."""
    keys = {"schedule": name, "min_learning_rate": LOWEST, "cooldown_steps": 30, "decay_steps": STEPS - 40}
    section = Optimizer.model_validate(
        {"learning_rate": PEAK, "warmup_steps": WARM_UP, **{key: keys[key] for key in keys.keys() - unread_of(name)}}
    )
    found = [learning_rate(section, STEPS, 1, step) for step in range(2 * STEPS)]
    assert max(found) == found[WARM_UP] == PEAK
    assert all(rate >= LOWEST for rate in found[WARM_UP:])
    assert found[:WARM_UP] == [PEAK * (step + 1) / (WARM_UP + 1) for step in range(WARM_UP)]
    if "decay_steps" in SCHEDULES[name].reads:
        assert set(found[STEPS - 40 :]) == {LOWEST}
    assert all(math.isfinite(rate) for rate in found)


def unread_of(name: ScheduleName) -> set[str]:
    return unread(Optimizer.model_validate({"schedule": name}))


def problems(*words: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load("default", ["train.num_steps=100", "optimizer.warmup_steps=10", *words])
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (("wsd", "optimizer.decay_share=0.95"), "decay_share", "a decay of 95 steps and a warm-up of 10 steps"),
        (("constant-cooldown", "optimizer.cooldown_steps=91"), "cooldown_steps", "the 100 steps of train.num_steps"),
        (("constant-cooldown",), "cooldown_steps", "needs it; give a whole number"),
        (("wsd", "optimizer.decay_steps=200"), "decay_steps", "begin after 180 steps, but the run has 100"),
        (("wsd", "optimizer.decay_steps=9"), "warmup_steps", "must be a whole number from 0 to 8"),
        (("polynomial", "optimizer.decay_power=0"), "decay_power", "must be a number > 0"),
        (("wsd", "optimizer.decay_form=exponential"), "decay_form", '"1-sqrt", "linear" or "cosine"'),
    ],
)
def test_a_schedule_that_is_longer_than_the_run_is_refused(words: tuple[str, ...], key: str, said: str) -> None:
    """The decay of such a run would be cut off, or never begin, and nobody would see it before its end."""
    (problem,) = problems(f"optimizer.schedule={words[0]}", *words[1:])
    assert f"optimizer.{key}: " in problem
    assert said in problem


def test_a_run_whose_decay_ends_later_is_one_part_of_a_longer_run() -> None:
    section = load("default", ["train.num_steps=110", "optimizer.schedule=wsd", "optimizer.decay_steps=120"]).config
    assert section.optimizer.decay_steps == 120


WSD = ("optimizer.schedule=wsd", "optimizer.decay_share=0.5", "train.num_steps=12", "optimizer.min_learning_rate=1e-4")


def test_a_run_resumed_in_the_decay_has_the_same_bits(project: Path, forker: Forker) -> None:
    whole = forker.train(project, "wsd", 1, *WSD)
    first = ("optimizer.decay_steps=12", "train.num_steps=8", "optimizer.decay_share=0.5")
    part = forker.train(project, "wsd-part", 1, *WSD, *first)
    part = forker.train(project, "wsd-part", 1, *WSD, "optimizer.decay_steps=12", resume=True)
    assert losses(part) == losses(whole)
    assert rates_in(part) == rates_in(whole)
    ours, theirs = (read_tensors(run.checkpoints / "step_00000012") for run in (part, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def rates_in(run: RunFolder) -> list[float]:
    return [row["learning_rate"] for row in run.read_metrics()]


def test_a_constant_run_goes_on_with_a_decay(project: Path, forker: Forker) -> None:
    """Hägele et al. 2024: one long constant run serves decays of many lengths. Rates that are past may not change."""
    whole = forker.train(project, "decayed", 1, *WSD)
    forker.train(project, "stable", 1, "optimizer.schedule=constant", "train.num_steps=6")
    words = ["run.name=stable", *WSD, "optimizer.schedule=linear"]
    done = forker.run(project, 1, words, resume=True)
    assert done.codes == [2]
    assert "optimizer.schedule: the run in" in done.said
    run = forker.train(project, "stable", 1, *WSD, resume=True)
    assert losses(run) == losses(whole)
    (event,) = [event for event in run.read_events() if event["kind"] == "resume"]
    assert event["changes"]["optimizer.schedule"] == ["constant", "wsd"]
