"""In: a plan, a pipeline stage, a kind of device. Out: what a rank computes of a micro-batch, operator by operator.
Does not know seconds (a price needs a device) and does not count what collectives copy."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from codescent.plan import DTYPE_BYTES, Parameter, Plan, Role, TensorPlan
from codescent.plan.activations import CPU
from codescent.plan.flops import recomputed_rows
from codescent.plan.operators import LayerOperator

PRODUCT, ATTENTION, ELEMENTWISE = "product", "attention", "element-wise"
EXPERTS = (Role.EXPERT_COLUMN, Role.EXPERT_ROW)
"""Roles of the matrices of experts, whose second dim counts experts."""
_BLOCK = re.compile(r"blocks\.\d+\.")


FP8 = "fp8"


@dataclass(frozen=True)
class Computed:
    """An operator of a depth, on one rank, for one micro-batch.

    Attributes:
        name: such as "attn.qkv".
        kind: PRODUCT, ATTENTION or ELEMENTWISE.
        sizes: of a product rows, inputs and outputs; of another operator the tensor's (see `LayerOperator.shape`).
        forward_flops, backward_flops: those of backward have what is computed again, too.
        forward_bytes, backward_bytes: of the tensors that are read and written.
        formats: number formats of a product, of the gradient of its input and of that of its matrix; empty: those of
            the run.
    """

    depth: int
    name: str
    kind: str
    sizes: tuple[int, ...]
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    formats: tuple[str, ...] = ()


def operators_of_depth(
    plan: Plan, depth: int, device: str, rank: int = 0, kept: Mapping[str, float] | None = None
) -> list[Computed]:
    """The operators of a depth, of one micro-batch, on a rank; in the order of the forward pass.

    With `data_parallel` those of the rank's first device. Rank 0 has the largest parts. `kept`: by layer of a block
    the share of its product that is not computed again; None: as the plan says.
    """
    held = [tensor for tensor in plan.tensors if depth in tensor.parameter.depths]
    declared = [one for one in plan.operators if one.on in ("", device) and one.depths[0] <= depth < one.depths[1]]
    joined = {one.joins for one in declared if device == CPU}
    again = _recomputed(plan, depth, [tensor.parameter for tensor in held], joined)
    no_gradient = _reads_data(plan, depth, held)
    trains = depth > 0 or any(tensor.parameter.trained for tensor in held)
    found: list[Computed] = []
    for layer, tensors in _by_layer(held, depth).items():
        for tensor in tensors:
            name = tensor.parameter.name
            once_more = 1.0 - kept[layer] if kept and layer in kept else float(name in again)
            found += _product(plan, tensor, depth, rank, again=once_more, of_input=name != no_gradient)
        found += [_declared(plan, one, depth, rank, trains=trains) for one in declared if one.layer == layer]
    return found


def _reads_data(plan: Plan, depth: int, held: Sequence[TensorPlan]) -> str:
    """The matrix that reads vectors of a sample, which have no gradient; "": none does."""
    begins = depth in (1, plan.model.encoder_layers + 1)
    embeds = any(0 in tensor.parameter.depths for tensor in plan.tensors)
    return held[0].parameter.name if begins and not embeds and held[0].parameter.role is Role.COLUMN else ""


def _by_layer(held: Sequence[TensorPlan], depth: int) -> dict[str, list[TensorPlan]]:
    """The tensors of a depth by layer, in forward order. A head that is tied to an embedding is listed with it."""
    found: dict[str, list[TensorPlan]] = {}
    for tensor in sorted(held, key=lambda tensor: tensor.parameter.depths[0] < depth):
        found.setdefault(_layer(tensor.parameter), []).append(tensor)
    return found


def _layer(parameter: Parameter) -> str:
    """The name of a parameter's layer inside its block: "blocks.0.attn.qkv.weight" gives "attn.qkv"."""
    return _BLOCK.sub("", parameter.name, count=1).rpartition(".")[0]


def _recomputed(plan: Plan, depth: int, held: Sequence[Parameter], joined: Collection[str]) -> set[str]:
    """Names of the matrices whose products backward computes again.

    Of ROW matrices those whose results backward needs, and those of the layers `joined`: see `LayerOperator.joins`.
    """
    if not (plan.layout.computes_blocks_again and 1 <= depth <= plan.model.num_layers):
        return set()
    rows = {parameter.name for parameter in recomputed_rows(held, plan.model.dropout)}
    rows |= {parameter.name for parameter in held if _layer(parameter) in joined}
    if plan.layout.recompute == "full":
        rows |= {parameter.name for parameter in held if parameter.role is not Role.ROW}
    return rows


