"""In: opened runs. Out: the numbers of each run that a report shows, and its name there.
Does not judge them (findings.py does) and does not write."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from codescent.base import warm_up
from codescent.base.counted import counted
from codescent.cost.memory import StateBytes, state_bytes, wire_bytes
from codescent.record.memory import MemoryRow
from codescent.report.metrics import Curves, of_run
from codescent.results import (
    PARTS,
    Interval,
    Parts,
    Run,
    median_of_many,
    parts_of_ranks,
    parts_of_servers,
)
from codescent.results.statistics import Values


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Speeds are medians over the steps after the first `warmup` ones.

    Attributes:
        run: the opened run.
        name: unique in the report.
        warmup_wanted: steps to leave out; None: `warm_up.wanted`.
    """

    run: Run
    name: str
    warmup_wanted: int | None = None

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return self.run.steps

    @cached_property
    def warmup(self) -> int:
        """Steps that are left out. Of a run that has no other steps, a part of them."""
        return warm_up.within(self.steps, self.warmup_wanted)

    @cached_property
    def step_s(self) -> Interval | None:
        """Seconds of a step, with the 95 % interval of the median; None: no step."""
        times = self._known("step_s")
        return median_of_many(times) if len(times) else None

    @cached_property
    def varies(self) -> float:
        """How much longer the slowest tenth of the steps takes than the median; NaN below ten steps."""
        times = self._known("step_s")
        return float(np.quantile(times, 0.9) / np.median(times) - 1) if len(times) >= 10 else math.nan

    def rate(self, column: str) -> float:
        """A rate of the metrics, such as tokens_per_s or mfu: median work over median time of a step; NaN: no value."""
        values, times = (self.run.after(self.warmup, name) for name in (column, "step_s"))
        known = np.isfinite(values * times)
        return float(np.median((values * times)[known]) / np.median(times[known])) if known.any() else math.nan

    @cached_property
    def ranks(self) -> Sequence[Parts]:
        """The parts of a step on each rank. Of a run so short that no row is left, the rows of all steps."""
        return parts_of_ranks(self.run, self.warmup) or parts_of_ranks(self.run)

    @cached_property
    def servers(self) -> Sequence[Parts]:
        """The parts of a step on each rank that is a parameter server and nothing else."""
        return parts_of_servers(self.run, self.warmup) or parts_of_servers(self.run)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """The share of each part in the time of all ranks; empty: unknown."""
        whole = sum(parts.step_s for parts in self.ranks)
        if not whole:
            return {}
        return {name: sum(getattr(parts, name) for parts in self.ranks) / whole for name in PARTS}

    @property
    def compute_share(self) -> float:
        """The share of forward and backward passes; NaN: unknown."""
        return self.shares["forward_s"] + self.shares["backward_s"] if self.shares else math.nan

    @cached_property
    def beside(self) -> Mapping[str, float]:
        """Seconds that the run has spent beside its steps, by what it did, the longest first."""
        found: Counter[str] = Counter()
        for event in self.run.events:
            seconds = event.get("seconds")
            if event.get("kind") == "beside" and isinstance(seconds, Mapping):
                known = {str(what): value for what, value in seconds.items() if isinstance(value, int | float)}
                found.update({what: value for what, value in known.items() if math.isfinite(value)})
        return dict(found.most_common())

    @property
    def memory_bytes(self) -> Sequence[float]:
        """Peak memory of each rank; of rank 0 alone if there is no ranks.csv; empty: unknown."""
        return self.run.peak_memory_bytes

    @cached_property
    def memory(self) -> Mapping[int, MemoryRow]:
        """The last row of memory.csv of each rank: its memory by part; empty: an older version wrote the run."""
        rows = self.run.folder.last_memory()
        return {rank: rows[rank] for rank in sorted(rows) if rank < self.run.num_ranks}

    @cached_property
    def train_loss(self) -> float:
        """The mean training loss of the last tenth of the rows, at most 50; NaN: none is finite."""
        losses = self.run.columns["train_loss"]
        last = losses[-max(1, min(50, len(losses) // 10)) :]
        return float(np.mean(last[np.isfinite(last)])) if np.isfinite(last).any() else math.nan

    @cached_property
    def val_loss(self) -> float:
        """The lowest validation loss; NaN: none."""
        losses = self._known("val_loss", all_steps=True)
        return float(losses.min()) if len(losses) else math.nan

    @cached_property
    def curves(self) -> Curves:
        """The metrics as columns for drawing."""
        return of_run(self.run, self.name)

    @property
    def layout(self) -> str:
        """The axes with several ranks, such as "pp 2 x dp_replicate 2"; "1 rank". Then its servers."""
        if self.run.plan is None:
            return f"{self.run.num_ranks} ranks"
        mesh = self.run.plan.mesh
        axes = [f"{axis} {degree}" for axis in vars(mesh) if (degree := mesh.degree(axis)) > 1]
        zero = f", ZeRO {self.run.plan.layout.zero_stage}" if mesh.dp_shard > 1 else ""
        pipeline = f", {self.run.plan.layout.schedule}" if mesh.pp > 1 else ""
        servers = self.run.num_ranks - self.run.num_workers
        behind = f", {counted(servers, 'server')}" if servers else ""
        return (" x ".join(axes) or "1 rank") + zero + pipeline + behind

    @cached_property
    def state_bytes(self) -> StateBytes | None:
        """What the Plan says of the fullest rank: weights, gradients, optimizer state; None: no plan."""
        return None if self.run.plan is None else state_bytes(self.run.plan, servers=True)

    @cached_property
    def wire_bytes(self) -> float:
        """What the Plan says that the busiest rank sends in a step; NaN: no plan."""
        return math.nan if self.run.plan is None else wire_bytes(self.run.plan)

    def _known(self, column: str, *, all_steps: bool = False) -> Values:
        values = self.run.columns[column] if all_steps else self.run.after(self.warmup, column)
        return values[np.isfinite(values)]


def summaries(runs: Sequence[Run], depth: int = 1, warmup: int | None = None) -> list[Summary]:
    """A summary of each run. Runs of one name get as much of their paths as tells them apart.

    Args:
        runs: opened.
        depth: the least number of names of a path.
        warmup: steps to leave out; None: `warm_up.wanted` of each run.
    """
    paths = [Path(run.folder.path).resolve() for run in runs]
    names = [run.name if depth == 1 else "/".join(path.parts[-depth:]) for path, run in zip(paths, runs)]
    while doubled := {name for name, times in Counter(names).items() if times > 1}:
        depth += 1
        names = ["/".join(path.parts[-depth:]) if name in doubled else name for path, name in zip(paths, names)]
    return [Summary(run, name, warmup) for run, name in zip(runs, names, strict=True)]
