"""In: a run, or a Hugging Face folder. Out: a Hugging Face folder (`codescent export`), or a run (`codescent import`).
Does not know the names and axes in a Hugging Face folder (codescent/huggingface does)."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from codescent import models
from codescent.base.command import command, how_to_tune
from codescent.base.dtypes import DTYPE_BYTES, NUMBER_FORMATS, WIDE
from codescent.base.durable import write_synced
from codescent.base.errors import UserError
from codescent.base.hub_name import HubName, parse
from codescent.base.output import say
from codescent.base.published import published
from codescent.base.reading import read_text
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.base.writing import make_folder
from codescent.build import build, task_request
from codescent.checkpoint.box import LazyTensor
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.config.effects import effective
from codescent.config.load import DEFAULT, LoadedConfig, to_toml
from codescent.config.sections import Config, Data, Model, Run
from codescent.data.tokenizers import beside
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.hub.obtain import pinned
from codescent.huggingface import kind_of, peft
from codescent.huggingface.folder import CONFIG, Folder, as_keys, inert_keys, more_rows, open_folder, parts_of
from codescent.huggingface.kind import Kind
from codescent.huggingface.named import obtain_model
from codescent.huggingface.read import box
from codescent.huggingface.rounding import Rounding
from codescent.huggingface.tokens import GENERATION, Controls, library_text, tokenizer_files, tokenizer_text
from codescent.huggingface.write import Read, Shard, shards, write_weights
from codescent.record import CHECKPOINTS, TOKENIZER, RunFolder
from codescent.tasks import TASKS, task_of
from codescent.train.initial import is_finite
from codescent.verbs.config import resolved_of
from codescent.verbs.trained import Trained, Values, find

MOST_POSITIONS = 1024
"""Tokens of a training sample after an import, if the user does not set them: some models read 100,000."""


def export_main(arguments: Namespace) -> int:
    """Export a run and print a summary."""
    say(export_run(**vars(arguments)))
    return 0


def import_main(arguments: Namespace) -> int:
    """Import a Hugging Face folder and print a summary."""
    named = None
    if isinstance(arguments.folder, str):
        named = pinned(parse(arguments.folder))
        arguments.folder = obtain_model(named).folder
    say(import_folder(arguments.folder, arguments.run, resolved_of(arguments), named))
    return 0


def export_run(
    run: Path,
    folder: Path,
    *,
    best: bool = False,
    step: int | None = None,
    ema: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    as_adapters: bool = False,
) -> list[str]:
    """Write a checkpoint as a folder that `transformers` loads. The folder appears when it is complete.

    Args:
        run: the run folder.
        folder: to create; must not exist.
        best: write the checkpoint with the lowest validation loss.
        step: write the checkpoint of this step. The default is the newest checkpoint.
        ema: the moving average of its weights, not the weights.
        dtype: fp64, fp32, bf16 or fp16; None: the run's precision.
        max_shard_bytes: largest size of a file of tensors, unless one tensor is larger.
        as_adapters: write only the trained adapters, as a folder of `peft`; otherwise adapters are merged.

    Returns:
        Lines to print.

    Raises:
        UserError: no such run or checkpoint, a kind of model that `transformers` lacks, `folder` exists, a full disk.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder}: exists already; give the name of a new folder")
    trained = find(run, best=best, step=step, ema=ema)
    name, shape, dtype = trained.resolved.model.kind, trained.resolved.shape, dtype or trained.config.train.precision
    try:
        kind = kind_of(name, shape)
    except UserError as error:
        raise UserError(*(f"{run}: {problem}" for problem in error.problems)) from error
    if as_adapters:
        return _export_adapters(trained, folder, dtype, kind)
    values = Values(trained)
    parts = [part for of_one in parts_of(kind, shape).values() for part in of_one]
    zeros = {part.parameter.name for part in parts} - {parameter.name for parameter in trained.declared}
    files = shards(parts, NUMBER_FORMATS[dtype].code, max_shard_bytes)
    texts, ends = _texts(trained)
    texts = {CONFIG: json.dumps(_settings(kind, shape, dtype, ends), indent=2) + "\n", **texts}
    rounding = _publish(folder, files, dtype, values.box, zeros, texts)
    size = sum(shard.size_bytes for shard in files)
    where = f"{len(files)} files" if len(files) > 1 else files[0].file
    lines = [f"{trained.which} of {run}: {len(parts)} tensors, {size:,} bytes ({dtype}), {where}"]
    lines += rounding.lines()
    if zeros:
        lines.append(f"{len(zeros)} biases are zeros: this model has none, but a {name} of transformers needs them")
    if TOKENIZER not in texts:
        lines.append("no tokenizer: the run folder has none")
    return [*lines, str(folder)]


