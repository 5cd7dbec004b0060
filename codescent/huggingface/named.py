"""In: a config with names of a hub. Out: the config with their commits; what it names, downloaded into the cache.
Does not download itself (codescent/hub does) and reads no tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from codescent.base.errors import UserError, of_each
from codescent.base.hub_name import HubName
from codescent.config.hub_keys import CORPUS, HUB_KEYS, TOKENIZER, VALIDATION, WEIGHTS, hub_key, names_in, with_names
from codescent.config.load import LoadedConfig
from codescent.config.mixture import MIXTURE, place_of
from codescent.config.sections import Config
from codescent.hub import needed
from codescent.hub.cache import snapshot_of
from codescent.hub.obtain import CachedFiles, Choice, held, listed, obtain, pinned, repair
from codescent.huggingface.folder import keys_of_model

CHOICES: Mapping[str, Choice] = {
    WEIGHTS: needed.for_weights,
    TOKENIZER: needed.for_tokenizer,
    CORPUS: needed.for_corpus,
    VALIDATION: needed.for_corpus,
}
"""Which files of a repository each key needs."""
DATA_KEYS = (TOKENIZER, CORPUS, VALIDATION)


def with_commits(loaded: LoadedConfig, recorded: Mapping[str, HubName]) -> LoadedConfig:
    """The config with the commit of each name of a hub, and with the path of a corpus that has one file.

    Args:
        loaded: a config.
        recorded: names of the run to resume, by key: if a key names the same, it gets this commit.

    Raises:
        UserError: every name that cannot be resolved.
    """
    named = names_in(loaded.config)
    names = of_each(
        named,
        lambda key: _with_commit(key, named[key], recorded.get(key)),
        lambda key: f"{loaded.origins[MIXTURE if place_of(key) else key]}: {key} = ",
    )
    return dataclasses.replace(loaded, config=with_names(loaded.config, names)) if names else loaded


def _with_commit(key: str, name: HubName, recorded: HubName | None) -> HubName:
    if recorded is not None and not name.is_pinned and _names_same(name, recorded):
        return recorded
    found = pinned(name)
    return needed.corpus_name(found, listed(found)) if found.is_dataset and not found.path else found


def _names_same(name: HubName, recorded: HubName) -> bool:
    """Whether the name of a config is that of a run, which has a commit, and a path where the config may have none."""
    return name.names_same(recorded if name.path else dataclasses.replace(recorded, path=""))


def obtain_config(name: HubName) -> None:
    """Download config.json of a pinned model. Raises UserError: see `hub.obtain.obtain`."""
    obtain(name, needed.for_config)


def refuse_unknown(name: HubName) -> None:
    """Raise UserError if codescent cannot build a pinned model, by its config.json: before a long download."""
    repair(name, needed.for_config)
    try:
        keys_of_model(snapshot_of(name))
    except UserError as error:
        raise UserError(*(f"{name}: {problem}" for problem in error.problems)) from error


def obtain_model(name: HubName) -> CachedFiles:
    """Download a pinned model, and read what is in the cache. Raises UserError: see `refuse_unknown` and `repair`."""
    refuse_unknown(name)
    return repair(name, needed.for_weights)


def obtain_all(
    config: Config, keys: tuple[str, ...] = HUB_KEYS, *, repairs: bool = False
) -> list[tuple[str, CachedFiles]]:
    """Download what a config with commits names, as far as the cache lacks it.

    Args:
        config: see `with_commits`.
        keys: only these.
        repairs: read what the cache has, too, and download what is damaged again.

    Returns:
        Each key with its files.

    Raises:
        UserError: every key whose files cannot be had.
    """
    return _for_each(config, keys, repair if repairs else obtain)


def all_held(config: Config) -> list[tuple[str, CachedFiles]]:
    """What the cache has of what a config names, by key. Raises UserError: every name that cannot be used."""
    return _for_each(config, HUB_KEYS, held)


def _for_each(
    config: Config, keys: tuple[str, ...], get: Callable[[HubName, Choice], CachedFiles]
) -> list[tuple[str, CachedFiles]]:
    """The files of each key that names something of a hub. Raises UserError: the problems of all keys."""
    names = {key: name for key, name in names_in(config).items() if hub_key(key) in keys}
    return list(of_each(names, lambda key: get(names[key], CHOICES[hub_key(key)]), lambda key: f"{key} = ").items())


def keys_of_run(*, resumes: bool, has_adapters: bool) -> tuple[str, ...]:
    """The keys whose files a run reads. A resumed run has its weights, unless they stay frozen under adapters."""
    return DATA_KEYS if resumes and not has_adapters else HUB_KEYS
