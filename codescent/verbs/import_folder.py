"""In: a Hugging Face folder, or a name of a hub. Out: a run (`codescent import`).
Does not know the names and axes in a Hugging Face folder (codescent/huggingface does)."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from codescent import models
from codescent.base.command import command, how_to_tune
from codescent.base.dtypes import DTYPE_BYTES, WIDE
from codescent.base.errors import UserError
from codescent.base.hub_name import HubName, parse
from codescent.base.output import say
from codescent.base.published import published
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.build import build, task_request
from codescent.checkpoint.box import LazyTensor
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.config.effects import effective
from codescent.config.load import DEFAULT, LoadedConfig, to_toml
from codescent.config.mixture import MIXTURE
from codescent.config.sections import Config, Data, Model, Run
from codescent.data.tokenizers import beside
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.hub.obtain import pinned
from codescent.huggingface.folder import Folder, as_keys, inert_keys, more_rows, open_folder, spare_tensors
from codescent.huggingface.initial import is_finite
from codescent.huggingface.merged import Weights, merged_weights
from codescent.huggingface.named import obtain_model
from codescent.huggingface.tokens import Controls, library_text, tokenizer_text
from codescent.record import CHECKPOINTS, TOKENIZER, RunFolder
from codescent.tasks import TASKS, task_of
from codescent.verbs.config import resolved_of

MOST_POSITIONS = 1024
"""Tokens of a training sample after an import, if the user does not set them: some models read 100,000."""


def main(arguments: Namespace) -> int:
    """Import a Hugging Face folder and print a summary."""
    named = None
    if isinstance(arguments.folder, str):
        named = pinned(parse(arguments.folder))
        arguments.folder = obtain_model(named).folder
    say(import_folder(arguments.folder, arguments.run, resolved_of(arguments), named))
    return 0


def import_folder(path: Path, run: Path, resolved: LoadedConfig, named: HubName | None = None) -> list[str]:
    """Create a run from a Hugging Face folder; the folder's weights are the run's checkpoint of step 0.

    Args:
        path: of the folder.
        run: the run folder to create; must not exist.
        resolved: the config of the run. The folder decides [model]; data.tokenizer, if it has a tokenizer; and
            data.task, if its model has the head of a task. `run` decides run.name and run.folder.
        named: the name of the folder at a hub, with its commit, which the run's config gets; None: it has none.

    Returns:
        Lines to print.

    Raises:
        UserError: all problems of the folder; keys on the command line that the folder decides; a full disk.
    """
    if os.path.lexists(run):
        raise UserError(f"{run}: exists already; give the name of a new run folder")
    folder, text, problems = _open_and_check(path, run, resolved)
    tokenizer = None if text is None else LibraryTokenizer.from_json(library_text(text), str(path))
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    data, notes = _data(folder, run, resolved, tokenizer)
    try:
        config = _config(folder, run, resolved, data, named)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    rows = folder.shape.vocab_size
    if vocab_size is not None and vocab_size > rows:
        problems.append(
            f"{path}: its tokenizer has {vocab_size} tokens, its model a vocabulary of {rows}; {more_rows(vocab_size)}"
        )
    if problems:
        raise UserError(*problems)
    plan = build(config, vocab_size, config.parallel.ranks).to_json()
    request = task_request(config)
    task_files = {**task_of(request).carry_unprepared(request), **({} if text is None else {TOKENIZER: text})}
    task_files |= Controls.of_folder(path).file()
    missing = task_of(request).missing_files(config.data, has_corpus=_has_corpus(resolved))
    where = str(path.absolute() if named is None else named)
    source = {"folder": where, "fingerprint": folder.fingerprint(), "missing": missing}
    wrong = _write_run(run, folder, config, plan, task_files, source)
    said = _said(folder, str(path if named is None else named), wrong)
    remarks = filter(None, [beside.remark(path / beside.FILE)])
    return [*said, *notes, *remarks, *_next(run, config, missing), str(run)]


def _write_run(
    run: Path,
    folder: Folder,
    config: Config,
    plan: dict[str, Any],
    task_files: Mapping[str, str],
    source: Mapping[str, Any],
) -> list[str]:
    """Write the run folder, which appears when it is complete. `source`: where the weights come from, to record.
    Returns parameters with numbers that are not finite. Raises UserError: the disk is full.
    """
    wrong, dtype = list[str](), WIDE[config.train.precision]
    weights = merged_weights(folder, config.model.adapters)
    parameters = [parts[0].parameter for parts in folder.parts.values()]
    masters = {  # each is read from the folder at the time when it is written
        f"model.{one.name}": LazyTensor.of(one.shape, TORCH_DTYPE[dtype], partial(_read, weights, one.name, wrong))
        for one in parameters
    }
    with published(run, sum(one.numel for one in parameters) * DTYPE_BYTES[dtype]) as hidden:
        created = RunFolder.create(hidden, to_toml(effective(config)), plan)
        created.write_task_files(task_files)
        state = {"step": 0, "tokens": 0, "imported": source}
        Checkpoints(hidden / CHECKPOINTS, 1, keep_best=False).save(0, masters, state)
        created.event("import", **source)
    return list(dict.fromkeys(wrong))


def _said(folder: Folder, where: str, wrong: Sequence[str]) -> Iterator[str]:
    """What was read from `where`, and what was not. `wrong`: see `_write_run`."""
    numel = sum(parts[0].parameter.numel for parts in folder.parts.values())
    yield f"{folder.kind.model_type} of {numel:,} parameters, read from {where}"
    if folder.spare:
        yield spare_tensors(folder)
    if folder.inert:
        yield inert_keys(folder)
    if wrong:
        yield (
            f"warning: numbers that are not finite (NaN or infinity), in {', '.join(wrong)}: no run can train from them"
        )


def _read(weights: Weights, name: str, wrong: list[str], slices: Sequence[slice]) -> torch.Tensor:
    """`Weights.box`. Adds the name to `wrong` if a value is not finite."""
    values = weights.box(name, slices)
    if not is_finite(values):
        wrong.append(name)
    return values


def _next(run: Path, config: Config, missing: Sequence[str]) -> list[str]:
    """The commands that a user of an imported run may want next. `missing`: see `Task.missing_files`."""
    lines = []
    if models.generates(models.kind_of(config.model.kind, config.model.preset)) and (run / TOKENIZER).is_file():
        lines.append(f"to sample: {command('sample', run, '--prompt', 'Hello')}")
    return [*lines, f"to train{how_to_tune(run, missing)}"]


def _has_corpus(resolved: LoadedConfig) -> bool:
    return any(resolved.origins[key] != DEFAULT for key in ("data.corpus", MIXTURE))


def _open_and_check(path: Path, run: Path, resolved: LoadedConfig) -> tuple[Folder, str | None, list[str]]:
    """Open the folder. Returns it, its tokenizer's text, and problems of the folder and of keys on the command line.

    Raises UserError: the problems, if the folder or its tokenizer cannot be read.
    """
    given = [name for name, origin in resolved.origins.items() if origin == "command line"]
    decided = [name for name in given if name.startswith("model.") and name != "model.adapters"]
    problems = [_decided_by_folder(name, path) for name in decided]
    of_run = [name for name in given if name in ("run.name", "run.folder")]
    problems += [f"{name}: given on the command line, but the argument {run} decides it" for name in of_run]
    if resolved.config.lora.rank is not None:
        problems.append(
            "lora.rank: given, but an imported model has no adapters; give it when training: add "
            f"lora.rank={resolved.config.lora.rank} to the command that `import` prints"
        )
    try:
        folder = open_folder(path)
        if "data.task" in given and folder.sizes.get("head") is not None:
            problems.append(_decided_by_folder("data.task", path))
        if folder.missing:
            problems.append(f"{path}: {', '.join(folder.missing)}: missing: the folder's model has no head")
        text = tokenizer_text(path)
        if "data.tokenizer" in given and text is not None:
            problems.append(_decided_by_folder("data.tokenizer", path))
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    return folder, text, problems


def _decided_by_folder(name: str, path: Path) -> str:
    return f"{name}: given, but {path} decides it; leave it out, and add it to the command that `import` prints"


def _data(
    folder: Folder, run: Path, resolved: LoadedConfig, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], list[str]]:
    """The section [data] of the run, and lines about it."""
    config, origins = resolved.config, resolved.origins
    data, lines = config.data.model_dump(), []
    if origins["data.seq_len"] == DEFAULT and folder.shape.seq_len > MOST_POSITIONS:
        data["seq_len"] = MOST_POSITIONS
        lines.append(
            f"data.seq_len = {MOST_POSITIONS}: tokens per sample; the model reads up to {folder.shape.seq_len:,}"
        )
    if (head := folder.sizes.get("head")) is not None:  # the head belongs to one task
        data["task"] = next(task.name for task in TASKS if task.head == head)
    if tokenizer is None:
        why = "the folder has none that the tokenizers library can read; data.tokenizer comes from the config"
        return data, [*lines, f"no tokenizer: {why}"]
    data["tokenizer"] = str(run.absolute() / TOKENIZER)
    for task in TASKS:
        if folder.kind.name in task.kinds and data["task"] in (None, task.name):
            try:
                has_corpus = _has_corpus(resolved)
                keys = task.keys_of_folder(folder.path.absolute(), tokenizer, config.data, has_corpus=has_corpus)
            except UserError as error:
                lines.append(f"the folder is not used for data.task = {task.name}: {'; '.join(error.problems)}")
                continue
            data |= keys
            lines += [f"data.{name} = {value}" for name, value in keys.items()]
    return data, lines


def _config(folder: Folder, run: Path, resolved: LoadedConfig, data: dict[str, Any], named: HubName | None) -> Config:
    """The config of the run. Raises UserError: an invalid run name, or a number that our models do not support."""
    base, path = resolved.config, run.absolute()
    precision = resolved.config.train.precision
    if resolved.origins["train.precision"] == DEFAULT and len(folder.dtypes) == 1:
        precision = "bf16" if "bf16" in folder.dtypes else "fp64" if "fp64" in folder.dtypes else "fp32"
    log = base.log if models.generates(folder.kind.name) else base.log.model_copy(update={"sample_tokens": 0})
    try:
        changed = {
            "run": Run(**{**base.run.model_dump(), "name": path.name, "folder": path}),
            "model": Model(
                **as_keys(folder.sizes),
                weights=folder.path.absolute() if named is None else str(named),
                adapters=base.model.adapters,
            ),
            "data": Data(**data),
            "train": base.train.model_copy(update={"precision": precision}),
            "log": log,
        }
        return Config(**{**dict(base), **changed})
    except ValidationError as error:
        details = error.errors(include_url=False)
        invalid = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
        raise UserError(*(f"{run}: cannot be a run: {problem}" for problem in invalid)) from error