def _export_adapters(trained: Trained, folder: Path, dtype: str, kind: Kind) -> list[str]:
    """Write the trained adapters as a folder of `peft`. Returns lines to print."""
    lora, base, run = trained.resolved.model.lora, trained.resolved.model.weights, trained.folder.path
    if lora is None:
        raise UserError(f"{run}: has no adapters (lora.rank is not set); leave out --adapters")
    if base is None:
        why = "the adapters need this run's frozen random weights, which no other folder has"
        raise UserError(f"{run}: --adapters: {why}; leave it out to write merged weights")
    adapters = peft.Adapters(kind, trained.resolved.shape, lora)
    parts = adapters.parts
    if problems := [f"{run}: --adapters: {why}; leave it out" for why in adapters.refusals()]:
        raise UserError(*problems)
    size = sum(math.prod(part.shape) for part in parts) * DTYPE_BYTES[dtype]
    file = Shard(peft.ADAPTER_WEIGHTS, tuple(parts), size)
    texts, _ = _texts(trained)
    texts = {peft.ADAPTER_CONFIG: adapters.settings(trained.task.peft_task_type, base), **texts}
    rounding = _publish(folder, [file], dtype, Values(trained).trained, set(), texts)
    count = f"{len(parts)} tensors, {size:,} bytes ({dtype})"
    lines = [f"{trained.which} of {run}: adapters of rank {lora.rank}: {count}", *rounding.lines()]
    return [*lines, f"load them together with {base}", str(folder)]


def _publish(
    folder: Path, files: list[Shard], dtype: str, read: Read, zeros: set[str], texts: Mapping[str, str]
) -> Rounding:
    """Write a folder that appears when it is complete. Raises UserError: the dtype makes finite values infinite."""
    rounding = Rounding(dtype)
    with published(folder, sum(shard.size_bytes for shard in files)) as hidden:
        write_weights(hidden, files, NUMBER_FORMATS[dtype].code, read, zeros, rounding)
        rounding.check()
        for name, text in texts.items():
            if (inner := (hidden / name).parent) != hidden:
                make_folder(inner, hidden)
            write_synced(hidden / name, text, within=hidden)
    return rounding


def _texts(trained: Trained) -> tuple[dict[str, str], dict[str, Any]]:
    """The tokenizer's files and those of the task, by name, and the ids of the control tokens."""
    texts: dict[str, str] = {}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if trained.tokenizer is not None:
        seq_len = trained.resolved.shape.seq_len
        texts, ends = tokenizer_files(read_text(trained.folder.tokenizer), seq_len)
    if (controls := Controls.of_run(trained.folder.path)) is not None:
        texts, ends = controls.put(texts), dict(controls.ids)
    if trained.tokenizer is None:
        return texts, ends
    is_trained, eos = "imported" not in trained.saved.state, ends.get("eos_token_id")
    texts, ends = trained.task.export(trained.request, trained.tokenizer, texts, ends, is_trained=is_trained)
    if GENERATION in texts and ends.get("eos_token_id") != eos:  # `generate` stops by this file
        generation = {**json.loads(texts[GENERATION]), "eos_token_id": ends["eos_token_id"]}
        texts = {**texts, GENERATION: json.dumps(generation, indent=2) + "\n"}
    return texts, ends


