"""In: an encoder-decoder that was trained on lines, lines. Out: how many tokens and lines it gets right.
Does not read the run folder (verbs/trained.py does)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from codescent.data.loader import Batch
from codescent.models.transformer.module import Transformer
from codescent.models.transformer.translate import greedy
from codescent.tasks.pairs import LineSource

LINES_AT_ONCE = 256
MOST_LINES = 1000  # greedy decoding reads the target so far again for every token


@dataclass
class Accuracy:
    """Right tokens, ends of lines included, and lines that are right as a whole."""

    tokens: int = 0
    lines: int = 0

    def count(self, found_BT: Tensor, wanted_BT: Tensor) -> None:
        """Add a batch; wanted tokens below 0 do not count."""
        right_BT = (found_BT == wanted_BT) | (wanted_BT < 0)
        self.tokens += int((right_BT & (wanted_BT >= 0)).sum())
        self.lines += int(right_BT.all(1).sum())


@dataclass(frozen=True)
class LineScore:
    """How well lines are translated; `forced` counts with teacher forcing, `alone` with greedy decoding."""

    lines: int
    tokens: int
    loss: float
    forced: Accuracy
    alone: Accuracy

    def words(self) -> list[str]:
        """As lines for people."""
        return [
            f"{self.lines:,} lines of the validation split, {self.tokens:,} tokens: loss {self.loss:.4f}",
            *(
                f"{when}: {how.tokens / self.tokens:.2%} of the tokens, {how.lines / self.lines:.2%} of the lines"
                for when, how in (("after the right tokens", self.forced), ("after its own tokens", self.alone))
            ),
        ]


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
        wanted_BT = batch.targets[:, shape.source_len :]
        with torch.no_grad():
            loss += float(module(batch.inputs, batch.targets, **batch.extras))
            forced.count(module(batch.inputs, **batch.extras).argmax(-1), wanted_BT)
        source_BS, lengths_B = batch.inputs[:, : shape.source_len], batch.extras["source_lengths_B"]
        alone.count(greedy(module, source_BS, lengths_B, source.begin, source.end), wanted_BT)
    return LineScore(lines, tokens, loss / max(1, tokens), forced, alone)
