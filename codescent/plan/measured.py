"""In: the facts of a model in plan.json. Out: the metrics columns that its layers measure, beside those of every run.
Does not measure anything (strategies/expert_loads.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_EXPERTS = ("expert_load_max", "expert_load_min", "expert_dropped", "balance_loss", "router_z_loss")
"""Columns of a model with experts."""


def measured_columns(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of a plan.json."""
    model = plan.get("model")
    return OF_EXPERTS if isinstance(model, Mapping) and model.get("num_experts") else ()
