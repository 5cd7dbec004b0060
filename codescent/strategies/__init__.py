"""In: nothing. Out: ORDER, every strategy in the order in which they are applied, and what a strategy is.
Does not import torch: planning walks ORDER and must not wait for it; each strategy's `divide` brings its own."""

from codescent.strategies.context_parallel import Context
from codescent.strategies.offload import Offload
from codescent.strategies.pipeline import Pipeline
from codescent.strategies.recompute import Recompute
from codescent.strategies.replicate import Replicate
from codescent.strategies.strategy import Ask, Gradients, Here, Strategy
from codescent.strategies.tensor import Tensor
from codescent.strategies.torch_data_parallel import DataParallel
from codescent.strategies.zero import Zero

ORDER: tuple[type[Strategy], ...] = (
    Context,
    Tensor,
    Recompute,
    Zero,
    Replicate,
    Pipeline,
    DataParallel,
    Offload,
)
"""Inner to outer: a strategy sees the module, and where its tensors are, as those before it have left them."""

__all__ = [
    "ORDER",
    "Ask",
    "Context",
    "DataParallel",
    "Gradients",
    "Here",
    "Offload",
    "Pipeline",
    "Recompute",
    "Replicate",
    "Strategy",
    "Tensor",
    "Zero",
]
