"""In: the sizes of a Llama, a forward pass. Out: what each depth keeps for backward, and what it computes beside
products with matrices.
Does not import torch or declare parameters (declare.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from codescent.models import block_operations, saved_blocks
from codescent.models.llama import experts, latents, multi_token
from codescent.operators import operations, saved_experts, saved_tensors
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import SavedTensor
from codescent.plan.model import runs_of
from codescent.plan.operators import LayerOperator

if TYPE_CHECKING:
    from codescent.models.llama.declare import LlamaShape

NORMS = {"first": (("norm_{}",), ()), "output": ((), ("norm_{}",)), "both": (("norm_{}",), ("norm_{}_out",))}
"""By `LlamaShape.norm`: the norms before and after a part, in which {} is the number of the part."""


def saved(shape: LlamaShape, forward: ForwardPass) -> Iterator[SavedTensor]:
    """What each depth keeps for backward."""
    width = shape.hidden_dim
    yield from saved_blocks.embedding(forward, width, ("tok", forward.positions), dropout=0.0)
    if forward.selects or forward.documents:  # else they are tables, which no pass makes
        yield from latents.saved_angles(shape, forward)
    for depths, (_, routed) in runs_of(tuple(zip(shape.windows, shape.routed, strict=True))):
        yield from _saved_block(shape, Stream(forward, depths, forward.positions, width), routed=routed)
    end = saved_blocks.head(forward, shape)
    norm = saved_tensors.plus_one_norm if shape.norm_plus_one else saved_tensors.rms_norm
    yield from norm(end, "norm")
    yield from saved_blocks.loss(end, shape, "tok" if shape.tie_head else "head", tied=shape.tie_head)
    yield from multi_token.saved(shape, forward, partial(_saved_block, shape, routed=shape.num_experts > 0))


def _saved_block(shape: LlamaShape, blocks: Stream, *, routed: bool) -> Iterator[SavedTensor]:
    """What a block keeps. `routed`: whether it has experts."""
    norm = saved_tensors.plus_one_norm if shape.norm_plus_one else saved_tensors.rms_norm
    before, after = NORMS[shape.norm]
    sums = shape.norm_plus_one and before and after and not blocks.forward.selects  # cp cuts between norm and sum
    between = partial(saved_tensors.plus_one_norm, again=True) if sums else norm
    for name in before:
        yield from norm(blocks, name.format(1))
    yield from latents.saved(blocks, shape, entered=not before)
    for name in after:
        yield from norm(blocks, name.format(1), entered=False)
    for name in before:
        yield from between(blocks, name.format(2), entered=False)
    if routed:
        yield from saved_experts.layer(blocks, experts.sizes_of(shape), "mlp")
    else:
        yield from saved_blocks.feed_forward(blocks, shape, "gate_up", halves=2, by_torch=1)
    for name in after:
        yield from norm(blocks, name.format(2), entered=False)
    yield from saved_blocks.block_inputs(blocks, shape, 0)


def operators(shape: LlamaShape, forward: ForwardPass) -> Iterator[LayerOperator]:
    """What each depth computes beside products with matrices."""
    begin = Stream(forward, (0, 1), forward.positions, shape.hidden_dim)
    yield operations.embedded(begin, "tok")
    if shape.scale_embedding:
        yield operations.scaled(begin, "embedding scale", "tok")
    for depths, (_, routed) in runs_of(tuple(zip(shape.windows, shape.routed, strict=True))):
        yield from _block_operators(shape, Stream(forward, depths, forward.positions, shape.hidden_dim), routed=routed)
    end = block_operations.head(forward, shape)
    yield operations.norm(end, "norm")
    yield from block_operations.for_head(end, shape, "norm")
    yield from multi_token.operators(shape, forward, partial(_block_operators, shape, routed=shape.num_experts > 0))
    yield operations.loss(end, "tok" if shape.tie_head else "head", shape.vocab_size, capped=shape.logit_cap > 0.0)


def _block_operators(shape: LlamaShape, blocks: Stream, *, routed: bool) -> Iterator[LayerOperator]:
    """What a block computes beside products with matrices. `routed`: whether it has experts."""
    before, after = NORMS[shape.norm]
    for name in before or after:
        yield operations.norm(blocks, name.format(1))
    yield from latents.operators(blocks, shape)
    for name in after if before else ():
        yield operations.norm(blocks, name.format(1))
    for name in before or after:
        yield operations.norm(blocks, name.format(2))
    if routed:
        yield from saved_experts.operators(blocks, experts.sizes_of(shape), "mlp")
    else:
        yield from block_operations.feed_forward(blocks, shape, "gate_up", halves=2)
    for name in after if before else ():
        yield operations.norm(blocks, name.format(2))
