"""In: a model's torch module. Out: the module with activation checkpointing: backward recomputes activations.
Does not split anything over ranks: it has no mesh axis and changes no tensor of the plan. It sends nothing itself, but
a recomputed block sends the messages of tp and cp again (tensor.py and context_parallel.py declare them)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from codescent.base.refusal import Change, Refusal
from codescent.plan import Plan, Role
from codescent.plan.activations import COMPILED, CUDA
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from codescent.plan.activations import SavedTensor

HALVES_DIMS = 3
"""Dims of a matrix of two halves, [rows, 2, columns]: the gate and the values that it multiplies."""


class Recompute(Strategy):
    """Activation checkpointing.

    full: saves only the input of each block (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). It
    costs one more forward pass of the blocks, 4/3 of the FLOPs. selective: recomputes only GELU or SwiGLU and
    attention probabilities. They are the largest activations and cost few FLOPs (Korthikanti et al. 2022, "Reducing
    Activation Recomputation", section 5). products: computes the block again, but keeps attention and the products
    before attention and activation (COLUMN matrices): in GPT-2 every second product. What is computed again is norms,
    activations, residual sums, and the products into the residual stream (ROW matrices).
    """

    variants = ({"recompute": "selective"}, {"recompute": "products"}, {"recompute": "full"})

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.recompute is set."""
        return run.layout.recompute != "none"

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse to keep products of layers with adapters: an adapter is added to the product in place."""
        if candidate.layout.recompute == "products" and candidate.model.lora is not None:
            others = [Change({"parallel.recompute": name}) for name in ("selective", "full")]
            yield Refusal('parallel.recompute = "products": lora.rank adds to products in place; keep none', others)

    def saved(self, tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Iterator[SavedTensor]:
        """Leave out what backward makes again. Compiled blocks keep with "selective" what they keep with "none"."""
        compiler = ("", CUDA, COMPILED) if run.layout.recompute == "selective" else ()
        for tensor in tensors:
            if run.layout.recompute in tensor.under:
                yield tensor
            elif "none" in tensor.under and tensor.on in compiler:
                yield replace(tensor, on=COMPILED)

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Checkpoint the forward pass of each block, or set `recompute` in the layers that have this attribute."""
        from torch import nn  # noqa: PLC0415 - keeps torch out of planning

        blocks = part.blocks
        assert isinstance(blocks, nn.ModuleDict)
        layout = this_rank.plan.layout
        for number, block in blocks.items():
            if layout.computes_blocks_again:
                kept = _kept(this_rank.plan, int(number) + 1) if layout.recompute == "products" else None
                # Checkpoint `forward`, not the module: hooks of later strategies must not run twice. Dropout masks are
                # functions of keys, so there is no random state to restore.
                if this_rank.plan.mesh.cp > 1:  # torch.compile breaks the graph at its messages (ring.py)
                    cast(Any, block).compile = partial(_compile_inside, block, block.forward, kept)
                block.forward = _checkpointed(block.forward, kept)
                continue
            for layer in block.modules():
                if hasattr(layer, "recompute"):
                    cast(Any, layer).recompute = True


def _kept(plan: Plan, depth: int) -> tuple[bool, ...]:
    """For each product of a block, in forward order: whether its matrix is COLUMN. Two halves are two products."""
    held = [tensor.parameter for tensor in plan.tensors if tensor.parameter.depths == (depth,)]
    matrices = [parameter for parameter in held if parameter.role in (Role.COLUMN, Role.ROW)]
    return tuple(
        matrix.role is Role.COLUMN for matrix in matrices for _ in range(2 if len(matrix.shape) == HALVES_DIMS else 1)
    )


def _checkpointed(forward: Callable[..., Any], kept: tuple[bool, ...] | None) -> Callable[..., Any]:
    """A function that checkpoints `forward`. `kept`: see `_kept`; None: nothing is kept.

    torch.compile enters the function, and then the checkpoint: one graph has both.

    As a functools.partial, `checkpoint` would be called as a whole: torch keeps the compiler out of its own function,
    and of all that it calls. Nothing of the block would be compiled, without a word.
    """
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415 - keeps torch out of planning

    if kept is None:

        def run(*arguments: Any, **options: Any) -> Any:
            return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

        return run

    import torch  # noqa: PLC0415

    from codescent.operators.kept import compiled_contexts, contexts, without_warning  # noqa: PLC0415

    without_warning()
    eager, compiled = partial(contexts, kept), partial(compiled_contexts, kept)

    def run_keeping(*arguments: Any, **options: Any) -> Any:
        given = {"use_reentrant": False, "preserve_rng_state": False, **options}
        if torch.compiler.is_compiling():
            return checkpoint(forward, *arguments, context_fn=compiled, **given)
        return checkpoint(forward, *arguments, context_fn=eager, **given)

    return run_keeping


def _compile_inside(
    block: torch.nn.Module, forward: Callable[..., Any], kept: tuple[bool, ...] | None, **options: Any
) -> None:
    """`block.compile` of a checkpointed block whose graph has a break, which a checkpoint in a graph must not have.

    So the checkpoint stays outside of the graphs. Backward then recomputes the last matrix product, too.
    """
    import torch  # noqa: PLC0415 - keeps torch out of planning

    cast(Any, block).forward = _checkpointed(torch.compile(forward, **options), kept)
