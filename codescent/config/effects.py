"""In: a config. Out: the keys whose values change nothing, each with the reason.
Does not know tasks and models (tasks and build do) and does not decide what is refused (preflight.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from codescent.config.contradictions import is_given
from codescent.config.keys import Only, only_of
from codescent.config.mixture import FIELDS, MIXTURE, place_of
from codescent.config.parallel import CHOSEN
from codescent.config.sections import SECTIONS, Config
from codescent.config.words import toml_value

ONLY: Mapping[str, Only] = {
    f"{section}.{name}": only
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
    if (only := only_of(field)) is not None
}
"""The condition of each key that has one, by "section.key"."""


def value_of(config: Config, key: str) -> Any:
    """The value of "section.key", or of a place in the mixture, such as data.mixture.wiki.corpus."""
    if (place := place_of(key)) is not None:
        entries = config.data.mixture or ()
        return next((getattr(entry, place.field) for entry in entries if entry.name == place.name), None)
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def values_of(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """The values of keys; with a key of a corpus, such as data.corpus, also those of each corpus of the mixture."""
    given = list(keys)
    fields = [field for field in FIELDS if f"data.{field}" in given]
    given += [f"{MIXTURE}.{entry.name}.{field}" for entry in config.data.mixture or () for field in fields]
    return {key: value_of(config, key) for key in given}


def is_default(config: Config, key: str) -> bool:
    """Whether a key has its default: then nobody has asked for an effect. The default of a place in the mixture is that
    it is not given."""
    if place_of(key) is not None:
        return value_of(config, key) is None
    section, name = key.split(".")
    return bool(value_of(config, key) == SECTIONS[section].model_fields[name].default)


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Keys that other keys make useless: "section.key", and the reason as a clause. Keys with defaults are left out."""
    for key, only in ONLY.items():
        if config.parallel.layout == "auto" and only.key in CHOSEN and not is_given(config, only.key):
            continue  # its value is not chosen yet
        other = value_of(config, only.key)
        if not (is_default(config, key) or only.test(other)):
            yield key, f"needs {only.words}, and {only.key} is {toml_value(other)}"
    yield from _begin_too_late(config)
    parallel = config.parallel
    if parallel.local_steps != "equal" and parallel.updates == "asynchronous" and parallel.average_every == 1:
        yield "parallel.local_steps", "needs parallel.average_every >= 2, which is 1"
    if (
        config.survive.on_loss == "stop"
        and not parallel.restarts
        and not is_default(config, "survive.restart_window_s")
    ):
        yield "survive.restart_window_s", 'needs survive.on_loss other than "stop", or parallel.restarts above 0'


def effective(config: Config) -> Config:
    """The config with the defaults of the keys that have no effect: what codescent writes has no such key."""
    sections: dict[str, dict[str, Any]] = {}
    for section, name in (key.split(".") for key, _ in without_effect(config)):
        sections.setdefault(section, {})[name] = SECTIONS[section].model_fields[name].default
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _begin_too_late(config: Config) -> Iterator[tuple[str, str]]:
    """Keys whose effect begins after the last step. With train.num_epochs the last step is not known here."""
    parallel, survive, steps = config.parallel, config.survive, config.train.num_steps
    begins = (
        ("parallel.average_every", "parallel.synchronous_steps", parallel.synchronous_steps),
        ("parallel.wire", "parallel.wire_from", parallel.wire_from),
        ("survive.on_spike", "survive.spike_window", survive.spike_window),  # all of it is compared with
    )
    for key, since, first in begins:
        if config.train.num_epochs is None and first >= steps and not is_default(config, key):
            yield key, f"begins after {since} = {first}, and the run has {steps} steps (train.num_steps)"
