"""In: the plan of a run, as JSON data. Out: the metrics columns of what its layers and its objective measure.
Does not measure anything (strategies/expert_loads.py and operators/preferences.py do)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.plan.objective import OF_ANSWERS, OF_MODULES, OF_PAIRS, VAL_REWARD, measures_of_policy

OF_EXPERTS = ("expert_load_max", "expert_load_min", "expert_dropped", "balance_loss", "router_z_loss")
"""Columns of a model with experts."""


def measured_columns(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of a plan.json, beside those of every run; empty: it has none, or the plan is older."""
    model, objective = plan.get("model"), plan.get("objective")
    of_model = OF_EXPERTS if isinstance(model, Mapping) and model.get("num_experts") else ()
    if isinstance(objective, Mapping) and objective.get("mtp_weight"):
        return (*of_model, *OF_MODULES)
    preference, policy = (
        objective.get(name) if isinstance(objective, Mapping) else None for name in ("preference", "policy")
    )
    if isinstance(policy, Mapping):
        measures = measures_of_policy(kl=policy.get("kl", 0.0), updates=policy.get("updates", 1))
        return (*of_model, *measures, VAL_REWARD)
    if not isinstance(preference, Mapping):
        return of_model
    return (*of_model, *(OF_ANSWERS if preference.get("answers") else OF_PAIRS))
