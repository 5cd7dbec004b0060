"""In: the sizes of a Llama that also predicts tokens behind the next one (multi-token prediction). Out: what is wrong
with them; parameters of its modules, FLOPs, what these keep and compute.
Does not import torch, and has nothing of blocks (declare.py has)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from codescent.models import block_operations
from codescent.models.shape import WEIGHT_STD, norm
from codescent.operators import operations, saved_tensors
from codescent.operators.saved_tensors import ForwardPass, Stream
from codescent.plan.activations import RECOMPUTES, SavedTensor
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

if TYPE_CHECKING:
    from codescent.models.llama.declare import LlamaShape

_OTHERS = ("window", "mup_base_dim", "norm_plus_one", "scale_embedding")
REFUSED: Mapping[str, str] = {
    "pp": "modules that predict more tokens (model.mtp_layers) read tokens, which only the first stage has",
    "cp": "modules that predict more tokens (model.mtp_layers) have attention whose messages are not declared",
    "ep": "modules that predict more tokens (model.mtp_layers) have experts whose messages are not declared",
}
"""See `Shape.refuses`."""
REFUSED_VALUES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "data_parallel": (
        tuple(range(2, 1 << 10)),
        "torch.nn.DataParallel copies modules, and their losses are lost with the copies; parallel.dp_replicate gives "
        "each device its own rank",
    ),
}
"""See `Shape.refuses_values`."""
UNCOMPILED = "with model.mtp_layers: what compiled modules behind the blocks would keep is not known"
"""See `Shape.uncompiled`."""


def wrong(full: Mapping[str, Any], where: str) -> Iterator[str]:
    """Problems of sizes beside modules that predict more tokens."""
    if not full.get("mtp_layers"):
        return
    for name in _OTHERS:
        if full.get(name):
            yield f"{where}.{name}: not with {where}.mtp_layers; leave one of them out"
    if full.get("norm", "first") != "first":
        yield f'{where}.norm = "{full["norm"]}": with {where}.mtp_layers norms are first'
    if full["mtp_layers"] >= full.get("seq_len", full["mtp_layers"] + 1):
        yield f"{where}.mtp_layers = {full['mtp_layers']}: a sample of {full['seq_len']} tokens has no such token"


def names(shape: LlamaShape) -> tuple[str, ...]:
    """Names of the modules. Their numbers go on behind those of the blocks, as in published folders."""
    return tuple(f"mtp.{shape.num_layers + module}" for module in range(shape.mtp_layers))


def parameters(shape: LlamaShape, block: Callable[[str, bool, int], Iterator[Parameter]]) -> Iterator[Parameter]:
    """The parameters of each module (`models.multi_token`). `block`: name, has experts, depth -> those of a block."""
    end, width = shape.num_layers + 1, shape.hidden_dim
    for name in names(shape):
        yield from norm(f"{name}.embed_norm", width, False, end)
        yield from norm(f"{name}.hidden_norm", width, False, end)
        both: dict[str, Any] = {"depths": (end,)}
        yield Parameter(f"{name}.join.weight", (width, 2 * width), Role.STREAM, WEIGHT_STD, **both)
        yield from block(f"{name}.block", shape.num_experts > 0, end)
        yield from norm(f"{name}.norm", width, False, end)


def forward_flops(shape: LlamaShape, blocks: tuple[float, ...]) -> float:
    """FLOPs per token of all modules: each is a block, the matrix before it, and the head. `blocks`: of each layer."""
    width = shape.hidden_dim
    return shape.mtp_layers * (2.0 * width * 2 * width + max(blocks) + 2.0 * width * shape.vocab_size)


def _stream(shape: LlamaShape, forward: ForwardPass) -> Stream:
    end = shape.num_layers + 1
    return Stream(forward, (end, end + 1), forward.positions, shape.hidden_dim, under=RECOMPUTES)


def saved(
    shape: LlamaShape, forward: ForwardPass, block: Callable[[Stream], Iterator[SavedTensor]]
) -> Iterator[SavedTensor]:
    """What modules keep. `block`: what a block keeps that reads a stream."""
    stream = _stream(shape, forward)
    layer = "tok" if shape.tie_head else "head"
    for name in names(shape):
        yield dataclasses.replace(saved_tensors.embedded(stream, "tok"), name=f"{name} tokens")
        yield from saved_tensors.rms_norm(stream, f"{name}.embed_norm", entered=False)
        yield from saved_tensors.rms_norm(stream, f"{name}.hidden_norm", entered=False)
        yield stream.rows(f"{name}.join input", 2 * shape.hidden_dim, layer=f"{name}.join", product=f"{name}.join")
        for tensor in block(stream):
            if "none" in tensor.under and not tensor.once:
                yield _of_module(tensor, name)
        yield from saved_tensors.rms_norm(stream, f"{name}.norm", entered=False)
        rows = stream.inputs(f"{name} head input gradient")
        for tensor in saved_tensors.head_gradients(stream, layer, shape.vocab_size, rows=rows, tied=0):
            yield tensor if tensor.name == rows.name else dataclasses.replace(tensor, name=f"{name} {tensor.name}")


def _of_module(tensor: SavedTensor, name: str) -> SavedTensor:
    """A tensor of a block as a module keeps it: whatever is computed again in blocks."""
    layers: dict[str, Any] = {
        field: f"{name}.block.{getattr(tensor, field)}" for field in ("layer", "product") if getattr(tensor, field)
    }
    small = f"{name} {tensor.small}" if tensor.small else ""
    changes: dict[str, Any] = {"name": f"{name} {tensor.name}", "small": small, "under": RECOMPUTES, "begins": 0}
    return dataclasses.replace(tensor, **changes, **layers)


def operators(
    shape: LlamaShape, forward: ForwardPass, block: Callable[[Stream], Iterator[LayerOperator]]
) -> Iterator[LayerOperator]:
    """What modules compute beside products with matrices. `block`: what a block computes."""
    stream = _stream(shape, forward)
    for name in names(shape):
        yield dataclasses.replace(operations.embedded(stream, f"{name}.embed_norm"), name=f"{name} tokens")
        yield operations.norm(stream, f"{name}.embed_norm")
        yield operations.norm(stream, f"{name}.hidden_norm")
        for one in block(stream):
            joins = f"{name}.block.{one.joins}" if one.joins else ""
            changes: dict[str, Any] = {"name": f"{name} {one.name}", "layer": f"{name}.block.{one.layer}", "again": ()}
            yield dataclasses.replace(one, joins=joins, **changes)
        yield operations.norm(stream, f"{name}.norm")
        yield from block_operations.for_head(stream, shape, f"{name}.norm")
        loss = operations.loss(stream, f"{name}.norm", shape.vocab_size, capped=shape.logit_cap > 0.0)
        yield dataclasses.replace(loss, name=f"{name} loss")
