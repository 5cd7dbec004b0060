"""In: a run, a number of warm-up steps. Out: the seconds of its steps by part, with their times; its typical step.
Does not compare runs (compare.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.plan import Plan
from codescent.planner.step_parts import bubbles
from codescent.record.ranks import PARTS as COLUMNS
from codescent.results.run import BEGINS, STATES, Run
from codescent.results.statistics import Values

ENOUGH = 12
"""Fewest rows of ranks.csv after the warm-up. With fewer, the rows of rank 0 in metrics.csv are used."""
WAITING = "exposed_comm_s"
PASSES = ("forward_s", "backward_s")


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of the steps of a run after its warm-up: a row is a step, or the mean of the steps between two lines of
    ranks.csv.

    Attributes:
        plan: of the run; None: unknown.
        begin: when the run began, in seconds since 1970.
        columns: names of the parts, which sum to the step.
        seconds: [rows, ranks, columns].
        at: [rows], seconds since 1970 at which a row's last step ended.
        pace: the rank that waits least: the others wait for it, so its parts say where the time goes.
        every_rank: whether the rows are of all ranks; else of rank 0, from metrics.csv.
    """

    plan: Plan | None
    begin: float
    columns: tuple[str, ...]
    seconds: Values
    at: Values
    pace: int
    every_rank: bool

    def __len__(self) -> int:
        return len(self.at)

    @property
    def step_s(self) -> Values:
        """[rows]: seconds of a step, as means over the ranks."""
        return np.asarray(self.seconds.sum(axis=2).mean(axis=1))

    @property
    def waiting(self) -> Values:
        """[ranks]: the share of its time that each rank waits, as median over the rows."""
        return np.asarray(np.median(self.seconds[..., self.columns.index(WAITING)] / self.step_s[:, None], axis=0))

    def between(self, begin: float, end: float) -> StepSeconds:
        """The rows that ended in a span of time, in seconds since 1970."""
        return self._only((self.at >= begin) & (self.at <= end))

    def blocks(self, cuts: Iterable[npt.NDArray[np.intp]]) -> list[StepSeconds]:
        """The rows in blocks, each with the rows of these numbers."""
        return [self._only(some) for some in cuts]

    def _only(self, some: npt.NDArray[Any]) -> StepSeconds:
        return replace(self, seconds=self.seconds[some], at=self.at[some])

    def typical(self) -> dict[str, float]:
        """The mean seconds of each part over the middle half of the rows by the step's seconds; the parts sum to the
        typical step. Few steps that something disturbs do not change it. Waiting is divided as in `Parts`."""
        order, outer = np.argsort(self.step_s, kind="stable"), len(self) // 4
        of_ranks = self.seconds[order[outer : len(self) - outer]].mean(axis=0)
        means = [dict(zip(self.columns, map(float, of_rank), strict=True)) for of_rank in of_ranks]
        found = means[self.pace]
        waiting = found.pop(WAITING)
        bubble = 0.0
        if self.every_rank:
            numbered = [{**mean, WAITING: 0.0, "rank": rank} for rank, mean in enumerate(means)]
            numbered[self.pace][WAITING] = waiting
            bubble = bubbles(numbered, self.plan)[self.pace]
        return {**found, "communication_s": waiting - bubble, "bubble_s": bubble}

    def mean_step_s(self) -> float:
        """Mean seconds of a step over all rows, with those that something disturbs."""
        return float(self.step_s.mean())


def rows_of(run: Run, warmup: int) -> StepSeconds:
    """The steps of a run. The first `warmup` steps after its begin and after each continuation are left out.

    Raises UserError: a file of the run is damaged.
    """
    begins = [0, *(event["step"] for event in run.events if event["kind"] == "resume" and event.get("step"))]
    found = _of_ranks(run, begins, warmup)
    return found if found is not None and len(found) >= ENOUGH else _of_metrics(run, begins, warmup)


