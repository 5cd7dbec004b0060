"""In: a config that names code of the user. Out: all names that stand for nothing that their key takes; what a schedule
or an update rule refuses; rates that are no rates.
Does not run a kind, a task or a corpus: who uses them does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from codescent.base.errors import UserError
from codescent.base.own_names import is_own_name
from codescent.config import rate_schedules, update_rules
from codescent.config.optimizer import Optimizer
from codescent.config.own_keys import own_names_in
from codescent.config.rate_schedules import RateSchedule, learning_rate, of_optimizer, unread
from codescent.config.update_rules import KEY, own_rule
from codescent.data.text.own_documents import documents_of
from codescent.models import own as own_models
from codescent.tasks import own as own_tasks
from codescent.tasks.rewarded import rewards

if TYPE_CHECKING:
    from codescent.config.sections import Config

OF_RULES = frozenset(("beta1", "beta2", "eps", "momentum"))
"""Keys that only some update rules read."""
MOST_TRIED = 10_000
"""So many rates are computed at most before a run begins."""


def check_own_names(config: Config) -> None:
    """Look at every name of the user's code, before data is prepared. Raises UserError: all that stand for nothing that
    their key takes."""
    optimizer = config.optimizer
    looks: dict[str, Callable[[str], object]] = {
        own_models.KEY: own_models.own_kind,
        own_tasks.KEY: own_tasks.own_task,
        update_rules.KEY: lambda _: own_rule(optimizer),
        rate_schedules.KEY: lambda _: of_optimizer(optimizer),
        rewards.KEY: rewards.function_of,
    }
    problems: list[str] = []
    for key, name in own_names_in(config).items():
        try:
            look = looks.get(key)
            documents_of(key, name) if look is None else look(name)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def problems_of_own(config: Config) -> Iterator[str]:
    """Problems of the update rule and the schedule of the user."""
    yield from _of_rule(config.optimizer)
    yield from _of_schedule(config)


def _of_rule(optimizer: Optimizer) -> Iterator[str]:
    """Problems of an update rule of the user: its name, and what it refuses."""
    try:
        rule = own_rule(optimizer)
        refused = [] if rule is None else list(rule.refuse(optimizer))
        yield from (f"{KEY} = {optimizer.kind}: {problem}" for problem in refused)
    except UserError as error:
        yield from error.problems


def _of_schedule(config: Config) -> Iterator[str]:
    """Problems of a schedule of the user: its name, what it refuses, a rate that is no number >= 0."""
    optimizer, train = config.optimizer, config.train
    if not is_own_name(optimizer.schedule):
        return
    try:
        schedule = of_optimizer(optimizer)
        num_steps = train.num_steps if train.num_epochs is None else None  # None: unknown before the data is prepared
        found = list(schedule.refuse(optimizer, num_steps))
        if without := [problem for keys, problem in found if not keys]:
            raise UserError(
                f"optimizer.schedule = {optimizer.schedule}: refuse gives no key for {without[0]!r}; must be the keys "
                'and the problem, such as ("optimizer.warmup_steps",), "must be 7"'
            )
        refused = [f"{keys[0]}: {problem}" for keys, problem in found]
        yield from refused
        if not refused:
            _try_rates(schedule, optimizer, train.num_steps)
    except UserError as error:
        yield from error.problems


@lru_cache(maxsize=4)  # a search asks for each layout
def _try_rates(schedule: RateSchedule, optimizer: Optimizer, num_steps: int) -> None:
    """Compute rates of steps over the whole run, the first and the last among them. Raises UserError: a wrong one."""
    for number in range(count := min(num_steps, MOST_TRIED)):
        learning_rate(optimizer, num_steps, 1, number * (num_steps - 1) // max(1, count - 1))


def unread_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Keys of [optimizer] that the user's schedule and update rule do not read, each with the reason as a clause.

    Raises:
        UserError: one of them cannot be found.
    """
    optimizer = config.optimizer
    if is_own_name(optimizer.schedule):
        yield from ((f"optimizer.{key}", f"is not read by {optimizer.schedule}") for key in sorted(unread(optimizer)))
    if (rule := own_rule(optimizer)) is not None:
        others = sorted(OF_RULES.difference(rule.reads))
        yield from ((f"optimizer.{key}", f"is not read by {optimizer.kind}") for key in others)
