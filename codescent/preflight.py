"""In: a config. Out: its run folder and plan; every refusal that needs no rank to be running.
Does not import torch or start anything: `codescent plan` and the parent of local ranks call it before torch is up."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from codescent import models, tasks
from codescent.base.errors import UserError
from codescent.build import adapters, ask_of, build, model_shape, task_of
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.huggingface import fit
from codescent.plan import Plan
from codescent.record import RunFolder

DECIDING: dict[str, tuple[str, ...]] = {
    "run": ("seed",),
    "train": ("global_batch_size", "precision"),
}
"""Keys that decide the losses of a run's steps; of [model] and [optimizer] all but FREE do."""

FREE: dict[str, tuple[str, ...]] = {"model": (), "optimizer": ("fused", "decay_steps")}


def run_folder(config: Config) -> Path:
    """The run folder: run.folder, or runs/NAME."""
    return config.run.folder if config.run.folder is not None else Path("runs") / config.run.name


def plan_of(config: Config, world_size: int) -> Plan:
    """The plan of a config. The corpus is prepared for it only where nothing else tells the vocabulary (char).

    Raises:
        UserError: whatever stands in the way of the run.
    """
    task, ask = task_of(config), ask_of(config)
    vocab_size = task.vocab_size(ask)
    if vocab_size is None and config.model.vocab_size is None and config.model.preset is None and not task.vectors:
        vocab_size = tasks.opened(ask, progress=True).vocab_size
    return build(config, vocab_size, world_size)


def plan_with(config: Config, dataset: AnyDataset, world_size: int) -> Plan:
    """The plan of a config for an open dataset.

    Raises:
        UserError: whatever stands in the way of the run, and splits that are too short for it.
    """
    plan = build(config, dataset.vocab_size, world_size)
    if problems := list(task_of(config).misfits(dataset, plan.work)):
        raise UserError(*problems)
    work, size = plan.work, config.train.global_batch_size
    train, validation = (dataset.source(name, work.seq_len, work.positions(-1)) for name in ("train", "validation"))
    problems = []
    if train.num_samples < size:
        problems.append(
            f"{dataset.path}: the training split has {train.num_samples} samples of {work.seq_len} positions, fewer "
            f"than train.global_batch_size = {size}; lower it or data.seq_len, or use a longer corpus"
        )
    if config.train.eval_every and validation.num_samples < 1:
        problems.append(
            f"{dataset.path}: the validation split has not one sample of {work.seq_len} positions; raise "
            "data.validation_fraction, lower data.seq_len, or set train.eval_every = 0"
        )
    if problems:
        raise UserError(*problems)
    return plan


def check(config: Config, world_size: int, *, resume: bool) -> None:
    """Prepare the data and refuse what can be refused, before any rank is started.

    Raises:
        UserError: whatever stands in the way of the run.
    """
    path = run_folder(config)
    folder = RunFolder.open(path) if resume else None
    if folder is None:
        RunFolder.refuse_taken(path)
    dataset = tasks.opened(pinned(config, pin(config, resume=resume)), progress=True)
    plan = plan_with(config, dataset, world_size)
    check_weights(config, dataset, resume=resume)
    if folder is not None:
        check_same_trajectory(folder, config, plan)
        check_same_files(folder, config, dataset)


def ask_kept(config: Config, folder: RunFolder) -> tasks.Ask:
    """What a run that has a folder asks of its task: with the files that it keeps."""
    kept = folder.read_kept(task_of(config).files)
    return dataclasses.replace(ask_of(config), run=folder.path, kept=kept)


def pin(config: Config, *, resume: bool) -> Mapping[str, Any]:
    """What rank 0 decides for all ranks before the data is prepared: see `Task.pin`.

    Raises:
        UserError: it cannot be read, or is not that with which the run to be continued began.
    """
    ask = ask_kept(config, RunFolder.open(run_folder(config))) if resume else ask_of(config)
    return task_of(config).pin(ask)


def pinned(config: Config, pin: Mapping[str, Any]) -> tasks.Ask:
    """What a run asks of its task after rank 0 has decided."""
    return dataclasses.replace(ask_of(config), pinned=pin)


