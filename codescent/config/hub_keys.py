"""In: a config. Out: the keys whose values are names of a hub (hf://Qwen/Qwen3-0.6B); it with others.
Does not ask a hub (codescent/hub does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.base.hub_name import HubName, is_hub_name, parse
from codescent.config.effects import value_of
from codescent.config.sections import Config

WEIGHTS, TOKENIZER, CORPUS, VALIDATION = "model.weights", "data.tokenizer", "data.corpus", "data.validation"
HUB_KEYS = (WEIGHTS, TOKENIZER, CORPUS, VALIDATION)
"""The keys that accept a name of a hub."""


def names_in(config: Config) -> dict[str, HubName]:
    """The names of a hub in a config, by key."""
    values = {key: value_of(config, key) for key in HUB_KEYS}
    return {key: parse(str(value)) for key, value in values.items() if is_hub_name(value)}


def with_names(config: Config, names: Mapping[str, HubName]) -> Config:
    """The config with these names."""
    sections: dict[str, Any] = {}
    for key, name in names.items():
        section, _, short = key.partition(".")
        before = sections.get(section, getattr(config, section))
        sections[section] = before.model_copy(update={short: str(name)})
    return config.model_copy(update=sections)


def words_of(config: Config) -> list[str]:
    """The names as words of a command line."""
    return [f"{key}={name}" for key, name in names_in(config).items()]
