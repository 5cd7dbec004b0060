"""In: values by config key, a number of ranks. Out: their plan, or why it is refused, and the changes that are advised.
Does not check the advice: test_refusals.py and test_advice.py do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal
from codescent.build import build
from codescent.config.sections import Config
from codescent.plan import Plan

MODEL = {"num_layers": 6, "num_heads": 12, "hidden_dim": 24, "seq_len": 48}
Keys = Mapping[str, Any]


def config_of(keys: Keys) -> Config:
    """The config of MODEL and a batch of 12, changed by "section.key": value; None is auto."""
    batch = {} if keys.get("train.global_batch_tokens") else {"global_batch_size": 12}
    sections: dict[str, dict[str, Any]] = {"model": dict(MODEL), "train": batch}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


def planned(keys: Keys, ranks: int) -> Plan:
    """The plan of `config_of`."""
    return build(config_of(keys), 11, ranks)


def advised(problem: str) -> tuple[Change, ...]:
    """The changes with which it would do. A problem without any may be a plain sentence."""
    return problem.changes if isinstance(problem, Refusal) else ()


def problems_of(keys: Keys, ranks: int) -> tuple[str, ...]:
    """Why a plan is refused; empty if it is not, or if the config contradicts itself before there is a plan."""
    try:
        config = config_of(keys)
    except ValueError:
        return ()
    try:
        build(config, 11, ranks)
    except UserError as error:
        return error.problems
    return ()


def refusals(keys: Keys, ranks: int) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        planned(keys, ranks)
    return caught.value.problems