def _product(
    plan: Plan, tensor: TensorPlan, depth: int, rank: int, *, again: float, of_input: bool
) -> Iterator[Computed]:
    """The product of a matrix; nothing if the tensor is none, or is looked up. `again`: the share of it that backward
    computes once more."""
    parameter, ends = tensor.parameter, depth > plan.model.num_layers
    if len(parameter.shape) < 2 or parameter.role is Role.POSITION or (parameter.role is Role.VOCAB and not ends):
        return
    (*outputs, inputs), matrices = _local(plan, tensor, rank), 1
    rows = _rows(plan, parameter, depth)
    if parameter.role is Role.VOCAB:  # modules that predict more tokens read the head's, too
        rows = round(rows * parameter.read_by)
    if parameter.role in EXPERTS:  # each expert of a rank reads its rows of all ranks that share the experts
        matrices = outputs[1]
        rows = round(rows * parameter.read_by * parameter.shape[1] / matrices)
    flops = 2.0 * rows * inputs * math.prod(outputs)
    elements = rows * matrices * inputs + inputs * math.prod(outputs) + rows * math.prod(outputs)
    gradients = float(of_input + parameter.trained)  # of the input, and of the matrix
    # The head computes its gradients in forward, while it has the logits; of answers that are compared in backward,
    # where it computes the logits again.
    if parameter.role is Role.VOCAB:
        forward, backward = (1.0, 1.0 + gradients) if plan.objective.by_token else (1.0 + gradients, 0.0)
    else:
        forward, backward = 1.0, gradients + again
    moved = elements * DTYPE_BYTES[plan.work.precision]
    name, sizes = _BLOCK.sub("", parameter.name).removesuffix(".weight"), (rows, inputs, math.prod(outputs))
    amounts = (forward * flops, backward * flops, forward * moved, backward * moved)
    yield Computed(depth, name, PRODUCT, sizes, *amounts, _formats(plan, parameter, ends=ends))


def _formats(plan: Plan, parameter: Parameter, *, ends: bool) -> tuple[str, ...]:
    """Number formats of a product and of its two gradients; empty: all are in the precision (`operators.fp8.Fp8`)."""
    fp8 = plan.work.fp8 and not plan.work.fp8_emulated and parameter.role in (Role.COLUMN, Role.ROW, Role.STREAM)
    if ends or not fp8:
        return ()
    return FP8, FP8, FP8 if plan.work.fp8 == "tensorwise" else plan.work.precision


def _local(plan: Plan, tensor: TensorPlan, rank: int) -> Sequence[int]:
    """The sizes of a matrix on a rank while it computes: ZeRO has gathered it."""
    return tensor.optimizer.without("dp_shard").sizes(tensor.parameter.shape, plan.mesh, rank)


def _rows(plan: Plan, parameter: Parameter, depth: int) -> int:
    """The rows that a matrix reads on a rank, of a micro-batch. A share of whole numbers is a little more or less than
    they are, so it is rounded first."""
    work, mesh, ends = plan.work, plan.mesh, depth > plan.model.num_layers
    share, stream = (plan.task.head_share, -1) if ends else (1.0, parameter.stream)
    samples = -(-work.microbatch_size // plan.devices)  # of the first device, which has the most
    rows = round(samples * work.positions(stream) * share) // mesh.cp
    alone = parameter.role in (Role.LOGITS, Role.STREAM) and plan.layout.sequence_parallel
    return rows // mesh.tp if alone else rows


def _declared(plan: Plan, one: LayerOperator, depth: int, rank: int, *, trains: bool) -> Computed:
    """`trains`: whether backward reaches this depth."""
    elements, moved = one.elements(plan.mesh, rank), one.moved_bytes(plan.mesh, rank)
    kind, extra = ATTENTION if one.shared else ELEMENTWISE, float(plan.layout.recompute in one.again)
    sizes = tuple(one.placement.sizes(one.shape, plan.mesh, rank))
    (forward, backward), (moves, moves_back) = one.flops, one.moves
    flops, times = (backward + extra * forward) * trains, (moves_back + extra * moves) * trains
    return Computed(depth, one.name, kind, sizes, forward * elements, flops * elements, moves * moved, times * moved)
