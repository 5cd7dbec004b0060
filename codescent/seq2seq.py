"""In: the run folder of an encoder-decoder that was trained on lines. Out: how many tokens and lines it gets right.
Does not change the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from codescent import models
from codescent.build import model_shape
from codescent.config import Config
from codescent.configfile import load
from codescent.data.lines import LineSource
from codescent.data.loader import Batch
from codescent.data.samples import AnyDataset
from codescent.datasets import opened, prepare_dataset, task_of
from codescent.errors import UserError
from codescent.models.transformer import Transformer
from codescent.models.translate import greedy
from codescent.record import CONFIG, RunFolder
from codescent.train.checkpoint import Checkpoints, read_tensors

LINES_AT_ONCE = 256


@dataclass
class Accuracy:
    """Right tokens, the lines' ends among them, and wholly right lines; as shares in `as_shares`."""

    tokens: int = 0
    lines: int = 0

    def count(self, found_BT: Tensor, wanted_BT: Tensor) -> None:
        """One more batch; negative where nothing is wanted."""
        right_BT = (found_BT == wanted_BT) | (wanted_BT < 0)
        self.tokens += int((right_BT & (wanted_BT >= 0)).sum())
        self.lines += int(right_BT.all(1).sum())

    def as_shares(self, tokens: int, lines: int) -> dict[str, float]:
        """token_accuracy and line_accuracy."""
        return {"token_accuracy": self.tokens / tokens, "line_accuracy": self.lines / lines}


def evaluate_seq2seq(run: Path, *, most_lines: int | None = 1000, device: str = "cpu") -> dict[str, Any]:
    """Read the first lines of the validation split with the newest checkpoint of a run.

    Args:
        run: the run folder.
        most_lines: how many lines; None: all.
        device: "cpu" or "cuda".

    Returns:
        step, lines, tokens (the lines' ends among them), loss (mean of a token's), and token_accuracy and line_accuracy
        in `teacher_forced`, where each token is to be told after the right ones, and in `greedy`, where after those
        that the model has told itself.

    Raises:
        UserError: not such a run, no checkpoint, a damaged one, another text than it was trained on.
    """
    config, module, dataset, step = _trained(Path(run), torch.device(device))
    shape = module.shape
    source = cast(LineSource, dataset.source("validation", shape.seq_len, shape.target_len))
    lines = min(source.num_samples, most_lines or source.num_samples)
    if lines < 1:
        raise UserError(f"{dataset.path}: the validation split has no line; raise data.validation_fraction")
    forced, alone, loss = Accuracy(), Accuracy(), 0.0
    tokens = int(source.losses(np.arange(lines)).sum())
    for first in range(0, lines, LINES_AT_ONCE):
        numbers = np.arange(first, min(first + LINES_AT_ONCE, lines))
        batch = Batch.of(source.read(numbers)).to(torch.device(device), torch.float32)
        wanted_BT = batch.targets[:, shape.source_len :]
        with torch.no_grad():
            loss += float(module(batch.inputs, batch.targets, **batch.beside))
            forced.count(module(batch.inputs, **batch.beside).argmax(-1), wanted_BT)
        source_BS, lengths_B = batch.inputs[:, : shape.source_len], batch.beside["source_lengths_B"]
        alone.count(greedy(module, source_BS, lengths_B, source.begin, source.end), wanted_BT)
    found: dict[str, Any] = {"run": str(run), "step": step, "pairs": config.data.pairs, "lines": lines}
    found |= {"tokens": tokens, "loss": loss / tokens}
    return found | {"teacher_forced": forced.as_shares(tokens, lines), "greedy": alone.as_shares(tokens, lines)}


def report(found: dict[str, Any]) -> list[str]:
    """What `evaluate_seq2seq` found, for people."""
    lines = [
        f"{found['run']} at step {found['step']}: {found['lines']:,} lines of the validation split, "
        f"{found['tokens']:,} tokens, loss {found['loss']:.4f}"
    ]
    for how, words in (("teacher_forced", "after the right tokens"), ("greedy", "after its own tokens")):
        share = found[how]
        lines.append(f"{words}: {share['token_accuracy']:.2%} of the tokens, {share['line_accuracy']:.2%} of the lines")
    return lines


def _trained(run: Path, device: torch.device) -> tuple[Config, Transformer, AnyDataset, int]:
    folder = RunFolder.open(run)
    config = load(folder.path / CONFIG).config
    if task_of(config) != "seq2seq":
        raise UserError(f'{folder.path}: data.task = "{task_of(config)}": lines are told by runs of "seq2seq" alone')
    saved = Checkpoints(folder.checkpoints, keep_last=1, keep_best=False).latest()
    if saved is None:
        raise UserError(f"{folder.checkpoints}: no checkpoint yet; the run saves one at its end")
    dataset = opened(config, prepare_dataset(config, progress=True))
    if saved.state["dataset"] != dataset.fingerprint:
        raise UserError(f"{dataset.path}: not the lines that the run in {folder.path} was trained on")
    shape = model_shape(config, dataset.vocab_size)
    declared = models.parameters_of("transformer", shape)
    tensors = read_tensors(saved.path, [f"model.{parameter.name}" for parameter in declared])
    module = cast(Transformer, models.construct("transformer", shape))
    module.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, assign=True)
    return config, module.to(device).eval(), dataset, saved.step
