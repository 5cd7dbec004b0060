"""In: values of [survive], and what is known of a run. Out: all reasons why the run cannot do what it asks for; a note.
Reads no config and looks at no process: preflight.py gives the values. It does not act on a fault (train does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from codescent.base.amounts import of_seconds
from codescent.base.counted import counted
from codescent.base.refusal import Change, Refusal, each
from codescent.plan import Plan

ROOM = 2.0
"""A deadline is at least so many times a measured step, as steps vary."""


@dataclass(frozen=True)
class SurviveKeys:
    """Values of keys of [survive]."""

    on_loss: str = "stop"
    max_restarts: int = 0
    restart_window_s: float = 0.0
    spares: int = 0


def wrong_survival(
    keys: SurviveKeys, *, save_every: int, lost_whole: bool, smaller: str, launcher: str
) -> Iterator[Refusal]:
    """What the keys ask for and the run does not have.

    Args:
        keys: of the run.
        save_every: checkpoint.every.
        lost_whole: whether what one rank holds is also held by others (`copies`).
        smaller: why there is no layout with one rank less (the error of `shrunk`); "": there is one.
        launcher: by whom the ranks were started; "": by codescent.
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
    if keys.on_loss == "restart" and not keys.max_restarts:
        yield Refusal(
            f"{given}: survive.max_restarts = 0, so no rank is started again",
            [*each("survive.max_restarts", [3]), Change({"survive.on_loss": "stop"})],
        )
    if keys.spares and keys.on_loss == "stop":
        yield Refusal(
            f'survive.spares = {keys.spares}: with survive.on_loss = "stop" a run ends when it loses a rank, so no '
            "spare one gets a place",
            [Change({"survive.spares": 0}), *(Change({"survive.on_loss": policy}) for policy in ("restart", "shrink"))],
        )
    if keys.spares and launcher:
        yield Refusal(
            f"survive.spares = {keys.spares}: {launcher} has started the ranks, and it alone starts processes beside "
            "them; ranks that codescent itself starts can have spares: codescent train with parallel.ranks on one "
            "machine, a script of codescent launch --to ssh on several",
            [Change({"survive.spares": 0})],
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


def short_lease(lease_s: float, heartbeat_s: float) -> Iterator[Refusal]:
    """A lease that ends before its holder can show that it lives.

    Args:
        lease_s: survive.lease_s.
        heartbeat_s: from one sign of life to the next.
    """
    if lease_s < heartbeat_s:
        yield Refusal(
            f"survive.lease_s = {lease_s:g}: a sign of life comes each {of_seconds(heartbeat_s)}, so a healthy writer "
            "would lose the run",
            each("survive.lease_s", [math.ceil(ROOM * heartbeat_s)]),
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
