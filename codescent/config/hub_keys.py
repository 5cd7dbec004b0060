"""In: a config. Out: the keys whose values are names of a hub (hf://Qwen/Qwen3-0.6B); it with others.
Does not ask a hub (codescent/hub does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.base.hub_name import HubName, is_hub_name, parse
from codescent.config.effects import values_of
from codescent.config.mixture import place_of
from codescent.config.sections import Config

WEIGHTS, TOKENIZER, CORPUS, VALIDATION = "model.weights", "data.tokenizer", "data.corpus", "data.validation"
HUB_KEYS = (WEIGHTS, TOKENIZER, CORPUS, VALIDATION)
"""The keys that accept a name of a hub; so do those of a corpus of data.mixture."""


def names_in(config: Config) -> dict[str, HubName]:
    """The names of a hub in a config, by key."""
    return {key: parse(str(value)) for key, value in values_of(config, HUB_KEYS).items() if is_hub_name(value)}


def with_names(config: Config, names: Mapping[str, HubName]) -> Config:
    """The config with these names."""
    sections: dict[str, Any] = {}
    for key, name in names.items():
        section, _, short = key.partition(".")
        before = sections.get(section, getattr(config, section))
        value: object = str(name)
        if (place := place_of(key)) is not None:
            short, changed = "mixture", {place.field: value}
            value = tuple(
                one.model_copy(update=changed) if one.name == place.name else one for one in before.mixture or ()
            )
        sections[section] = before.model_copy(update={short: value})
    return config.model_copy(update=sections)


def hub_key(key: str) -> str:
    """The one of HUB_KEYS whose values a key has: that of data.mixture.wiki.corpus is data.corpus."""
    place = place_of(key)
    return key if place is None else f"data.{place.field}"


def words_of(config: Config) -> list[str]:
    """The names as words of a command line."""
    return [f"{key}={name}" for key, name in names_in(config).items()]
