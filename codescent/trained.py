"""In: a run folder, and which of its checkpoints is meant. Out: the model that it describes, and its tokenizer.
Does not change the run folder, and does not use the model: sampling, evaluating and exporting do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from codescent import models
from codescent.build import model_shape
from codescent.config import Config
from codescent.configfile import load
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers import Tokenizer
from codescent.data.tokenizers import load as load_tokenizer
from codescent.datasets import opened, prepare_dataset
from codescent.errors import UserError
from codescent.plan import Parameter, Plan
from codescent.record import CONFIG, RunFolder
from codescent.train.checkpoint import Checkpoints, Saved, read_tensors


@dataclass(frozen=True)
class Trained:
    """What a run folder says of its model, and one of its checkpoints."""

    folder: RunFolder
    config: Config
    saved: Saved

    @property
    def kind(self) -> str:
        """Of the model."""
        return models.kind_of(self.config.model.kind, self.config.model.preset)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Of the run's data; None where the run kept none."""
        return load_tokenizer(self.folder.tokenizer) if self.folder.tokenizer.is_file() else None

    @cached_property
    def shape(self) -> models.Shape:
        """Sizes of the model; the vocabulary is the plan's where the config does not tell it."""
        return model_shape(self.config, Plan.from_json(self.folder.plan).work.vocab_size)

    @cached_property
    def declared(self) -> tuple[Parameter, ...]:
        """Its parameters; the checkpoint has each as "model.NAME"."""
        return models.parameters_of(self.kind, self.shape)

    def misfits(self, found: dict[str, tuple[int, ...]]) -> list[str]:
        """Parameters whose shape in the checkpoint is not what the run's config makes it."""
        return [
            f"{self.saved.path}: {parameter.name} has the shape {found[parameter.name]}, the run's config makes it "
            f"{parameter.shape}"
            for parameter in self.declared
            if found[parameter.name] != parameter.shape
        ]


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
    """The model with its weights: in fp32 on a CPU (fp64 after fp64), in the training's dtype on CUDA.

    Raises:
        UserError: the checkpoint is damaged, or not of the model that the config describes.
    """
    names = [parameter.name for parameter in trained.declared]
    read = read_tensors(trained.saved.path, [f"model.{name}" for name in names])
    tensors = {name: read[f"model.{name}"] for name in names}
    if problems := trained.misfits({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        raise UserError(*problems)
    module = models.construct(trained.kind, trained.shape)
    module.load_state_dict(tensors, assign=True)
    narrow = device.type == "cuda" and trained.config.train.precision == "bf16"
    return module.to(device, torch.bfloat16 if narrow else None)


def dataset_of(trained: Trained) -> AnyDataset:
    """What the run reads, prepared again where it is not there any more.

    Raises:
        UserError: it cannot be had, or is not what the model was trained on.
    """
    dataset = opened(trained.config, prepare_dataset(trained.config, progress=True))
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
