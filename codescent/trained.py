"""In: a run folder, and which of its checkpoints is meant. Out: the model that it describes, and its tokenizer.
Does not change the run folder, and does not use the model: sampling and exporting do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from codescent import models
from codescent.build import model_shape
from codescent.config import Config
from codescent.configfile import load
from codescent.data.tokenizers import Tokenizer
from codescent.data.tokenizers import load as load_tokenizer
from codescent.errors import UserError
from codescent.plan import Parameter, Plan
from codescent.record import CONFIG, RunFolder
from codescent.train.checkpoint import Checkpoints, Saved


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
        """Sizes of the model; the vocabulary is the plan's where neither config nor tokenizer tell it."""
        vocab_size = Plan.from_json(self.folder.plan).work.vocab_size if self.tokenizer is None else None
        return model_shape(self.config, vocab_size if self.tokenizer is None else self.tokenizer.vocab_size)

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
