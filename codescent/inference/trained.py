"""In: a run folder, and a choice of checkpoint (newest, best, step). Out: the trained model, its tokenizer and dataset.
Does not change the run folder, and does not use the model: sample.py, evaluate.py and exchange.py do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path

import torch
from torch import nn

from codescent import models, tasks
from codescent.base.command import command, resume_command
from codescent.base.device import count, found_kind, has_fp64
from codescent.base.device_kinds import AUTO, GPUS, KINDS, NAMES, in_words
from codescent.base.errors import UserError
from codescent.base.hub_name import is_hub_name
from codescent.base.output import warn
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.build import Resolved, resolve, saved_plan
from codescent.checkpoint.checkpoints import Checkpoints, Saved, TensorReader, read_tensors
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.data import verified
from codescent.data.mixture import datasets_of
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.data.tokenizers.tokenizer import load as load_tokenizer
from codescent.huggingface.initial import InitialValues
from codescent.models.lora import declare as lora_shape
from codescent.operators.products import sum_wide
from codescent.operators.reordered import multiplies_bf16
from codescent.plan import WIDE, Parameter
from codescent.preflight import request_with_kept
from codescent.record import CONFIG, RunFolder

_ROWS = 1024
"""Rows of a matrix in memory at a time, to measure them."""

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Trained:
    """A run and one of its checkpoints, which names each trained parameter "model.NAME" and its average "ema.NAME".

    Attributes:
        hold: a lock: while it is open, a run that is still training does not delete the checkpoint.
        ema: whether the averages are read in place of the weights.
    """

    folder: RunFolder
    config: Config
    saved: Saved
    hold: FileIO
    ema: bool = False

    @property
    def which(self) -> str:
        """What is read, in words."""
        return f"step {self.saved.step}{' (moving average of the weights)' if self.ema else ''}"

    @cached_property
    def resolved(self) -> Resolved:
        """The model of the run's config as it is now, since model.weights may have changed after the run began. The
        task is that of the run's plan: it may come from a corpus that is not there any more.
        """
        plan = saved_plan(self.folder)
        return resolve(self.config.with_task(plan.task.name), plan.model.vocab_size or None)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the run folder; None if there is none."""
        return load_tokenizer(self.folder.tokenizer) if self.folder.tokenizer.is_file() else None

    @cached_property
    def request(self) -> tasks.TaskRequest:
        """The run's request to its task, with the task's files in the run folder."""
        return request_with_kept(self.resolved.request, self.folder)

    @property
    def task(self) -> tasks.Task:
        """The task of the run."""
        return tasks.task_of(self.request)

    @cached_property
    def declared(self) -> tuple[Parameter, ...]:
        """The model's parameters, without adapters."""
        return models.parameters_of(self.resolved.model.kind, self.resolved.shape)