def _of_ranks(run: Run, begins: Sequence[int], warmup: int) -> StepSeconds | None:
    """The rows of ranks.csv, where all ranks that the run has now have one; None without such rows or ranks."""
    if run.num_workers == 1:
        return None
    computing = [row for row in run.ranks if row["rank"] < run.num_workers]
    groups = [(step, list(rows)) for step, rows in groupby(computing, key=itemgetter("step"))]
    whole = [
        (step, rows)
        for step, rows in groups
        if len(rows) == run.num_workers and all(row["rank"] == rank for rank, row in enumerate(rows))
    ]
    if not whole:
        return None
    seconds = np.array([[[row[name] for name in COLUMNS] for row in rows] for _, rows in whole])
    steps, lasts = (np.array([float(rows[0][name]) for _, rows in whole]) for name in ("steps", "step"))
    ends = _ends(run, np.cumsum(seconds.sum(axis=2).mean(axis=1) * steps))
    kept = _warm(lasts - steps, begins, warmup)
    found = StepSeconds(run.plan, _span(run)[0], COLUMNS, seconds[kept], ends[kept], 0, every_rank=True)
    return replace(found, pace=int(np.argmin(found.waiting))) if len(found) else found


def _of_metrics(run: Run, begins: Sequence[int], warmup: int) -> StepSeconds:
    """The rows of metrics.csv, which are of rank 0. Older versions did not measure the two passes apart."""
    found = dict(run.columns)
    if run.num_ranks == 1:  # it waits for nobody; older versions counted there what it does in `reduce`
        waited = np.nan_to_num(found[WAITING], nan=0.0)
        found |= {WAITING: np.zeros_like(waited), "other_s": found["other_s"] + waited}
    names: tuple[str, ...] = COLUMNS
    if np.isnan(found["forward_s"]).any():
        names = tuple(name for name in (*COLUMNS[:1], "compute_s", *COLUMNS[1:]) if name not in PASSES)
    seconds = np.stack([_column(found, name, names) for name in names], axis=-1)
    steps = np.diff(found["step"], prepend=0.0)
    kept = _warm(found["step"] - 1, begins, warmup) & np.isfinite(seconds).all(axis=1)
    ends = _ends(run, np.cumsum(found["step_s"] * steps))
    return StepSeconds(
        run.plan, _span(run)[0], names, seconds[kept][:, None], ends[kept], 0, every_rank=run.num_workers == 1
    )


def _column(found: Mapping[str, Values], name: str, names: Sequence[str]) -> Values:
    """A part. Older versions did not measure the rest of the step: it is what the other parts leave."""
    if name != "other_s" or not np.isnan(found[name]).any():
        return found[name]
    return found["step_s"] - sum(found[other] for other in names if other != name)


def _warm(before: Values, begins: Sequence[int], warmup: int) -> npt.NDArray[np.bool_]:
    """Which rows have no step of a warm-up. `before`: [rows], steps done before the first step of a row."""
    last = np.array(sorted(begins))[np.searchsorted(sorted(begins), before, side="right") - 1]
    return np.asarray(before - last >= warmup)


def _ends(run: Run, trained_s: Values) -> Values:
    """When each row ended, in seconds since 1970. `trained_s`: [rows], seconds of training up to then.

    What is between steps, such as validation, is taken to be spread evenly over the run.
    """
    begin, end = _span(run)
    stretch = (end - begin) / trained_s[-1] if end is not None and len(trained_s) else 1.0
    return begin + trained_s * stretch


def _span(run: Run) -> tuple[float, float | None]:
    """When the run first began, and when it last ended, in seconds since 1970; None: it has not ended."""
    begins, ends = _times(run, BEGINS), _times(run, tuple(STATES))
    return begins[0] if begins else 0.0, ends[-1] if ends else None


def _times(run: Run, kinds: Sequence[str]) -> list[float]:
    found = [event for event in run.events if event["kind"] in kinds and event.get("wall_time")]
    return [datetime.fromisoformat(event["wall_time"]).timestamp() for event in found]
