"""In: a model's torch module. Out: the module with activation checkpointing: backward recomputes activations.
Does not split anything over ranks: it has no mesh axis and changes no tensor of the plan. It sends nothing itself, but
a recomputed block sends the messages of tp and cp again (tensor.py and context_parallel.py declare them)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from codescent.plan import Plan
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Recompute(Strategy):
    """Activation checkpointing.

    full: saves only the input of each block (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). It
    costs one more forward pass of the blocks, 4/3 of the FLOPs. selective: recomputes only GELU or SwiGLU and
    attention probabilities. They are the largest activations and cost few FLOPs (Korthikanti et al. 2022, "Reducing
    Activation Recomputation", section 5).
    """

    variants = ({"recompute": "selective"}, {"recompute": "full"})

    def serves(self, run: Candidate | Plan) -> bool:
        """True if parallel.recompute is set."""
        return run.layout.recompute != "none"

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Checkpoint the forward pass of each block, or set `recompute` in the layers that have this attribute."""
        from torch import nn  # noqa: PLC0415 - keeps torch out of planning

        blocks = part.blocks
        assert isinstance(blocks, nn.ModuleDict)
        for block in blocks.values():
            if this_rank.plan.layout.recompute == "full":
                # Checkpoint `forward`, not the module: hooks of later strategies must not run twice. Dropout masks are
                # functions of keys, so there is no random state to restore.
                if this_rank.plan.mesh.cp > 1:  # torch.compile breaks the graph at its messages (ring.py)
                    cast(Any, block).compile = partial(_compile_inside, block, block.forward)
                block.forward = _checkpointed(block.forward)
                continue
            for layer in block.modules():
                if hasattr(layer, "recompute"):
                    cast(Any, layer).recompute = True


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checkpoints `forward`. torch.compile enters it, and then the checkpoint: one graph has both.

    As a functools.partial, `checkpoint` would be called as a whole: torch keeps the compiler out of its own function,
    and of all that it calls. Nothing of the block would be compiled, without a word.
    """
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415 - keeps torch out of planning

    def run(*arguments: Any, **options: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _compile_inside(block: torch.nn.Module, forward: Callable[..., Any], **options: Any) -> None:
    """`block.compile` of a checkpointed block whose graph has a break, which a checkpoint in a graph must not have.

    So the checkpoint stays outside of the graphs. Backward then recomputes the last matrix product, too.
    """
    import torch  # noqa: PLC0415 - keeps torch out of planning

    cast(Any, block).forward = _checkpointed(torch.compile(forward, **options))
