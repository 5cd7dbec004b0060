"""In: a run folder, and which of its checkpoints is meant. Out: the model that it describes, and its tokenizer.
Does not change the run folder, and does not use the model: sampling, evaluating and exporting do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from codescent import models, tasks
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.build import Resolved, resolve
from codescent.checkpoint.checkpoints import Checkpoints, Saved, TensorReader, read_tensors
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.data.tokenizers.tokenizer import load as load_tokenizer
from codescent.models.lora import declare as lora_shape
from codescent.plan import WIDE, Lora, Parameter
from codescent.preflight import ask_kept, saved_plan
from codescent.record import CONFIG, RunFolder
from codescent.train.initial import Beginning

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Trained:
    """What a run folder says of its model, and one of its checkpoints."""

    folder: RunFolder
    config: Config
    saved: Saved

    @cached_property
    def resolved(self) -> Resolved:
        """Model and task as the run's config has them now: a folder of weights may have been moved since the plan."""
        return resolve(self.config, saved_plan(self.folder).model.vocab_size or None)

    @property
    def kind(self) -> str:
        """Of the model."""
        return self.resolved.model.kind

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Of the run's data; None where the run kept none."""
        return load_tokenizer(self.folder.tokenizer) if self.folder.tokenizer.is_file() else None

    @cached_property
    def task(self) -> tasks.Task:
        """What it was trained for."""
        return tasks.chosen(self.ask)

    @cached_property
    def ask(self) -> tasks.Ask:
        """What the run asks of its task, with the files that it keeps."""
        return ask_kept(self.resolved.ask, self.folder)

    @cached_property
    def shape(self) -> models.Shape:
        """Sizes of the model."""
        return self.resolved.shape

    @cached_property
    def declared(self) -> tuple[Parameter, ...]:
        """Its parameters, without adapters."""
        return models.parameters_of(self.kind, self.shape)

    @cached_property
    def lora(self) -> Lora | None:
        """The adapters that it was trained with."""
        return self.resolved.model.lora

    @cached_property
    def adapted(self) -> tuple[Parameter, ...]:
        """Its parameters, with adapters; the checkpoint has each one that was trained as "model.NAME"."""
        return models.parameters_of(self.kind, self.shape, self.lora)


class InMemory:
    """Tensors of a checkpoint, read at once; asked for like those of a TensorReader, which reads a box at a time."""

    def __init__(self, path: Path, names: Collection[str]) -> None:
        self._tensors = read_tensors(path, names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._tensors[name].shape)

    def box(self, name: str, slices: Slices) -> torch.Tensor:
        """One box of a tensor."""
        return self._tensors[name][slices]


class Values:
    """Boxes of what a trained model is made of.

    Args:
        trained: which.
        reader: of the checkpoint: a box at a time where memory counts, or all at once where all is wanted.

    Raises:
        UserError: the checkpoint is damaged, or not of the model that the config describes; what was not trained is not
            to be had any more.
    """

    def __init__(self, trained: Trained, reader: type[TensorReader] | type[InMemory] = TensorReader) -> None:
        self._lora, self._precision = trained.lora, trained.config.train.precision
        self._parameters = {parameter.name: parameter for parameter in trained.adapted}
        held = [parameter for parameter in trained.adapted if parameter.trained]
        self._reader = reader(trained.saved.path, [f"model.{parameter.name}" for parameter in held])
        shapes = {parameter.name: self._reader.shape(f"model.{parameter.name}") for parameter in held}
        problems = [
            f"{trained.saved.path}: {parameter.name} has the shape {shapes[parameter.name]}, the run's config makes it "
            f"{parameter.shape}"
            for parameter in held
            if shapes[parameter.name] != parameter.shape
        ]
        if problems:
            raise UserError(*problems)
        self._beginning = None if trained.lora is None else _beginning(trained)

    def held(self, name: str, slices: Slices) -> torch.Tensor:
        """A box of a parameter that was trained: of an adapter's matrix, or of another one as the checkpoint has it."""
        return self._reader.box(f"model.{name}", slices)

    def box(self, name: str, slices: Slices) -> torch.Tensor:
        """A box of a parameter of the model without adapters: what these add is added to it (Hu et al. 2021, 4.1)."""
        parameter = self._parameters[name]
        if parameter.trained or self._beginning is None:
            return self.held(name, slices)
        # As it was read in training: rounded, where that was in bf16. The sum is made in the optimizer's format.
        wide = TORCH_DTYPE[WIDE[self._precision]]
        value = self._beginning.box(parameter, slices).to(TORCH_DTYPE[self._precision]).to(wide)
        name_a, name_b = lora_shape.names(name)
        if self._lora is None or len(parameter.shape) < 2 or name_a not in self._parameters:
            return value
        rank = slice(0, self._lora.rank)
        a_RI, b_OR = self.held(name_a, (rank, slices[-1])), self.held(name_b, (*slices[:-1], rank))
        return value.add_(b_OR @ a_RI, alpha=self._lora.scale)