class _InMemory:
    """All tensors of a checkpoint in memory. It has the methods of TensorReader, which reads one box at a time."""

    def __init__(self, path: Path, names: Collection[str]) -> None:
        self._tensors = read_tensors(path, names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def box(self, name: str, slices: Slices) -> torch.Tensor:
        return self._tensors[name][slices]


class Values:
    """Reads boxes of a trained model's parameters: from the checkpoint, and with adapters also from the frozen weights.

    Raises UserError: the checkpoint is damaged, or belongs to another model than that of the config; the frozen weights
    under adapters are missing or have changed.
    """

    def __init__(self, trained: Trained, reader: type[TensorReader] | type[_InMemory] = TensorReader) -> None:
        resolved, path = trained.resolved, trained.saved.path
        self._lora, self._precision = resolved.model.lora, trained.config.train.precision
        parameters = models.parameters_of(resolved.model.kind, resolved.shape, resolved.model.lora)
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._kind = "ema" if trained.ema else "model"
        shapes = {f"{self._kind}.{parameter.name}": parameter.shape for parameter in parameters if parameter.trained}
        self._reader = reader(path, list(shapes))
        problems = [
            f"{path}: {name.removeprefix(f'{self._kind}.')} has the shape {found}, but by the run's config {shape}"
            for name, shape in shapes.items()
            if (found := self._reader.shape(name)) != shape
        ]
        if problems:
            raise UserError(*problems)
        self._factors_of: tuple[str, torch.Tensor] = ("", torch.empty(0))  # of the matrix that was read last
        self._initial_values = None if resolved.model.lora is None else _initial_values(trained)

    def trained(self, name: str, slices: Slices) -> torch.Tensor:
        """A box of a trained parameter, such as an adapter's matrix."""
        return self._reader.box(f"{self._kind}.{name}", slices)

    def box(self, name: str, slices: Slices) -> torch.Tensor:
        """A box of a parameter of the model, with its adapter merged (Hu et al. 2021, 4.1; with DoRA Liu et al. 2024,
        equation 5)."""
        parameter = self._parameters[name]
        if parameter.trained or self._initial_values is None:
            return self.trained(name, slices)
        # The weights are rounded as in training; the sum is computed in the optimizer's dtype.
        value = self._frozen(parameter, slices)
        adapted = len(parameter.shape) > 1 and lora_shape.names(name)[0] in self._parameters
        if self._lora is None or not adapted:
            return value
        value = self._sum(name, slices, value)
        return value.mul_(self._factors(name, slices[:-1])[..., None]) if self._lora.dora else value

    def _frozen(self, parameter: Parameter, slices: Slices) -> torch.Tensor:
        assert self._initial_values is not None
        return self._initial_values.held(parameter, slices).to(TORCH_DTYPE[WIDE[self._precision]])

    def _sum(self, name: str, slices: Slices, value: torch.Tensor) -> torch.Tensor:
        """`value`, a box of a frozen matrix, plus scale B A of its adapter."""
        assert self._lora is not None
        name_a, name_b = lora_shape.names(name)
        rank = slice(0, self._lora.rank)
        a_RI, b_OR = self.trained(name_a, (rank, slices[-1])), self.trained(name_b, (*slices[:-1], rank))
        return value.add_(b_OR @ a_RI, alpha=self._lora.scale)

    def _factors(self, name: str, slices: Slices) -> torch.Tensor:
        """By what DoRA multiplies rows of a matrix: the trained lengths divided by those that they have.

        Those of all rows of one matrix stay in memory: a matrix may be read in boxes of its columns.
        """
        if self._factors_of[0] != name:
            matrix = self._parameters[name]
            every = tuple(slice(0, size) for size in matrix.shape)
            parts = [
                (slice(row, min(row + _ROWS, every[0].stop)), *every[1:]) for row in range(0, every[0].stop, _ROWS)
            ]
            squares = [self._sum(name, part, self._frozen(matrix, part)).square_().sum(-1) for part in parts]
            magnitude = self.trained(lora_shape.magnitude_name(name), every[:-1])
            self._factors_of = name, magnitude / torch.cat(squares).sqrt_()
        return self._factors_of[1][slices]


def _initial_values(trained: Trained) -> InitialValues:
    """The initial values of the run. Raises UserError: the folder model.weights is missing or has changed."""
    run, weights = trained.folder.path, trained.resolved.model.weights
    try:
        found = InitialValues(trained.config.run.seed, trained.resolved.model, trained.config.train.precision)
    except UserError as error:
        words = (
            f"{run}: its checkpoints have only adapters, so the folder model.weights is needed; if it has moved, "
            f"give its new path once: {resume_command(run, 'model.weights=NEW')}, or write it into {run / CONFIG}"
        )
        if is_hub_name(weights):
            needs = "its checkpoints have only adapters, and the cache of the hub lacks the weights; download them"
            words = f"{run}: {needs}: {command('fetch', str(weights))}"
        raise UserError(words, *error.problems) from error
    base = trained.saved.state.get("base")
    same = base is None if found.weights is None else base is not None and found.weights.matches(base)
    if not same:
        raise UserError(f"{weights}: not the weights with which the adapters of {run} were trained")
    return found


def find(run: Path, *, best: bool = False, step: int | None = None, ema: bool = False) -> Trained:
    """Open a run and choose a checkpoint: the newest, the one with the lowest validation loss (`best`), or of a step.

    The checkpoint is locked, so that a run that is still training does not delete it.
    `ema`: its averages are read, not its weights.
    Raises UserError: not a run folder, there is no such checkpoint, or the run keeps no average.
    """
    folder = RunFolder.open(run)
    config = load(folder.path / CONFIG).config
    if ema and not config.train.ema:
        raise UserError(f"{run}: --ema: the run keeps no moving average of its weights (train.ema = 0); leave it out")
    checkpoints = Checkpoints(folder.checkpoints, keep_last=1, keep_best=False)

    def choose() -> Saved:
        if step is not None:
            return checkpoints.at(step)
        saved = checkpoints.latest()
        if saved is None:
            raise UserError(
                f"{folder.checkpoints}: no checkpoint yet; the run saves one at its end (checkpoint.last), and every "
                "checkpoint.every steps"
            )
        if best and (saved := checkpoints.best()) is None:
            raise UserError(f"{folder.checkpoints}: no checkpoint has a validation loss, so --best cannot choose one")
        return saved

    return Trained(folder, config, *checkpoints.hold(choose), ema)


def module_of(trained: Trained, device: torch.device, *, as_trained: bool = False) -> nn.Module:
    """Build the model on `device` with its trained weights, adapters merged. Releases the lock on the checkpoint.

    The dtype is that of training on a GPU. On a CPU it is fp64 after training in fp64, otherwise fp32; with
    `as_trained` bf16 after training in bf16, if the processor multiplies bf16.

    Raises UserError: the checkpoint is damaged, or belongs to another model than that of the config; the device has no
    fp64, in which the model was trained.
    """
    if trained.config.train.precision == "fp64" and not has_fp64(device):
        raise UserError(
            f"{trained.folder.path}: trained in fp64, and the {KINDS[device.type].label} has no fp64; give --device cpu"
        )
    values = Values(trained, _InMemory)
    tensors = {p.name: values.box(p.name, tuple(slice(0, size) for size in p.shape)) for p in trained.declared}
    trained.hold.close()
    module = models.construct(models.facts_of(trained.resolved.model.kind, trained.resolved.shape))
    module.load_state_dict(tensors, assign=True)
    narrow = computes_bf16(device, as_trained=as_trained) and trained.config.train.precision == "bf16"
    sum_wide()
    return module.to(device, torch.bfloat16 if narrow else None)


def computes_bf16(device: torch.device, *, as_trained: bool = True) -> bool:
    """Whether a model in bf16 is computed in bf16 on a device. See `module_of`."""
    return device.type in GPUS or (as_trained and device.type == "cpu" and multiplies_bf16())


def dataset_of(trained: Trained) -> AnyDataset:
    """Open the run's dataset; prepare it again if it was deleted. Says so if only size and times of files are known.

    Raises UserError: it cannot be prepared, or differs from the dataset that the model was trained on.
    """
    dataset = tasks.prepare_and_open(trained.request, progress=True)
    before = trained.saved.state.get("dataset")
    if before not in (None, dataset.fingerprint, dataset.earlier):
        raise UserError(f"{dataset.path}: not what the run in {trained.folder.path} was trained on ({before})")
    unsummed = verified.unsummed()
    if unsummed and trained.request.data.verify != "changed":
        reading = " and ".join(command("data", one.path, "--verify") for one in datasets_of(dataset))
        warn(f"{verified.unnoticed(sum(unsummed.values()))}; {reading} reads them")
    return dataset


def device_of(name: str) -> torch.device | str:
    """The device that --device names, or an error text if it cannot be used."""
    if name not in NAMES:
        return f"--device {name}: must be {in_words()}"
    if name in GPUS and not count(name):
        return f"--device {name}: torch finds no {KINDS[name].label} here"
    return torch.device(found_kind() if name == AUTO else name)
