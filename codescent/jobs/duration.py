"""In: the time limit of a job, the steps of a run that has begun, the peak of a device. Out: whether the steps fit.
Does not measure, and does not guess: where no step was measured, it gives a lower bound or says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from codescent.base.amounts import of_seconds
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.build import saved_plan
from codescent.config.sections import Config
from codescent.jobs.device import device_of
from codescent.jobs.findings import Findings, Preflight
from codescent.jobs.grace import grace_of, saves_s
from codescent.jobs.site import NONE, seconds_of
from codescent.plan import Plan
from codescent.record import RunFolder

MEASURED = 100
"""The newest rows of metrics that count."""
RESTARTED = ("slurm", "pbs", "torchx", "kubernetes")
"""Targets that start the job again after its time limit; of PBS by a script that knows its own file."""


@dataclass(frozen=True)
class RunProgress:
    """What a run that has begun says: the steps done, seconds of a step and of each save.

    `layout`: why its steps say nothing of the job; "": they do.
    """

    steps: int
    step_s: float | None
    saves_s: Sequence[float] = ()
    layout: str = ""


def check(asked: Preflight, found: Findings, config: Config, plan: Plan) -> None:
    """Compare the time limit with the steps that are left."""
    if asked.site.time is None or config.train.num_epochs is not None:
        return
    done = measured(asked, plan)
    left = config.train.num_steps - done.steps
    if left < 1:
        return
    limit_s, grace_s = seconds_of(asked.site.time), grace_of(done.saves_s)
    if limit_s <= grace_s:  # the job itself is refused for it
        return
    budget = _Budget(asked, limit_s - grace_s)
    if done.step_s is not None and not done.layout:
        saves = left / config.checkpoint.every if config.checkpoint.every else 1.0
        needed_s = left * done.step_s + saves * median(done.saves_s or [0.0])
        said = f"{counted(left, 'step')} of {of_seconds(done.step_s)}, as measured, take {of_seconds(needed_s)}"
        budget.check(found, done.step_s, needed_s, said)
        return
    least_s = least_step_s(asked, plan)
    why = done.layout or "no step of this run was measured"
    if least_s is None:
        found.notes.append(f"site.time = {asked.site.time}: it is not known whether {counted(left, 'step')} fit: {why}")
        return
    said = (
        f"{counted(left, 'step')} take at least {of_seconds(left * least_s)} at the peak of {asked.site.device_type}, "
        f"which no run reaches ({why})"
    )
    if not budget.check(found, least_s, left * least_s, said):
        found.notes.append(f"site.time = {asked.site.time}: {said}; whether they fit is not known")


class _Budget:
    """The time that jobs have for steps.

    Args:
        asked: target, site and number of jobs.
        usable_s: seconds of one start of a job.
    """

    def __init__(self, asked: Preflight, usable_s: int) -> None:
        self.asked, self.usable_s = asked, usable_s
        self.restarts = asked.target in RESTARTED and (asked.saved or asked.target != "pbs")
        self.starts = asked.times * (1 + asked.site.requeues * self.restarts)

    def check(self, found: Findings, step_s: float, needed_s: float, said: str) -> bool:
        """Add a problem or a note if the time does not suffice. Returns whether it has added one."""
        asked, limit = self.asked, f"site.time = {self.asked.site.time}"
        if step_s > self.usable_s:
            found.refuse([
                f"{limit}: a step takes {of_seconds(step_s)}, more than the {of_seconds(self.usable_s)} that a job has "
                "until it saves: no job would get anywhere; give more"
            ])  # fmt: skip
            return True
        if needed_s <= self.starts * self.usable_s:
            return False
        starts = math.ceil(needed_s / self.usable_s)
        if not self.restarts:
            found.notes.append(
                f"{limit}: {said}, so the run saves and stops before its end; start it {starts} times in all"
            )
            return True
        has = f"{counted(self.starts, 'start')} of a job (site.requeues = {asked.site.requeues}"
        has += f", --times {asked.times})" if asked.times > 1 else ")"
        more = f", or --times {math.ceil(starts / (1 + asked.site.requeues))}" if asked.target == "slurm" else ""
        found.refuse([
            f"{limit}: {said}, but {has} have {of_seconds(self.starts * self.usable_s)}; give more time, or "
            f"site.requeues={math.ceil(starts / asked.times) - 1}{more}"
        ])  # fmt: skip
        return True


def measured(asked: Preflight, plan: Plan) -> RunProgress:
    """What the run folder says of the run's steps; nothing where it has not begun."""
    try:
        run = RunFolder.open(asked.run)
        saves, rows, before = saves_s(asked.run), run.read_metrics(), saved_plan(run)
    except UserError:  # there is no run, or it is damaged, which is a problem of its own
        return RunProgress(0, None)
    seconds = [row["step_s"] for row in rows[-MEASURED:] if row.get("step_s")]
    steps = max((row["step"] for row in rows), default=0)
    layout = "" if _alike(before, plan) else f"its steps were measured with another layout ({_ranks(before)})"
    return RunProgress(steps, median(seconds) if seconds else None, saves, layout if seconds else "")


def _ranks(plan: Plan) -> str:
    return counted(plan.world_size, "rank")


def _alike(before: Plan, plan: Plan) -> bool:
    """Whether a step of both plans does the same work on each rank."""
    return (before.mesh, before.work, before.layout) == (plan.mesh, plan.work, plan.layout)


def least_step_s(asked: Preflight, plan: Plan) -> float | None:
    """Seconds that the products of a step need at the peaks of all devices; None: the device, or its peak, is unknown.

    Attention is not counted: kernels leave out what a causal mask hides.
    """
    if asked.site.device_type is None or asked.site.devices == NONE:
        return None
    peak = device_of(asked.site.device_type).peak_flops_per_s(plan.work.precision)
    return None if peak is None else plan.flops().dense_flops / (peak * plan.mesh.world_size)
