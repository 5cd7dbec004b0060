"""In: a run that is checked. Out: what its launcher does about ranks that die; all reasons why it cannot.
Does not start a rank again (launch/local.py does)."""

from __future__ import annotations

import statistics

from codescent.base.errors import UserError
from codescent.build.survival import copies, nothing_to_compare, short_deadlines, wrong_survival
from codescent.config.sections import Config
from codescent.jobs.layouts import layouts_of
from codescent.jobs.survival import why_not_smaller
from codescent.launch.losses import LossCount
from codescent.launch.places import LossPolicy
from codescent.preflight import Checked, run_folder
from codescent.record import RunFolder

LAST_STEPS = 50
"""So many steps say how long one takes."""


def survive_of(checked: Checked, *, resume: bool) -> LossPolicy | None:
    """What the launcher does about ranks that die; None: the run ends, or goes on without them (parallel.restarts).

    `resume`: the run has steps that were measured.

    Raises UserError: [survive] asks for what the run does not have.
    """
    config, plan = checked.config, checked.plan
    keys, ranks = config.survive, plan.world_size
    problems = wrong_survival(
        keys,
        save_every=config.checkpoint.every,
        lost_whole=min(copies(plan), default=1) > 1,
        smaller=why_not_smaller(config, checked.vocab_size, ranks),
    )
    deadlines = {"parallel.stopped_s": config.parallel.stopped_s, "parallel.timeout_s": config.parallel.timeout_s}
    step_s = _step_s(config) if resume else 0.0
    if said := [*map(str, problems), *short_deadlines(deadlines, step_s)]:
        raise UserError(*said)
    if keys.on_loss == "stop":
        return None
    losses = LossCount(keys.max_restarts, keys.restart_window_s, plan.work.global_batch_size)
    if keys.on_loss == "restart":
        return LossPolicy(losses, keys.spares)
    return LossPolicy(losses, keys.spares, layouts_of(config, checked.vocab_size, ranks))


def _step_s(config: Config) -> float:
    """The median of the last steps of the run that is resumed; 0: it has none."""
    rows = RunFolder.open(run_folder(config)).read_metrics()[-LAST_STEPS:]
    return statistics.median(float(row["step_s"]) for row in rows) if rows else 0.0


def notes_of(checked: Checked) -> list[str]:
    """Sentences on keys that do nothing in this run."""
    said = nothing_to_compare(checked.config.train.check_every, checked.plan)
    return [said] if said else []
