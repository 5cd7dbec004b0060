"""In: values of [survive], and what is known of a run. Out: all reasons why the run cannot do what it asks for; a note.
Looks at no process and no run: its caller gives what was measured. It does not act on a fault (train does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from codescent.base.amounts import of_seconds
from codescent.base.counted import counted
from codescent.base.refusal import Change, Refusal, each
from codescent.config.survive import Survive
from codescent.plan import Plan

ROOM = 2.0
"""A deadline is at least so many times a measured step, as steps vary."""


def wrong_survival(keys: Survive, *, save_every: int, lost_whole: bool, smaller: str) -> Iterator[Refusal]:
    """What the keys ask for and the run does not have.

    Args:
        keys: of the run.
        save_every: checkpoint.every.
        lost_whole: whether what one rank holds is also held by others (`copies`).
        smaller: why there is no layout with one rank less (the error of `shrunk`); "": there is one.
    """
    given = f'survive.on_loss = "{keys.on_loss}"'
    if keys.on_loss == "shrink" and smaller:
        yield Refusal(
            f"{given}: there is nothing to shrink to: {smaller}",
            [Change({"survive.on_loss": "restart"}), Change({"survive.on_loss": "stop"})],
        )
    if keys.on_loss == "restart" and not save_every:
        yield Refusal(
            f"{given}: checkpoint.every = 0, so a restart would begin with the first step; give a number of steps, "
            "such as checkpoint.every = 100",
        )
    if keys.on_loss == "shrink" and not save_every and not lost_whole:
        yield Refusal(
            f"{given}: checkpoint.every = 0, and what a rank holds no other rank has; give a number of steps, such as "
            "checkpoint.every = 100",
        )
    if keys.spares and keys.on_loss == "stop":
        yield Refusal(
            f'survive.spares = {keys.spares}: with survive.on_loss = "stop" a run ends when it loses a rank, so no '
            "spare one gets a place",
            [Change({"survive.spares": 0}), *(Change({"survive.on_loss": policy}) for policy in ("restart", "shrink"))],
        )


def short_deadlines(deadlines: Mapping[str, float | None], step_s: float) -> Iterator[Refusal]:
    """Deadlines that a healthy run would miss.

    Args:
        deadlines: values by config key; None: it has none.
        step_s: of a step, as it was measured.
    """
    for key, value in deadlines.items():
        if value is not None and value < step_s:
            yield Refusal(
                f"{key} = {value:g}: a step takes {of_seconds(step_s)}, so each would count as a fault",
                each(key, [math.ceil(ROOM * step_s)]),
            )


def nothing_to_compare(check_every: int, plan: Plan) -> str:
    """A sentence if train.check_every compares nothing in a run of several ranks; else ""."""
    if not check_every or plan.world_size == 1 or max(copies(plan)) > 1:
        return ""
    ranks = counted(plan.world_size, "rank")
    return (
        f"train.check_every = {check_every} has no effect: each of {ranks} holds its own part of weights and optimizer "
        "state, so there are no copies to compare"
    )


def parts(plan: Plan) -> tuple[int, ...]:
    """The part of the trained state that each rank holds. Ranks with the same number hold the same values."""
    placements = [place for tensor in plan.trained for place in (tensor.weights, tensor.optimizer)]
    axes = ("pp", *dict.fromkeys(axis for place in placements for axis in place.axes(plan.mesh)))
    places = [plan.mesh.coordinates(rank) for rank in range(plan.mesh.world_size)]
    held = [tuple(place[axis] for axis in axes) for place in places]
    numbers = {part: number for number, part in enumerate(dict.fromkeys(held))}
    return tuple(numbers[part] for part in held)


def copies(plan: Plan) -> set[int]:
    """The numbers of ranks that hold a tensor of the trained state, each with equal values at the end of a step.

    If the least is above 1, no rank takes something with it when it is lost. If the greatest is 1, nothing can be
    compared.
    """
    agree = plan.layout.agrees_at_ends
    return {
        plan.copies(tensor, own)
        for tensor in plan.trained
        for own in (
            (*tensor.weights.axes(plan.mesh), *(() if agree else tensor.apart)),
            (*tensor.optimizer.axes(plan.mesh), *tensor.apart),
        )
    }