def _beginning(trained: Trained) -> Beginning:
    """What the run began with, if that is there and still the same."""
    try:
        found = Beginning(trained.config.run.seed, trained.resolved.model.weights)
    except UserError as error:
        words = (
            f"{trained.folder.path}: its checkpoints have adapters alone, beside the weights of model.weights; where "
            f"that folder is now, write into {trained.folder.path / CONFIG}"
        )
        raise UserError(words, *error.problems) from error
    if found.folder is not None and not found.folder.is_as(trained.saved.state["base"]):
        raise UserError(
            f"{trained.resolved.model.weights}: not the weights beside which the adapters of {trained.folder.path} "
            "were trained"
        )
    return found


def find(run: Path, *, best: bool = False, step: int | None = None) -> Trained:
    """The trained model of a run: its newest checkpoint, the best one, or that of a step.

    Raises:
        UserError: not a run folder, or there is no such checkpoint.
    """
    folder = RunFolder.open(run)
    config = load(folder.path / CONFIG).config
    checkpoints = Checkpoints(folder.checkpoints, keep_last=1, keep_best=False)
    if step is not None:
        return Trained(folder, config, checkpoints.at(step))
    saved = checkpoints.latest()
    if saved is None:
        raise UserError(
            f"{folder.checkpoints}: no checkpoint yet; the run saves one at its end, and every checkpoint.every steps"
        )
    if best and (saved := checkpoints.best()) is None:
        raise UserError(f"{folder.checkpoints}: no checkpoint has a validation loss, so none is the best")
    return Trained(folder, config, saved)


def module_of(trained: Trained, device: torch.device) -> nn.Module:
    """The model with its weights, adapters merged: in fp32 on a CPU (fp64 after fp64), in the training's dtype on CUDA.

    Raises:
        UserError: the checkpoint is damaged, or not of the model that the config describes.
    """
    values = Values(trained, InMemory)
    tensors = {p.name: values.box(p.name, tuple(slice(0, size) for size in p.shape)) for p in trained.declared}
    module = models.construct(models.facts_of(trained.kind, trained.shape))
    module.load_state_dict(tensors, assign=True)
    narrow = device.type == "cuda" and trained.config.train.precision == "bf16"
    return module.to(device, torch.bfloat16 if narrow else None)


def dataset_of(trained: Trained) -> AnyDataset:
    """What the run reads, prepared again where it is not there any more.

    Raises:
        UserError: it cannot be had, or is not what the model was trained on.
    """
    dataset = tasks.opened(trained.ask, progress=True)
    before = trained.saved.state.get("dataset")
    if before not in (None, dataset.fingerprint):
        raise UserError(f"{dataset.path}: not what the run in {trained.folder.path} was trained on ({before})")
    return dataset


def device_of(name: str) -> torch.device | str:
    """The device that --device names, or why it cannot be used."""
    if name not in ("auto", "cpu", "cuda"):
        return f"--device {name}: must be auto, cpu or cuda"
    if name == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no CUDA device here"
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
