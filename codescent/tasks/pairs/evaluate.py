"""In: a trained encoder-decoder, the lines of a split. Out: how many tokens and whole lines it predicts exactly.
Does not read the run folder (inference/trained.py does)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from codescent.base.counted import counted
from codescent.data.loader import Batch
from codescent.models.transformer.module import Transformer
from codescent.models.transformer.translate import greedy
from codescent.tasks.pairs import LineSource
from codescent.tasks.scores import Scores

LINES_AT_ONCE = 256
MOST_LINES = 1000  # greedy decoding computes the whole target so far for every new token


@dataclass
class Accuracy:
    """Number of right tokens (ends of lines included), and of lines in which every token is right."""

    tokens: int = 0
    lines: int = 0

    def count(self, found_BT: Tensor, target_BT: Tensor) -> None:
        """Add a batch: predicted and target tokens; targets below 0 do not count."""
        right_BT = (found_BT == target_BT) | (target_BT < 0)
        self.tokens += int((right_BT & (target_BT >= 0)).sum())
        self.lines += int(right_BT.all(1).sum())


@dataclass(frozen=True)
class LineScore:
    """Score of lines: `forced` is counted with teacher forcing, `alone` with greedy decoding."""

    lines: int
    tokens: int
    loss: float
    forced: Accuracy
    alone: Accuracy

    def scores(self) -> Scores:
        """Lines to print, and the same as data."""
        ways = {"with teacher forcing": self.forced, "with greedy decoding": self.alone}
        shares = {when: (how.tokens / self.tokens, how.lines / self.lines) for when, how in ways.items()}
        said = [
            f"{counted(self.lines, 'line')} of the validation split, {self.tokens:,} tokens: loss {self.loss:.4f}",
            *(
                f"{when}: {tokens:.2%} of the tokens, {lines:.2%} of the lines"
                for when, (tokens, lines) in shares.items()
            ),
        ]
        facts = {"data": "validation split", "lines": self.lines, "tokens": self.tokens, "loss": self.loss}
        right = {
            when.removeprefix("with ").replace(" ", "_"): {"tokens": tokens, "lines": lines}
            for when, (tokens, lines) in shares.items()
        }
        return Scores(said, {**facts, **right})


def score_lines(
    module: Transformer, source: LineSource, device: torch.device, most_lines: int | None = MOST_LINES
) -> LineScore:
    """Score a model in evaluation mode on the first lines of a split; `most_lines` None: on all of them."""
    shape, lines = module.shape, min(source.num_samples, most_lines or source.num_samples)
    forced, alone, loss = Accuracy(), Accuracy(), 0.0
    tokens = int(source.losses(np.arange(lines)).sum())
    for first in range(0, lines, LINES_AT_ONCE):
        numbers = np.arange(first, min(first + LINES_AT_ONCE, lines))
        batch = Batch.of(source.read(numbers)).to(device, torch.float32)
        target_BT = batch.targets[:, shape.source_len :]
        with torch.no_grad():
            loss += float(module(batch.inputs, batch.targets, **batch.extras))
            forced.count(module(batch.inputs, **batch.extras).argmax(-1), target_BT)
        source_BS, lengths_B = batch.inputs[:, : shape.source_len], batch.extras["source_lengths_B"]
        alone.count(greedy(module, source_BS, lengths_B, source.begin, source.end), target_BT)
    return LineScore(lines, tokens, loss / max(1, tokens), forced, alone)
