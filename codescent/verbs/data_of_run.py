"""In: a config, or the name of a task's corpus, and overrides. Out: all that this run reads, prepared; where it is, and
the command that trains with it.
Does not prepare a text without a config (data.py does) and starts no run."""

from __future__ import annotations

import dataclasses
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from codescent import tasks
from codescent.base.amounts import of_bytes
from codescent.base.command import command
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.hub_name import is_hub_name
from codescent.base.output import note, say, warn
from codescent.build import build, check_own_names, task_request
from codescent.config.effects import value_of
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.data.text import download
from codescent.hub.obtain import CachedFiles
from codescent.jobs.ready import published_files
from codescent.preflight import notes, pin, settled, too_short
from codescent.tasks.conversations.chat_files import template_file
from codescent.tasks.on_disk import places, shown, size_bytes
from codescent.verbs.config import resolved_of
from codescent.verbs.fetch import obtained_of

VARIABLES = ("CODESCENT_DATA_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
"""Variables that say where files are: a job needs those that are set now."""


def prepare_run(config: str, overrides: Sequence[str], *, verify: bool) -> int:
    """Prepare all that a run reads, and print it. Raises UserError: what the run cannot use, or what cannot be had."""
    loaded = resolved_of(Namespace(config=config, overrides=list(overrides)))
    check_own_names(loaded.config)
    _refuse_no_weights(loaded.config)
    of_hub = obtained_of(loaded.config)
    for sentence in notes(loaded):
        warn(sentence)
    request = task_request(loaded.config)
    request = dataclasses.replace(request, pinned=pin(request, None))
    dataset = tasks.prepare_and_open(request, progress=True)
    later = list(tasks.task_of(request).beforehand(request, dataset))
    if later and not places(dataset) and not of_hub:
        raise UserError(*later)
    if later:
        note(*later)
    _refuse_too_short(loaded.config, dataset)
    verified = _verified(dataset) if verify else []
    say([*_of_data(dataset), *verified, *_of_files(loaded.config, request), *_of_hub(of_hub)])
    is_of_hub = bool(of_hub) or is_hub_name(value_of(load(config, list(overrides)).config, "model.config"))
    say(_how_to_train(config, overrides, is_of_hub=is_of_hub))
    return 0


def _refuse_too_short(config: Config, dataset: AnyDataset) -> None:
    """Raise UserError: a split has too few samples for the run. Whether its layout can be is asked when it starts."""
    try:
        config = settled(config, dataset)
        plan = build(config, dataset.vocab_size, config.parallel.ranks or 1)
    except UserError:
        return
    if problems := too_short(config, dataset, plan):
        raise UserError(*problems)


def _verified(dataset: AnyDataset) -> list[str]:
    """Compare the stored hashes. Raises UserError: a file has changed."""
    parts = list(shown(dataset))
    for part in parts:
        part.verify()
    return ["verified: all stored hashes match" if parts else "verified: nothing; this data stores no hashes"]


def _refuse_no_weights(config: Config) -> None:
    weights = value_of(config, "model.weights")
    if isinstance(weights, Path) and not weights.exists():
        raise UserError(f"model.weights = {weights}: no such folder; give a Hugging Face folder, or leave it out")


def _of_data(dataset: AnyDataset) -> Iterator[str]:
    """What the samples are, and where."""
    for part in shown(dataset):
        yield from part.summary()
    for place in places(dataset):
        yield f"prepared: {of_bytes(size_bytes(place))} in {place}"


def _of_files(config: Config, request: tasks.TaskRequest) -> Iterator[str]:
    """Other files that the run reads: published ones, and those of the user."""
    every = [file for one in request.corpora.values() or [request] for file in published_files(one.data)]
    for published in dict.fromkeys(every):
        if (found := download.found(published)) is not None:
            yield f"{published.name}: {of_bytes(size_bytes(found))} in {found}"
    weights, template = (value_of(config, key) for key in ("model.weights", "data.chat_template"))
    if isinstance(weights, Path):
        yield f"model.weights: {of_bytes(size_bytes(weights))} in {weights}"
    if isinstance(template, Path):
        file = template_file(template)
        yield f"data.chat_template: {of_bytes(size_bytes(file))} in {file}"


def _of_hub(found: Sequence[tuple[str, CachedFiles]]) -> Iterator[str]:
    for key, one in found:
        yield f"{key} = {one.name}: {counted(len(one.files), 'file')}, {of_bytes(one.size_bytes)} in {one.folder}"


def _how_to_train(name: str, overrides: Sequence[str], *, is_of_hub: bool) -> Iterator[str]:
    """The command, with the variables that it needs where there is no internet."""
    offline = "HF_HUB_OFFLINE=1 " if is_of_hub else ""
    yield f"train with it in {Path.cwd()}, with or without internet: {offline}{command('train', name, *overrides)}"
    if given := [f"{name}={shlex.quote(os.environ[name])}" for name in VARIABLES if os.environ.get(name)]:
        yield f"a job needs the same {', '.join(given)}"
