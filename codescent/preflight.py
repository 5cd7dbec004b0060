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
from codescent.build import build, needs_vocab_size, task_request
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.huggingface.folder import fitting
from codescent.plan import Mesh, OlderPlan, Plan, Scalar
from codescent.record import RunFolder


def run_folder(config: Config) -> Path:
    """The run folder: run.folder, or runs/NAME."""
    return config.run.folder if config.run.folder is not None else Path("runs") / config.run.name


def plan_of(config: Config, world_size: int) -> Plan:
    """The plan of a config. The corpus is prepared for it only where nothing else tells the vocabulary (char).

    Raises:
        UserError: whatever stands in the way of the run.
    """
    request = task_request(config)
    vocab_size = tasks.task_of(request).vocab_size(request)
    if vocab_size is None and needs_vocab_size(config):
        vocab_size = tasks.prepare_and_open(request, progress=True).vocab_size
    return build(config, vocab_size, world_size)


def plan_with(config: Config, dataset: AnyDataset, world_size: int) -> Plan:
    """The plan of a config for an open dataset.

    Raises:
        UserError: whatever stands in the way of the run, and splits that are too short for it.
    """
    plan = build(config, dataset.vocab_size, world_size)
    if problems := list(tasks.task_named(plan.task.name).misfits(dataset, plan)):
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
    request = task_request(config)
    dataset = tasks.prepare_and_open(dataclasses.replace(request, pinned=pin(request, folder)), progress=True)
    plan = plan_with(config, dataset, world_size)
    check_weights(plan, dataset, resume=resume)
    if folder is not None:
        check_same_trajectory(folder, plan)
        check_same_files(request, folder, dataset)


def request_with_kept(request: tasks.TaskRequest, folder: RunFolder) -> tasks.TaskRequest:
    """The request with the files that the run in a folder keeps."""
    return dataclasses.replace(request, run=folder.path, kept=folder.read_task_files(tasks.task_of(request).files))


def pin(request: tasks.TaskRequest, folder: RunFolder | None) -> Mapping[str, Any]:
    """What rank 0 decides for all ranks before the data is prepared: see `Task.pin`.

    Args:
        request: of the run.
        folder: of the run that is to go on; None: it begins.

    Raises:
        UserError: it cannot be read, or is not that with which the run began.
    """
    return tasks.task_of(request).pin(request if folder is None else request_with_kept(request, folder))


def check_same_files(request: tasks.TaskRequest, folder: RunFolder, dataset: AnyDataset) -> None:
    """Refuse to continue a run on data that does not go with the files that it keeps.

    Raises:
        UserError: why not.
    """
    if problems := list(tasks.task_of(request).refuse_resume(request_with_kept(request, folder), dataset)):
        raise UserError(*problems)


def check_weights(plan: Plan, dataset: AnyDataset, *, resume: bool) -> None:
    """Refuse a folder of weights that a run cannot begin with; one that goes on reads it where it has adapters alone.

    Raises:
        UserError: what is wrong with the folder, every size of the model that is not its model's, another tokenizer;
            parameters that it has not, and that are not trained.
    """
    model = plan.model
    if model.weights is None or (resume and model.lora is None):
        return
    named = str(plan.task.identity["tokenizer"])
    shape = models.shape_of_facts(model)
    folder = fitting(Path(model.weights), model.kind, shape, dataset.tokenizer_text, named)
    declared = [tensor.parameter for tensor in plan.tensors]
    drawn = [parameter.name for parameter in declared if not (parameter.trained or folder.has(parameter))]
    if drawn:
        layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in drawn))
        raise UserError(
            f"model.weights = {model.weights}: has no {', '.join(drawn)}, which with lora.rank would stay as drawn; "
            f"add {layers} to lora.whole"
        )


def check_same_trajectory(folder: RunFolder, plan: Plan) -> dict[str, tuple[Scalar, Scalar]]:
    """Refuse to continue a run by a plan under which the steps so far would have had other losses.

    A change of layout, of what is logged or of what is kept is no hindrance. Where the run has failed since its numbers
    were not finite (`ruined_step`), it may go on with another update.

    Args:
        folder: the run.
        plan: of the command.

    Returns:
        Every key of the update that changes, with both values.

    Raises:
        UserError: every other key that differs, with both values.
    """
    before, after = saved_plan(folder).trajectory(), plan.trajectory()
    differs = {key: (before[key], after[key]) for key in before if key in after and before[key] != after[key]}
    free = [key for key in differs if "optimizer." in key and key != "optimizer.kind"]  # whose state is saved
    changes = {key: differs[key] for key in free} if free and ruined_step(folder) is not None else {}
    problems = [
        f"{key}: the run in {folder.path} has {old!r}, this config {new!r}"
        for key, (old, new) in differs.items()
        if key not in changes
    ]
    if problems:
        raise UserError(*problems, f"give the same values to continue {folder.path}, or start a new run.name")
    return changes


def ruined_step(folder: RunFolder) -> int | None:
    """The step whose weights were no good, where a run has failed for that and not gone on since; else None."""
    for event in reversed(folder.read_events()):
        if event.get("kind") in ("failed", "start", "resume"):
            ruined: int | None = event.get("ruined_step")
            return ruined
    return None


def saved_plan(folder: RunFolder) -> Plan:
    """The plan with which a run began; one that an earlier version wrote is built again from the run's config.

    Raises:
        UserError: the folder's config or plan is damaged.
    """
    try:
        return Plan.from_json(folder.plan)
    except OlderPlan:
        pass
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, error) from error
    try:
        config = Config.model_validate(tomllib.loads(folder.config_text))
        mesh = Mesh(**folder.plan["mesh"])
        return build(config, folder.plan["work"]["vocab_size"] or None, mesh.world_size)
    except (ValidationError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: RunFolder, error: Exception) -> UserError:
    return UserError(f"{folder.path}: its config.toml or plan.json is not of this version ({error})")
