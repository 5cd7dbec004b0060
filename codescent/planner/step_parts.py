"""In: rows of ranks.csv, a plan. Out: the parts of a step on each rank, with its waiting divided in two.
Does not measure (train/ranks.py does) and does not know how schedules are simulated (cost/bubble.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter

from codescent.cost.bubble import bubble_s
from codescent.plan import Plan
from codescent.record.ranks import RankRow


@dataclass(frozen=True)
class Parts:
    """Mean seconds of a step on one rank. The eight parts sum to step_s within rounding.

    Attributes:
        bubble_s: the part of the waiting that remains if messages and collectives take no time (cost/bubble.py).
        communication_s: the rest of the waiting: exposed_comm_s of ranks.csv less bubble_s.
        rank: its number.
        steps: number of steps of which these are the means.
    """

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    bubble_s: float
    optimizer_s: float
    other_s: float
    rank: int
    steps: int

    @property
    def compute_s(self) -> float:
        """Forward and backward passes."""
        return self.forward_s + self.backward_s

    @property
    def exposed_comm_s(self) -> float:
        """All waiting, as in metrics.csv."""
        return self.communication_s + self.bubble_s


PARTS = tuple(field.name for field in fields(Parts) if field.name not in ("step_s", "rank", "steps"))
"""The names of the parts, in the order of a step."""


def parts_of(
    rows: Iterable[RankRow], ranks: range, plan: Plan | None, after: int = 0, *, alone: bool = False
) -> list[Parts]:
    """The parts of each of `ranks`, as means over the rows about steps after `after`; without such rows there are none.

    A row is about several steps: one with a step of the warm-up is left out whole. After a continuation with another
    number of ranks only the rows since then count.

    Args:
        rows: of ranks.csv, in order.
        ranks: which.
        plan: of the run; None: unknown, or of ranks that are in no pipeline. Then all waiting is communication.
        after: the last step of the warm-up.
        alone: the run has one rank, which waits for nobody.
    """
    return _divided(_means(rows, ranks, after, alone=alone), plan)


def of_busiest_stage(parts: Sequence[Parts], plan: Plan) -> dict[str, float]:
    """The share of each part in a step, a mean over the ranks of the stage that computes longest: a price counts the
    parts of this stage. Empty: nothing is known."""
    stages: dict[int, list[Parts]] = {}
    for one in parts:
        stages.setdefault(plan.role(one.rank), []).append(one)
    if not stages:
        return {}
    busiest = max(stages.values(), key=lambda of: sum(one.compute_s for one in of) / len(of))
    whole = sum(one.step_s for one in busiest)
    return {name: sum(getattr(one, name) for one in busiest) / whole for name in PARTS} if whole else {}


def _means(rows: Iterable[RankRow], ranks: range, after: int, *, alone: bool) -> list[dict[str, float]]:
    """The means of each of `ranks`, in order, over the steps in which all of them have a row."""
    kept = [row for row in rows if row["step"] - row["steps"] >= after and row["rank"] in ranks]
    whole: list[list[RankRow]] = []
    for _, found in groupby(kept, key=itemgetter("step")):
        of_step = list(found)
        if len(of_step) == len(ranks):
            whole.append(of_step)
        else:
            whole.clear()
    means = [_mean([of_step[place] for of_step in whole]) for place in range(len(ranks))] if whole else []
    if alone:  # older versions counted there what a rank without others does in `reduce`
        means = [{**one, "other_s": one["other_s"] + one["exposed_comm_s"], "exposed_comm_s": 0.0} for one in means]
    return means


def _mean(rows: Sequence[RankRow]) -> dict[str, float]:
    """The mean of the rows of a rank, weighted by their steps."""
    steps = sum(row["steps"] for row in rows)
    names = [name for name in rows[0] if name.endswith("_s")]
    means = {name: sum(row[name] * row["steps"] for row in rows) / steps for name in names}
    return {**means, "rank": rows[0]["rank"], "steps": steps}


def _divided(means: Sequence[Mapping[str, float]], plan: Plan | None) -> list[Parts]:
    """Divide each rank's waiting into bubble and communication."""
    found = bubbles(means, plan)
    return [
        Parts(
            step_s=mean["step_s"],
            data_s=mean["data_s"],
            forward_s=mean["forward_s"],
            backward_s=mean["backward_s"],
            communication_s=mean["exposed_comm_s"] - bubble,
            bubble_s=bubble,
            optimizer_s=mean["optimizer_s"],
            other_s=mean["other_s"],
            rank=int(mean["rank"]),
            steps=int(mean["steps"]),
        )
        for mean, bubble in zip(means, found, strict=True)
    ]


def bubbles(means: Sequence[Mapping[str, float]], plan: Plan | None) -> list[float]:
    """The bubble of each rank; never more than it waits. Without a pipeline there is none.

    `means`: for each rank its "rank", "forward_s", "backward_s" and "exposed_comm_s".
    """
    if plan is None or plan.mesh.pp == 1 or not means:
        return [0.0] * len(means)
    stage_of = [plan.mesh.coordinates(int(mean["rank"]))["pp"] for mean in means]
    stages = []
    for stage in range(plan.mesh.pp):
        of_stage = [mean for mean, at in zip(means, stage_of, strict=True) if at == stage]
        stages.append({n: sum(mean[n] for mean in of_stage) / len(of_stage) for n in ("forward_s", "backward_s")})
    of_stages = bubble_s(plan.schedule, stages)
    return [min(of_stages[at], mean["exposed_comm_s"]) for mean, at in zip(means, stage_of, strict=True)]
