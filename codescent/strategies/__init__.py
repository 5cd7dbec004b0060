"""In: nothing. Out: ORDER, every strategy in the order in which they are applied, and what a strategy is.
Does not import torch: planning walks ORDER and must not wait for it; each strategy's `apply` brings its own."""

from codescent.strategies.replicate import Replicate
from codescent.strategies.strategy import Applied, Ask, Gradients, Strategy

ORDER: tuple[type[Strategy], ...] = (Replicate,)
"""Inner to outer: a strategy sees the module as those before it have left it."""

__all__ = ["ORDER", "Applied", "Ask", "Gradients", "Replicate", "Strategy"]
