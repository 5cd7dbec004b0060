"""In: a run folder. Out: the plan with which the run began, also of an earlier version.
Does not compare it with another plan (preflight.py does)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.build.plan import activations, build, deferred, made_again, operators
from codescent.config.sections import Config
from codescent.config.toml_file import loads
from codescent.plan import Mesh, OlderPlan, Plan
from codescent.record import RunFolder
from codescent.strategies import decides


def plan_of(data: Mapping[str, Any]) -> Plan:
    """The plan of a plan.json. A version that did not write which keys decide the losses, what forward keeps, or what
    it computes, had the rules of this one.

    Raises: as `Plan.from_json`.
    """
    plan = Plan.from_json(data)
    plan = plan if plan.decides else replace(plan, decides=decides(plan))
    try:
        plan = plan if plan.activations else replace(plan, activations=activations(plan, plan.objective))
        plan = plan if plan.again else replace(plan, again=made_again(plan, plan.objective))
        plan = plan if plan.deferred else replace(plan, deferred=deferred(plan))
        return plan if plan.operators else replace(plan, operators=operators(plan, plan.objective))
    except ArithmeticError as error:  # sizes of no model
        raise ValueError(f"model: {error}") from error


_last: list[tuple[dict[str, Any], Plan]] = []
"""The JSON data that this process has read last, and their plan: a resume asks several times."""


def saved_plan(folder: RunFolder) -> Plan:
    """The plan with which a run began. A plan of an earlier version is built again from the run's config.

    Raises:
        UserError: the folder's config or plan is damaged.
    """
    if _last and _last[0][0] == folder.plan:
        return _last[0][1]
    try:
        plan = plan_of(folder.plan)
        _last[:] = [(folder.plan, plan)]
        return plan
    except OlderPlan:
        return _built_again(folder)
    except (KeyError, TypeError, ValueError) as error:
        file = folder.path / "plan.json"
        raise UserError(
            f"{file}: damaged: not the plan of a run ({error}); restore the file, or start a new run.name"
        ) from error


def _built_again(folder: RunFolder) -> Plan:
    """The plan of a run's config, in the form of this version."""
    try:
        config = Config.model_validate(loads(folder.config_text))
        mesh = Mesh(**folder.plan["mesh"])
        return build(config, folder.plan["work"]["vocab_size"] or None, mesh.world_size)
    except (ValidationError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        said = f"{folder.path}: its config.toml or plan.json is not of this version ({error})"
        raise UserError(said) from error
