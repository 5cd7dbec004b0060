"""In: why a config is refused with which a run is resumed, and the plan with which it began. Out: the changes that do.
Tries each change: the plan of the changed config must be there, and keep what decides the losses of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice, product
from typing import Any

from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal
from codescent.build import build
from codescent.config import effects
from codescent.config.sections import Config
from codescent.config.words import KEYS
from codescent.plan import AXES, Plan, Scalar

MOST_TRIED = 64
"""Combinations of changes that are tried: a refusal should take about a second, also of a large model."""


@dataclass(frozen=True)
class Began:
    """How a run began: `Plan.trajectory`, its layout as values by config key, and the number of its ranks."""

    trajectory: Mapping[str, Scalar]
    layout: Mapping[str, Any]
    ranks: int

    @classmethod
    def of(cls, plan: Plan) -> Began:
        """Read them from the plan with which the run began."""
        degrees = {f"parallel.{axis}": plan.mesh.degree(axis) for axis in AXES}
        keys = {f"parallel.{field.name}": getattr(plan.layout, field.name) for field in fields(plan.layout)}
        batch = {"train.microbatch_size": plan.work.microbatch_size}
        return cls(plan.trajectory(), {**degrees, **keys, **batch}, plan.mesh.world_size)


def on_resume(error: UserError, config: Config, vocab_size: int | None, ranks: int, began: Began) -> UserError:
    """The error for a command that resumes a run, with advice that a resume can follow.

    Its changes solve all its problems together. They are those of the problems, as far as the run may continue with
    them; else the values with which the run began; else these and the layout with which it began.
    """

    def does(change: Change) -> bool:
        return _continues(changed(config, change), vocab_size, change.ranks or ranks, began)

    problems = [problem if isinstance(problem, Refusal) else Refusal(problem) for problem in error.problems]
    ways = [change for change in islice(_together(problems), MOST_TRIED) if does(change)]
    if not ways:
        ways = [change for change in _back(config, began) if does(change)][:1]
    *first, last = (problem.said for problem in problems)
    return UserError(*first, Refusal(last, ways, where=" on a resume"))


def changed(config: Config, change: Change) -> Config:
    """The config with other values."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=updated)


def _together(problems: list[Refusal]) -> Iterator[Change]:
    """A change of each problem, put together; nothing if their numbers of ranks differ, or a problem has none."""
    for changes in product(*(problem.changes for problem in problems)):
        ranks = {change.ranks for change in changes} - {None}
        if len(ranks) <= 1:
            values = {key: value for change in changes for key, value in change.values.items()}
            yield Change(values, next(iter(ranks), None))


def _back(config: Config, began: Began) -> Iterator[Change]:
    """Back to the sizes and the batch with which the run began; then also to its layout."""
    kept = {key: value for key, value in began.trajectory.items() if key.startswith(("model.", "data.", "train."))}
    if config.train.global_batch_tokens is not None:  # decides the samples
        del kept["train.global_batch_size"]
    values = _other_values(config, kept)
    if values:
        yield Change(values)
    yield Change({**values, **_other_values(config, began.layout)}, began.ranks)


def _other_values(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that differ from the config's. What the config leaves open stays open."""
    given = {key: effects.value_of(config, key) for key in values if key in KEYS}
    return {key: values[key] for key, value in given.items() if value is not None and value != values[key]}


def _continues(config: Config, vocab_size: int | None, ranks: int, began: Began) -> bool:
    """Whether the run continues with the same losses. Keys of the optimizer that the config changes do not count."""
    try:
        after = build(config, vocab_size, ranks).trajectory()
    except UserError:
        return False
    return all(after.get(key) == value for key, value in began.trajectory.items() if not key.startswith("optimizer."))
