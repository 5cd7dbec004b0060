"""In: a run. Out: where the time of its steps goes on each rank, its waiting divided in two.
Does not measure (train/ranks.py does) and does not divide the waiting (planner/step_parts.py does)."""

from __future__ import annotations

from collections.abc import Mapping

from codescent.planner.step_parts import PARTS as PARTS
from codescent.planner.step_parts import Parts as Parts
from codescent.planner.step_parts import parts_of
from codescent.results.run import Run

PART_WORDS: Mapping[str, str] = {
    "data_s": "waiting for data",
    "forward_s": "forward passes",
    "backward_s": "backward passes",
    "communication_s": "exposed communication",
    "bubble_s": "the pipeline's bubble",
    "optimizer_s": "the optimizer",
    "other_s": "the rest of the step",
}
"""What the parts are called in sentences."""


def parts_of_ranks(run: Run, warmup: int = 0) -> list[Parts]:
    """The parts of each rank that computes, as means over the rows of ranks.csv about steps after `warmup`.

    Without such rows there are none (`parts_of`). Raises UserError: ranks.csv or plan.json is damaged.
    """
    return parts_of(run.ranks, range(run.num_workers), run.plan, warmup, alone=run.num_ranks == 1)


def parts_of_servers(run: Run, warmup: int = 0) -> list[Parts]:
    """The parts of each rank outside of the mesh, which computes nothing. Its waiting is all communication."""
    return parts_of(run.ranks, range(run.num_workers, run.num_ranks), None, warmup, alone=run.num_ranks == 1)