def _settings(kind: Kind, shape: models.Shape, dtype: str, ends: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    written = kind.write(shape)
    return {
        "architectures": [kind.architectures(shape)[0]],
        "model_type": kind.model_type,
        **{theirs: getattr(shape, ours) for ours, theirs in kind.sizes.items()},
        **written,
        **{key: alike[0] for key, alike in kind.fixed.items()},
        **{key: end for key, end in ends.items() if end is not None or key not in written},
        "torch_dtype": NUMBER_FORMATS[dtype].torch,
    }


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
    except ValidationError as error:  # an invalid run name, or a number that our models do not support
        details = error.errors(include_url=False)
        invalid = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
        raise UserError(*problems, *(f"{run}: cannot be a run: {problem}" for problem in invalid)) from error
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
    parameters, dtype = [parts[0].parameter for parts in folder.parts.values()], WIDE[config.train.precision]
    numel = sum(parameter.numel for parameter in parameters)
    wrong: list[str] = []
    masters = {  # each is read from the folder at the time when it is written
        f"model.{one.name}": LazyTensor.of(one.shape, TORCH_DTYPE[dtype], partial(_read, folder, one.name, wrong))
        for one in parameters
    }
    with published(run, numel * DTYPE_BYTES[dtype]) as hidden:
        created = RunFolder.create(hidden, to_toml(effective(config)), plan)
        created.write_task_files(task_files)
        state = {"step": 0, "tokens": 0, "imported": source}
        Checkpoints(hidden / CHECKPOINTS, 1, keep_best=False).save(0, masters, state)
        created.event("import", **source)
    lines = [f"{folder.kind.model_type} of {numel:,} parameters, read from {path if named is None else named}"]
    if folder.spare:
        spare = ", ".join(sorted(folder.spare))
        lines.append(f"left out, because codescent's {folder.kind.name} does not use them: {spare}")
    if folder.inert:
        lines.append(inert_keys(folder))
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        lines.append(f"warning: numbers that are not finite (NaN or infinity), in {names}: no run can train from them")
    remarks = filter(None, [beside.remark(path / beside.FILE)])
    return [*lines, *notes, *remarks, *_next(run, config, missing), str(run)]


def _read(folder: Folder, name: str, wrong: list[str], slices: Sequence[slice]) -> torch.Tensor:
    """`box`. Adds the name to `wrong` if a value is not finite."""
    values = box(folder, name, slices)
    if not is_finite(values):
        wrong.append(name)
    return values


def _next(run: Path, config: Config, missing: Sequence[str]) -> list[str]:
    """The commands that a user of an imported run may want next. `missing`: see `Task.missing_files`."""
    lines = []
    if models.kind_of(config.model.kind, config.model.preset) in models.GENERATING and (run / TOKENIZER).is_file():
        lines.append(f"to sample: {command('sample', run, '--prompt', 'Hello')}")
    return [*lines, f"to train{how_to_tune(run, missing)}"]


def _has_corpus(resolved: LoadedConfig) -> bool:
    return resolved.origins["data.corpus"] != DEFAULT


def _open_and_check(path: Path, run: Path, resolved: LoadedConfig) -> tuple[Folder, str | None, list[str]]:
    """Open the folder. Returns it, its tokenizer's text, and problems of the folder and of keys on the command line.

    Raises UserError: the problems, if the folder or its tokenizer cannot be read.
    """
    given = [name for name, origin in resolved.origins.items() if origin == "command line"]
    problems = [_decided_by_folder(name, path) for name in given if name.startswith("model.")]
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
    base, path = resolved.config, run.absolute()
    precision = resolved.config.train.precision
    if resolved.origins["train.precision"] == DEFAULT and len(folder.dtypes) == 1:
        precision = "bf16" if "bf16" in folder.dtypes else "fp64" if "fp64" in folder.dtypes else "fp32"
    log = base.log if folder.kind.name in models.GENERATING else base.log.model_copy(update={"sample_tokens": 0})
    changed = {
        "run": Run(**{**base.run.model_dump(), "name": path.name, "folder": path}),
        "model": Model(**as_keys(folder.sizes), weights=folder.path.absolute() if named is None else str(named)),
        "data": Data(**data),
        "train": base.train.model_copy(update={"precision": precision}),
        "log": log,
    }
    return Config(**{**dict(base), **changed})