def check_same_files(folder: RunFolder, config: Config, dataset: AnyDataset) -> None:
    """Refuse to continue a run on data that does not go with the files that it keeps.

    Raises:
        UserError: why not.
    """
    if problems := list(task_of(config).refuse_resume(ask_kept(config, folder), dataset)):
        raise UserError(*problems)


def check_weights(config: Config, dataset: AnyDataset, *, resume: bool) -> None:
    """Refuse a folder of weights that a run cannot begin with; one that goes on reads it where it has adapters alone.

    Raises:
        UserError: what is wrong with the folder, every size of the model that is not its model's, another tokenizer;
            parameters that it has not, and that are not trained.
    """
    path = config.model.weights
    if path is None or (resume and config.lora.rank is None):
        return
    shape = model_shape(config, dataset.vocab_size)
    kind = models.kind_of(config.model.kind, config.model.preset)
    folder = fit.fitting(path, kind, shape, dataset.tokenizer_text, config.data.tokenizer)
    declared = models.parameters_of(kind, shape, adapters(config, shape))
    drawn = [parameter.name for parameter in declared if not (parameter.trained or folder.has(parameter))]
    if drawn:
        layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in drawn))
        raise UserError(
            f"model.weights = {path}: has no {', '.join(drawn)}, which with lora.rank would stay as drawn; add "
            f"{layers} to lora.whole"
        )


def check_same_trajectory(folder: RunFolder, now: Config, plan: Plan) -> None:
    """Refuse to continue a run with a config under which the steps so far would have had other losses.

    A change of layout, of what is logged or of what is kept is no hindrance.

    Args:
        folder: the run.
        now: the config of the command.
        plan: its plan.

    Raises:
        UserError: every key that differs, with both values.
    """
    path = folder.path
    try:
        saved = Config.model_validate(tomllib.loads(folder.config_text))
        saved_plan = Plan.from_json(folder.plan)
    except (ValidationError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its config.toml or plan.json is not of this version ({error})") from error
    before, after = _deciding(saved, saved_plan), _deciding(now, plan)
    problems = [
        f"{key}: the run in {path} has {before[key]!r}, this config {after[key]!r}"
        for key in before
        if key in after and before[key] != after[key]
    ]
    if problems:
        raise UserError(*problems, f"give the same values to continue {path}, or start a new run.name")


def _deciding(config: Config, plan: Plan) -> dict[str, object]:
    values: dict[str, object] = {}
    for section, names in DECIDING.items():
        values |= {f"{section}.{name}": getattr(getattr(config, section), name) for name in names}
    for section, free in FREE.items():
        model = getattr(config, section)
        values |= {f"{section}.{name}": getattr(model, name) for name in type(model).model_fields if name not in free}
    if config.lora.rank is not None:  # the weights themselves are compared: their folder may have been moved
        del values["model.weights"]
    told = values | _derived(config, plan)
    return {name: str(value) if isinstance(value, Path) else value for name, value in told.items()}


def _derived(config: Config, plan: Plan) -> dict[str, object]:
    """Keys whose default is another key's value: compared as what they come to."""
    optimizer, lora = config.optimizer, adapters(config, model_shape(config, plan.work.vocab_size))
    decay_steps = config.train.num_steps if optimizer.decay_steps is None else optimizer.decay_steps
    workers = 1 if optimizer.scale_learning_rate == "none" else plan.mesh.dp
    return {
        "model.kind": plan.work.kind,
        "data.task": plan.work.task,
        **{f"data.{name}": getattr(config.data, name) for name in tasks.named(plan.work.task).keys},
        "lora.rank": None if lora is None else lora.rank,
        "lora.alpha": None if lora is None else lora.alpha,
        "lora.targets": None if lora is None else ", ".join(sorted(lora.targets)),
        "lora.whole": None if lora is None else ", ".join(sorted(lora.whole)),
        "model.bias": any(tensor.parameter.name.endswith(".bias") for tensor in plan.tensors),
        "data.seq_len": config.model.seq_len if config.data.seq_len is None else config.data.seq_len,
        "optimizer.decay_steps (or train.num_steps)": None if optimizer.schedule == "constant" else decay_steps,
        "data-parallel ranks, by which optimizer.scale_learning_rate multiplies": workers,
    }
