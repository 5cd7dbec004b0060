"""In: a run on hosts with slow links. Out: what replicas that send less would change: another trajectory.
Does not say how well a run learns so (docs/which.md has what was measured)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codescent.base.amounts import of_number, of_seconds
from codescent.base.errors import UserError
from codescent.base.refusal import Change, Value
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.cost.amounts import busiest
from codescent.cost.arithmetic import arithmetic_s
from codescent.plan import Plan
from codescent.planner.which.facts import RunFacts
from codescent.planner.which.layout_rules import TableRow, data_rules
from codescent.planner.which.trials import RuleTrials, change_of, problems_of

if TYPE_CHECKING:
    from codescent.config.sections import Config

FEW, MANY = 0.5, 5.0
"""Seconds of sending for a second of computing: below FEW a sum of gradients hides, above MANY replicas average."""
WIRE, PERIOD = "parallel.wire", "parallel.average_every"
PERIODS = (16, 25, 10)
"""Steps between two averages: those that docs/which.md has measured with one bit a weight, the best one first."""


@dataclass(frozen=True)
class OtherTrajectory:
    """Keys with which replicas send less, and so other losses.

    Attributes:
        row: of the table.
        change: of the config, with the layout.
        keys: those that make the other trajectory.
        why: sentences: the numbers that ask for them, and what was refused.
    """

    row: TableRow
    change: Change
    keys: Mapping[str, Value]
    why: tuple[str, ...]


def other_trajectory(config: Config, start: Config, vocab_size: int | None, facts: RunFacts) -> OtherTrajectory | None:
    """What the page says of nodes on slow Ethernet; None: the model does not fit in one, or build refuses it there.

    Args:
        config: of the command.
        start: the same with defaults for what is not given.
        vocab_size: see `build`.
        facts: of the run, on a slow network.
    """
    trials = RuleTrials(start, vocab_size, facts)
    inside = (
        one for one in data_rules(facts, 0.0) if facts.per_host % (one.mesh.world_size // one.mesh.dp_replicate) == 0
    )
    found = next((layout for rule in inside if (layout := trials.first(rule)) is not None), None)
    if found is None or found.plan.mesh.dp_replicate == 1:
        return None
    sends_s, computes_s = _seconds(found.plan, facts)
    ratio = sends_s / computes_s
    if ratio < FEW:
        return None
    said = (
        f"Replicas of the whole model would send for {of_seconds(sends_s)} a step and compute for "
        f"{of_seconds(computes_s)}: {of_number(ratio)} times as long"
    )
    whole, refused = change_of(config, found, facts.given), ""
    for keys in [{WIRE: "int4"}] if ratio <= MANY else _averages():
        why = _refusal(start, vocab_size, facts, {**found.values, **keys})
        if why is None:
            return OtherTrajectory(TableRow.ETHERNET, whole.and_also(keys), keys, (said, *filter(None, [refused])))
        refused = refused or f"Refused: {why}"
    return None


def _averages() -> list[dict[str, Value]]:
    return [{PERIOD: period, WIRE: "sign"} for period in PERIODS]


def _seconds(plan: Plan, facts: RunFacts) -> tuple[float, float]:
    """How long a rank sends to other hosts in a step, and how long it computes: e and c of docs/which.md."""
    mesh = plan.mesh
    sent = busiest(plan, lambda one: one.wire_bytes(mesh.degree(one.axis)) if "dp_replicate" in one.axis else 0.0)
    each = facts.devices.link_bytes_per_s / facts.per_host
    return sent.mean / each, arithmetic_s(plan, facts.devices.flops_per_s)


def _refusal(start: Config, vocab_size: int | None, facts: RunFacts, values: Mapping[str, Value]) -> str | None:
    """Why it does not build, such as a period after which a checkpoint is not due; None: it does."""
    try:
        build(changed(start, Change(values)), vocab_size, facts.ranks)
    except (UserError, ValueError) as error:
        return next(problems_of(error))
    return None
