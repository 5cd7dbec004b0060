"""In: arguments of `codescent fetch`: a config, or names of a hub. Out: their files in the cache, verified; a table.
Does not prepare a corpus (`codescent data` does) and starts no run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_bytes
from codescent.base.counted import counted
from codescent.base.errors import UserError, of_each
from codescent.base.hub_name import HubName, is_hub_name, parse
from codescent.base.output import say
from codescent.build import task_request
from codescent.config.hub_keys import HUB_KEYS, WEIGHTS, names_in
from codescent.config.sections import Config
from codescent.hub import needed
from codescent.hub.cache import root
from codescent.hub.obtain import CachedFiles, Choice, held, listed, pinned, repair
from codescent.huggingface.named import all_held, obtain_all, obtain_model, refuse_unknown
from codescent.models import READ_CONFIG
from codescent.verbs.config import resolved_of


def main(arguments: Namespace) -> int:
    """Download what a config or a name of a hub needs, and print where it is."""
    if is_hub_name(arguments.config):
        found = _of_names([arguments.config, *arguments.overrides], dry_run=arguments.dry_run)
    else:
        found = _of_config(arguments)
    say(_lines(found, dry_run=arguments.dry_run))
    return 0


def _of_names(words: Sequence[str], *, dry_run: bool) -> list[tuple[str, CachedFiles]]:
    """The files of names. Raises UserError: every name that is wrong, before a download; then those that fail."""
    names = of_each(words, _wanted)
    return list(of_each(names, lambda word: _obtained(*names[word], dry_run=dry_run)).items())


def _wanted(word: str) -> tuple[HubName, Choice]:
    """A name with its commit, and which files: of a model weights and tokenizer, or its tokenizer alone; of a data set
    a corpus."""
    try:
        name = parse(word)
    except ValueError as error:
        raise UserError(f"{word}: {error}") from error
    name = pinned(name)
    if name.is_dataset:
        return needed.corpus_name(name, listed(name)), needed.for_corpus
    files = listed(name).files
    has_model = needed.CONFIG in files and any(path.endswith((".safetensors", *needed.PICKLES)) for path in files)
    return name, needed.for_weights if has_model else needed.for_tokenizer


def _obtained(name: HubName, choose: Choice, *, dry_run: bool) -> CachedFiles:
    if dry_run:
        return held(name, choose)
    return obtain_model(name) if choose is needed.for_weights else repair(name, choose)


def _of_config(arguments: Namespace) -> list[tuple[str, CachedFiles]]:
    """The files of all names in a config."""
    config = resolved_of(arguments).config
    names = names_in(config)
    if not names:
        keys = ", ".join(HUB_KEYS)
        raise UserError(f"{arguments.config}: names nothing of a hub: none of {keys} begins with hf://")
    return all_held(config) if arguments.dry_run else obtained_of(config)


def obtained_of(config: Config) -> list[tuple[str, CachedFiles]]:
    """The files of all names in a config with commits, downloaded and verified. Raises UserError: see `obtain_all`."""
    names = names_in(config)
    if WEIGHTS in names and task_request(config).kind not in READ_CONFIG:  # before a long download
        refuse_unknown(names[WEIGHTS])
    return obtain_all(config, repairs=True)


def _lines(found: Sequence[tuple[str, CachedFiles]], *, dry_run: bool) -> Iterator[str]:
    for what, one in found:
        yield f"{what}: {one.name}"
        for file in one.files:
            state = "to download" if file in one.missing else "in the cache" if dry_run else "verified"
            yield f"  {of_bytes(file.size_bytes):>9}  {file.path}  ({state})"
        yield f"  {of_bytes(one.size_bytes):>9}  {counted(len(one.files), 'file')} in {one.folder}"
    if dry_run:
        needs = {one.folder / file.path: file.size_bytes for _, one in found for file in one.missing}
        yield f"to download: {of_bytes(sum(needs.values()))}, to {root()}"
    else:
        yield f"all is in {root()}; where there is no internet set HF_HUB_OFFLINE=1, with the same HF_HOME"
