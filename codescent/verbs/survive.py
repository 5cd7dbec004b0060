"""In: a run that is checked. Out: what its launcher does about ranks that die; all reasons why it cannot.
Does not start a rank again (launch/local.py does)."""

from __future__ import annotations

from codescent.base.errors import UserError
from codescent.build.shrunk import shrunk
from codescent.build.survival import SurviveKeys, copies, nothing_to_compare, wrong_survival
from codescent.config.load import flat
from codescent.launch.losses import LossCount
from codescent.launch.places import FewerRanks, LossPolicy
from codescent.planner.fits import fits_cluster
from codescent.preflight import Checked


def survive_of(checked: Checked) -> LossPolicy | None:
    """What the launcher does about ranks that die; None: the run ends, or goes on without them (parallel.restarts).

    Raises UserError: [survive] asks for what the run does not have.
    """
    config, plan = checked.config, checked.plan
    keys, ranks = config.survive, plan.world_size
    wanted = SurviveKeys(keys.on_loss, keys.max_restarts, keys.restart_window_s, keys.spares)
    problems = wrong_survival(
        wanted,
        save_every=config.checkpoint.every,
        lost_whole=min(copies(plan), default=1) > 1,
        smaller=_why_not_smaller(checked) if keys.on_loss == "shrink" else "",
        launcher="",
    )
    if said := [*map(str, problems)]:
        raise UserError(*said)
    if keys.on_loss == "stop":
        return None
    losses = LossCount(keys.max_restarts, keys.restart_window_s, plan.work.global_batch_size)
    if keys.on_loss == "restart":
        return LossPolicy(losses, keys.spares)

    def fewer(there: int) -> FewerRanks | None:
        try:
            found = shrunk(config, checked.vocab_size, ranks, there, fits_cluster(config))
        except UserError:
            return None
        before = flat(config)
        values = {key: value for key, value in flat(found.config).items() if before.get(key) != value}
        return FewerRanks(found.ranks, values, found.notes)

    return LossPolicy(losses, keys.spares, fewer)


def notes_of(checked: Checked) -> list[str]:
    """Sentences on keys that do nothing in this run."""
    said = nothing_to_compare(checked.config.train.check_every, checked.plan)
    return [said] if said else []


def _why_not_smaller(checked: Checked) -> str:
    """Why there is no layout with one rank less; "": there is one."""
    ranks = checked.plan.world_size
    if ranks == 1:
        return "the run has one rank"
    try:
        shrunk(checked.config, checked.vocab_size, ranks, ranks - 1)
    except UserError as error:
        return str(error)
    return ""
