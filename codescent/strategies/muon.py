"""In: a plan's tensors. Out: which of them Muon updates, and rounds: in each, a rank orthogonalises one whole tensor.
Does not orthogonalise or update (train/muon.py does) and does not send (whole_matrices.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from codescent.plan import (
    AXES,
    DTYPE_BYTES,
    Collective,
    Memory,
    Mesh,
    Parameter,
    Plan,
    Role,
    Scalar,
    TensorPlan,
    Traffic,
    Verb,
)
from codescent.strategies.strategy import Candidate, Strategy

HIDDEN = (Role.COLUMN, Role.ROW, Role.STREAM, Role.ADAPTER, Role.ADAPTER_COLUMN, Role.ADAPTER_ROW)
"""Roles of the matrices of blocks. Embeddings and heads have other roles."""


@dataclass(frozen=True)
class Round:
    """Tensors that are orthogonalised at the same time. Tensor j is orthogonalised by rank j of `ranks`.

    Attributes:
        tensors: at most one for each rank. All are sharded over the same axes.
        sharded: the axis of the ranks that hold one copy of a tensor together; "": each rank holds whole tensors.
        ranks: the axis of all ranks of the pipeline stage.
    """

    tensors: tuple[TensorPlan, ...]
    sharded: str
    ranks: str


class Muon(Strategy):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) updates the matrices of blocks, AdamW the rest.

    An orthogonalised matrix depends on all elements of the gradient. So the rank that computes it collects the shards
    of the tensor, and sends each rank its shard of the result. The matrices are distributed over all ranks of a
    pipeline stage; none is computed twice (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3, with
    replicas too).
    """

    def active(self, run: Candidate | Plan) -> bool:
        """True if optimizer.kind is "muon"."""
        return run.update.get("kind") == "muon"

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Matrices of blocks have one state tensor, the momentum. The others have the two of AdamW."""
        if not (tensor.parameter.trained and is_hidden_matrix(tensor.parameter)):
            return tensor
        return replace(tensor, orthogonalized=True, optimizer_tensors=1)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Two all-to-alls for each round: shards to the rank that orthogonalises; shards of the result to all ranks.

        With the momentum in host memory both are also copied between host and device.
        """
        dtype = wire_dtype(plan)
        for number, one in enumerate(rounds(plan, stage)):
            for axis, numel, what in (
                (one.sharded, _most_collected(plan, stage, one), "updates, to be orthogonalised"),
                (one.ranks, _most_returned(plan, one), "orthogonalised updates"),
            ):
                if plan.mesh.degree(axis) > 1:
                    payload_bytes, what = numel * DTYPE_BYTES[dtype], f"{what}, round {number}"
                    yield Traffic(Collective.ALL_TO_ALL, axis, payload_bytes, dtype, Verb.STEP, None, what)
        on_host = [tensor for tensor in _matrices(plan, stage) if tensor.optimizer_in is Memory.HOST]
        if on_host:
            numel = sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in on_host)
            for what in ("updates, to the device", "orthogonalised updates, to the host"):
                yield Traffic(Collective.COPY, "", numel * DTYPE_BYTES[dtype], dtype, Verb.STEP, None, what)


def decided(values: Mapping[str, Scalar], precision: str) -> dict[str, Scalar]:
    """The keys of [optimizer] with what "auto" stands for; those of Muon only if it is used."""
    if values["kind"] != "muon":
        return {name: value for name, value in values.items() if not name.startswith("muon_")}
    rate, products = values["muon_learning_rate"], values["muon_precision"]
    return {
        **values,
        "muon_learning_rate": values["learning_rate"] if rate is None else rate,
        "muon_precision": precision if products == "auto" else products,
    }


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether the parameter is a matrix of a block, or several matrices."""
    return parameter.role in HIDDEN and len(parameter.shape) > 1


def wire_dtype(plan: Plan) -> str:
    """Dtype in which matrices are orthogonalised, and sent."""
    return str(plan.update["muon_precision"])


def rounds(plan: Plan, stage: int) -> list[Round]:
    """The rounds of a pipeline stage. The tensors of a round cost about the same: no rank waits long for another."""
    mesh, without = plan.mesh, ("pp", *plan.apart)
    everyone = mesh.joint(*(axis for axis in AXES if axis not in without))
    size = mesh.degree(everyone)
    tensors = sorted(_matrices(plan, stage), key=lambda t: (-flops(t.parameter), -t.parameter.numel))
    tensors.sort(key=lambda tensor: _sharded(tensor, mesh))  # a stable sort
    found = []
    for sharded, group in groupby(tensors, lambda tensor: _sharded(tensor, mesh)):
        alike = tuple(group)
        found += [Round(alike[at : at + size], sharded, everyone) for at in range(0, len(alike), size)]
    return found


def flops(parameter: Parameter) -> int:
    """FLOPs of one Newton-Schulz step: of m x n, m <= n, the products m n m, m m m and m m n, 2 FLOPs per element."""
    sides = (sorted(matrix) for matrix in parameter.matrices)
    return sum(2 * (2 * m * m * n + m**3) for m, n in sides)


def _matrices(plan: Plan, stage: int) -> list[TensorPlan]:
    return [tensor for tensor in plan.held_by(stage) if tensor.orthogonalized]


def _sharded(tensor: TensorPlan, mesh: Mesh) -> str:
    """The axis of the ranks that hold one copy of the tensor together; "" if each holds all of it."""
    axes = tensor.optimizer.axes(mesh)
    return "*".join(axis for axis in AXES if axis in axes)


def _most_collected(plan: Plan, stage: int, one: Round) -> int:
    """Elements that the fullest rank sends for a round: its shards of all tensors that its shard group collects."""
    mesh = plan.mesh
    ranks = mesh.group(one.ranks, mesh.rank_at({**dict.fromkeys(AXES, 0), "pp": stage}))
    numels: dict[tuple[int, ...], int] = {}
    for tensor, owner in zip(one.tensors, ranks):
        group = mesh.group(one.sharded, owner)
        numels[group] = numels.get(group, 0) + tensor.optimizer.numel(tensor.parameter.shape, mesh)
    return max(numels.values())


def _most_returned(plan: Plan, one: Round) -> int:
    """Elements that the busiest rank sends back: a whole tensor for each copy that the stage holds."""
    copies = plan.mesh.degree(one.ranks) // plan.mesh.degree(one.sharded)
    return copies * max(tensor.parameter.numel for tensor in one.tensors)
