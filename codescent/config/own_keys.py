"""In: a config. Out: the keys whose values are names of users' code (mymodule:NAME); what is known of that code.
Does not import the code before somebody asks what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.base.errors import UserError
from codescent.base.own_names import code_of, is_own_name
from codescent.config.effects import values_of
from codescent.config.sections import Config

OWN_KEYS = (
    *("model.kind", "data.corpus", "data.validation", "data.task", "data.reward"),
    *("optimizer.kind", "optimizer.schedule"),
)
"""The keys that accept such a name, and that decide the losses; so do those of a corpus of data.mixture. `log.to` names
functions that decide none."""


def own_names_in(config: Config) -> dict[str, str]:
    """The names of users' code in a config, by key."""
    return {key: value for key, value in values_of(config, OWN_KEYS).items() if is_own_name(value)}


def own_code(config: Config) -> dict[str, dict[str, Any]]:
    """What is known of this code, by key: see `code_of`. Raises UserError: all names that stand for nothing."""
    found, problems = dict[str, dict[str, Any]](), list[str]()
    for key, name in own_names_in(config).items():
        try:
            found[key] = code_of(key, name)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def code_facts(config: Config) -> dict[str, str]:
    """The hashes of this code, by name in messages, equal on all ranks. Raises UserError as `own_code`."""
    return {f"the code of {key} = {code['name']}": code["sha256"] for key, code in own_code(config).items()}


def changed_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each key whose code is not that of an earlier command. Both are of `own_code`."""
    lines = []
    for key, code in now.items():
        old = (before.get(key) or {}).get("sha256")
        if old not in (None, code["sha256"]):
            lines.append(
                f"the code of {key} = {code['name']} has changed since the last command ({old}, now {code['sha256']}: "
                f"{', '.join(code['files'])}); from here on the losses may be others"
            )
    return lines
