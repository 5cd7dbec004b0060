"""In: nothing. Out: `ScoreTraits`: how a model turns products of queries and keys into scores of causal attention.
Does not compute attention (attention.py, block_attention.py and strategies/causal_tiles.py do). Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ScoreTraits:
    """Traits of the scores of causal attention.

    Attributes:
        window: a position sees so many positions, itself included; 0: all earlier ones.
        cap: a score s becomes cap * tanh(s / cap) (Gemma Team 2024, "Gemma 2", section 2); 0: it stays.
        width: products are divided by the square root of this number; 0: of the channels of a head.
    """

    window: int = 0
    cap: float = 0.0
    width: int = 0

    def within(self, length: int) -> ScoreTraits:
        """The same for samples of so many positions: a window of all of them is none."""
        return self if self.window < length else replace(self, window=0)

    @property
    def by_blocks(self) -> bool:
        """Whether no fused kernel of torch computes them without a mask: then it is done block by block."""
        return bool(self.window or self.cap)

    def factor(self, head_dim: int) -> float:
        """By what products of queries and keys are multiplied."""
        return 1.0 / math.sqrt(self.width or head_dim)


PLAIN = ScoreTraits()
"""q k^T / sqrt(head_dim), of all earlier positions."""
