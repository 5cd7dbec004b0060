"""In: a run folder of a point. Out: what one repeat measured, in seconds, bytes and FLOP/s.
Does not compare repeats (evaluate.py does) and does not know how a run came to its folder (folder.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.errors import UserError
from codescent.cost.flop_formulas import flops_by, refused
from codescent.plan import AXES, FlopFormula
from codescent.plan.activations import CPU, CUDA
from codescent.planner.step_parts import of_busiest_stage
from codescent.record import METRICS_JSONL
from codescent.results import PARTS, Run, parts_of_ranks
from codescent.study.marks import Mark, MarkKind, mark


def going_on(run: Path) -> str:
    """What to do about a run folder that cannot be used."""
    return f"delete {run}, and the study goes on without this run"


@dataclass(frozen=True)
class Repeat:
    """One repeat of a point. None: unknown.

    Attributes:
        step_s: median seconds of its steps after the warm-up; of a table: seconds of what it measured.
        tokens: of a step, of all ranks: its work.
        flops: of a step, of all ranks.
        formula: by which they are counted; None: by who wrote the table.
        compute_s: forward and backward passes of a step, mean over ranks.
        parts_s: seconds of each part of `results.PARTS` in a step, mean over ranks; they sum to step_s.
        busiest_s: the same on the ranks of the stage that computes longest; without a pipeline on all ranks.
        mfu: those FLOPs / (step_s x the measured peak of all ranks).
        memory_bytes: largest peak of a rank.
        load: load of the machine before and after the run, per core.
        others: share of the machine's cores that other programs used meanwhile.
        wall_s: seconds of the whole run with its start.
        threads: of a rank, where they are those that compute: on a CPU.
        mesh: degree of each axis of its mesh; empty: unknown.
        notes: what a reader must know, such as that it was oversubscribed.
        run: its folder.
    """

    step_s: float
    number: int = 1
    tokens: float | None = None
    flops: float | None = None
    formula: FlopFormula | None = None
    compute_s: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    busiest_s: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    memory_bytes: int | None = None
    load: tuple[float, float] | None = None
    others: float | None = None
    wall_s: float | None = None
    threads: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Mark, ...] = ()
    run: str = ""

    @property
    def peak_s(self) -> float | None:
        """Seconds of a step at the measured peak; None: unknown."""
        return None if self.mfu is None else self.mfu * self.step_s


def repeat_of(
    run: Run,
    number: int,
    warmup: int,
    record: Mapping[str, Any],
    formula: FlopFormula = FlopFormula.ATTENTION,
) -> Repeat:
    """What a run measured after its first `warmup` steps.

    Args:
        run: it need not have ended.
        number: of the repeat, from 1.
        warmup: steps that are left out.
        record: what the study has noted about the run: load, others, wall_s.
        formula: by which FLOPs are counted.

    Raises UserError: no step after the warm-up, damaged files, or a formula that needs a plan of this version.
    """
    steps = run.after(warmup, "step_s")
    if not len(steps):
        raise UserError(
            f"{run.folder.path}: has no step after the {warmup} of the warm-up; {going_on(run.folder.path)}"
        )
    if not np.isfinite(steps).all():
        raise UserError(
            f"{run.folder.path / METRICS_JSONL}: a row after the warm-up has no step_s; {going_on(run.folder.path)}"
        )
    step_s, plan = float(np.median(steps)), run.plan
    ranks = parts_of_ranks(run, warmup)
    parts = {name: float(np.mean([getattr(of_rank, name) for of_rank in ranks])) for name in PARTS} if ranks else {}
    # The parts are means, and the step is a median, which a disturbed step does not move: keep the parts' shares.
    whole = sum(parts.values())
    parts = {name: seconds * step_s / whole for name, seconds in parts.items()} if whole else {}
    compute_s = parts["forward_s"] + parts["backward_s"] if parts else _median(run, warmup, "compute_s")
    speeds, mfu = (run.after(warmup, name) for name in ("tokens_per_s", "mfu"))
    flops, more = _flops(run, warmup, formula)
    peak_s = more * (mfu * steps)[np.isfinite(mfu * steps)]
    return Repeat(
        step_s=step_s,
        number=number,
        tokens=float(plan.work.tokens) if plan else float(np.median(speeds * steps)),
        flops=flops,
        formula=formula,
        compute_s=compute_s,
        parts_s=parts,
        busiest_s={name: share * step_s for name, share in of_busiest_stage(ranks, plan).items()} if plan else {},
        mfu=float(np.median(peak_s)) / step_s if len(peak_s) else None,
        memory_bytes=int(max(run.peak_memory_bytes)) if run.peak_memory_bytes else None,
        load=(record["load_before"], record["load_after"]) if "load_before" in record else None,
        others=record.get("others"),
        wall_s=record.get("wall_s"),
        threads=run.environment.get("num_threads") if run.environment.get("device") == "cpu" else None,
        mesh={axis: plan.mesh.degree(axis) for axis in AXES} if plan else {},
        notes=(mark(MarkKind.OVERSUBSCRIBED, threads=run.crowd[0], cores=run.crowd[1]),) if run.crowd else (),
        run=str(run.folder.path),
    )


def _flops(run: Run, warmup: int, formula: FlopFormula) -> tuple[float, float]:
    """FLOPs of a step by a formula, and how many times as many they are as in the metrics of the run."""
    plan, usual = run.plan, FlopFormula.ATTENTION
    if plan is None:
        if formula is not usual:
            where = f"{run.folder.path}: --formula {formula}"
            raise UserError(f"{where}: needs a plan of this version; without one the formula must be {usual}")
        return float(np.median(run.after(warmup, "flops_per_s") * run.after(warmup, "step_s"))), 1.0
    if why := refused(formula, plan):
        raise UserError(f"{run.folder.path}: {why}")
    kernels = CPU if run.environment.get("device", CPU) == CPU else CUDA  # all GPUs have those of CUDA
    flops = flops_by(formula, plan, kernels)
    return float(flops), flops / flops_by(usual, plan)


def _median(run: Run, warmup: int, column: str) -> float | None:
    """The median of a column after the warm-up; None: it has no values."""
    values = run.after(warmup, column)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None
