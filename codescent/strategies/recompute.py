"""In: a module on the meta device. Out: the same, keeping fewer activations: they are made again in the backward pass.
Does not divide anything: it serves no mesh axis, changes no tensor of the plan and sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from codescent.plan import Plan, Schedule, TensorPlan, Traffic
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RecomputeOptions:
    """`recompute`: "none", "selective" or "full"."""

    recompute: str


class Recomputing(Protocol):
    """A part of a block that can make activations again, as models have them."""

    recompute: bool


class Recompute:
    """Activation checkpointing.

    full: of a block only its input is kept (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): one
    more forward pass of the blocks, 4/3 of the FLOPs. selective: GELU or SwiGLU, and attention probabilities, the
    largest activations for the fewest FLOPs (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 5).
    """

    axis = ""
    Options = RecomputeOptions
    variants: tuple[Mapping[str, Any], ...] = ({"recompute": "selective"}, {"recompute": "full"})

    def __init__(self, options: RecomputeOptions) -> None:
        self.what = options.recompute

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Nothing: it goes with everything."""
        yield from ()

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """Parameters, gradients and state stay where they are."""
        return tensor

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """A step is the same list: what is made again is part of BACKWARD."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """Nothing: a block's weights are there in its backward pass, where it is made again."""
        yield from ()

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """Of every block, either its forward pass is checkpointed or its parts are told to make again what they can."""
        from torch import nn  # noqa: PLC0415 - keeps torch out of planning
        from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

        blocks = part.blocks
        assert isinstance(blocks, nn.ModuleDict)
        for block in blocks.values():
            if self.what == "full":
                # Not the module's call but its forward: hooks of strategies applied later must not run twice. Dropout
                # masks are a function of keys, so there is no random state to bring back.
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            elif self.what == "selective":
                for layer in block.modules():
                    if hasattr(layer, "recompute"):
                        cast(Recomputing, layer).recompute = True

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Another strategy's."""
        return None
