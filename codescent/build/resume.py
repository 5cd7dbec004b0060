"""In: why a config is refused with which a run is resumed, and the plan with which it began. Out: the changes that do.
Does not find changes (accept.py and strategies do). It tries them: a plan must be there, with the losses of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice, product
from typing import Any

from codescent import tasks
from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal
from codescent.build.accept import MOST_TRIED, changed
from codescent.build.plan import trajectory
from codescent.config import effects
from codescent.config.sections import Config
from codescent.config.words import KEYS
from codescent.plan import AXES, Plan, Scalar


@dataclass(frozen=True)
class Began:
    """How a run began: `Plan.trajectory`, its layout as values by config key, its ranks, and the tokens of a step."""

    trajectory: Mapping[str, Scalar]
    layout: Mapping[str, Any]
    ranks: int
    tokens: int

    @classmethod
    def of(cls, plan: Plan) -> Began:
        """Read them from the plan with which the run began."""
        degrees = {f"parallel.{axis}": plan.mesh.degree(axis) for axis in AXES}
        keys = {f"parallel.{field.name}": getattr(plan.layout, field.name) for field in fields(plan.layout)}
        batch = {"train.microbatch_size": plan.work.microbatch_size}
        return cls(plan.trajectory(), {**degrees, **keys, **batch}, plan.world_size, plan.work.tokens)


def on_resume(error: UserError, config: Config, vocab_size: int | None, ranks: int, began: Began) -> UserError:
    """The error for a command that resumes a run, with advice that a resume can follow.

    Its changes solve all its problems together. They are those of the problems, as far as the run may continue with
    them; else the values with which the run began; else these and the layout with which it began.
    """

    def does(change: Change) -> bool:
        return _continues(config, change, vocab_size, ranks, began)

    problems = [problem if isinstance(problem, Refusal) else Refusal(problem) for problem in error.problems]
    ways = [change for change in islice(_together(problems), MOST_TRIED) if does(change)]
    if not ways:
        ways = [change for change in _back(config, ranks, began) if does(change)][:1]
    said = [problem.said for problem in problems]
    if not ways:
        return UserError(*said, "give the values with which the run began: config.toml in its folder has them")
    if len(said) == 1:
        return UserError(Refusal(said[0], ways, where=" on a resume"))
    return UserError(*said, Refusal("all of these together", ways, where=" on a resume"))


def _together(problems: list[Refusal]) -> Iterator[Change]:
    """A change of each problem that has some, put together, each once; nothing if their numbers of ranks differ."""
    found: list[Change] = []
    for changes in product(*(problem.changes for problem in problems if problem.changes)):
        ranks = {change.ranks for change in changes} - {None}
        values = {key: value for change in changes for key, value in change.values.items()}
        change = Change(values, next(iter(ranks), None))
        if len(ranks) <= 1 and change not in found:
            found.append(change)
            yield change


def _back(config: Config, ranks: int, began: Began) -> Iterator[Change]:
    """Back to the sizes and the batch with which the run began; then also to its layout."""
    kept = {
        key: value for key, value in began.trajectory.items() if key.startswith(("run.", "model.", "data.", "train."))
    }
    for key in _movable(began):
        kept.pop(key, None)
    if config.train.global_batch_tokens is not None:  # decides the samples
        del kept["train.global_batch_size"]
        kept["train.global_batch_tokens"] = began.tokens
    values = _other_values(config, kept)
    if values:
        yield Change(values)
    yield Change({**values, **_other_values(config, began.layout)}, None if began.ranks == ranks else began.ranks)


def _other_values(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that differ from the config's. What the config leaves open stays open."""
    given = {key: effects.value_of(config, key) for key in values if key in KEYS}
    return {key: values[key] for key, value in given.items() if value is not None and value != values[key]}


def _continues(config: Config, change: Change, vocab_size: int | None, ranks: int, began: Began) -> bool:
    """Whether the run continues with the same losses. Keys of the optimizer that the config changes do not count."""
    try:
        after = trajectory(changed(config, change), vocab_size, change.ranks or ranks)
    except (UserError, ValueError):
        return False
    free = _movable(began)
    kept = {
        key: value for key, value in began.trajectory.items() if key not in free and not key.startswith("optimizer.")
    }
    return all(after.get(key) == value for key, value in kept.items())


def _movable(began: Began) -> set[str]:
    """Keys of files that may have been moved. `preflight.check_same_trajectory` compares their contents."""
    return {"model.weights", *tasks.task_named(str(began.trajectory["data.task"])).kept}
