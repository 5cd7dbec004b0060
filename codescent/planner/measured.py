"""In: what a run has written of its steps and its memory, its plan. Out: what it measured of what a price predicts.
Does not read a run folder (those that call it do) and does not predict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from codescent.base import warm_up
from codescent.plan import Plan
from codescent.planner.step_parts import of_busiest_stage, parts_of
from codescent.record.memory import MemoryRow
from codescent.record.ranks import RankRow


@dataclass(frozen=True)
class MeasuredStep:
    """What a run has measured.

    Attributes:
        step_s: median seconds of a step after the warm-up; None: no step.
        parts_s: seconds of each part (step_parts.PARTS) on the stage that computes longest, by its mean share of the
            median step; empty: unknown.
        stage: of the rank whose peak of memory is the highest.
        memory: the last row of memory.csv of this rank; None: unknown.
    """

    step_s: float | None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    stage: int = 0
    memory: MemoryRow | None = None


def measured_step(
    steps: ArrayLike,
    seconds: ArrayLike,
    of_ranks: Iterable[RankRow],
    memory: Mapping[int, MemoryRow],
    plan: Plan,
    first_step: int = 0,
    warmup: int | None = None,
) -> MeasuredStep:
    """What a run measured since it began with this plan.

    Args:
        steps, seconds: [rows] of metrics.csv.
        of_ranks: rows of ranks.csv.
        memory: the last row of memory.csv of each rank.
        plan: of the run.
        first_step: the step after which the run began with this plan: 0, or where it was resumed.
        warmup: steps after it that do not count; None: by their number (base/warm_up.py).
    """
    numbers, times = np.asarray(steps, dtype=float), np.asarray(seconds, dtype=float)
    known = numbers[np.isfinite(times)]
    done = max(0, int(known.max()) - first_step) if len(known) else 0
    after = first_step + warm_up.within(done, warmup)
    counted = times[np.isfinite(times) & (numbers > after)]
    step_s = float(np.median(counted)) if len(counted) else None
    rows, ranks = list(of_ranks), range(plan.mesh.world_size)
    alone = plan.world_size == 1
    parts = parts_of(rows, ranks, plan, after, alone=alone) or parts_of(rows, ranks, plan, first_step, alone=alone)
    shares = of_busiest_stage(parts, plan) if step_s is not None else {}
    present = {rank: row for rank, row in memory.items() if rank in plan.mesh}
    fullest = max(present, key=lambda rank: float(present[rank]["peak_bytes"] or 0), default=None)
    return MeasuredStep(
        step_s,
        {name: share * (step_s or 0.0) for name, share in shares.items()},
        0 if fullest is None else plan.role(fullest),
        None if fullest is None else present[fullest],
    )
