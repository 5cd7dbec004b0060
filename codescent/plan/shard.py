"""In: nothing. Out: dataclasses for a parameter, its sharding on the mesh, its dtypes and its bytes per rank.
Does not choose a sharding (strategies do) and holds no tensor values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from codescent.base.dtypes import DTYPE_BYTES
from codescent.base.nf4_size import nf4_bytes
from codescent.plan.brief import brief
from codescent.plan.mesh import Mesh


class Memory(StrEnum):
    """The memory that holds a tensor."""

    DEVICE = "device"  # memory of the computing device; on CPU that is host memory
    HOST = "host"  # main memory of the machine of a CUDA device


class Role(StrEnum):
    """What a parameter does in its model. Strategies read the role and never the parameter's name."""

    COLUMN = "column"  # the output dim of a matrix may be split (attn.qkv, mlp.up, mlp.gate_up)
    ROW = "row"  # the input dim of a matrix may be split (attn.out, mlp.down)
    VOCAB = "vocab"  # the vocabulary dim of an embedding or head may be split
    POSITION = "position"  # an embedding of positions or of another small set; replicated
    NORM = "norm"  # scale or bias of a norm
    HEAD_NORM = "head_norm"  # scale of a norm of each head, the same for all: replicated, with a partial gradient
    COLUMN_NORM = "column_norm"  # scale of a norm over the outputs of a COLUMN matrix; split like them
    BIAS_COLUMN = "bias_column"  # bias of a COLUMN or VOCAB matrix; split like its output
    BIAS_ROW = "bias_row"  # bias of a ROW matrix (added once, after the sum) or of a replicated matrix
    WHOLE = "whole"  # a matrix that is replicated on all ranks (head.dense)
    STREAM = "stream"  # a matrix that reads the residual stream (attn.down): replicated; a rank of tp has its rows
    LOGITS = "logits"  # a head with few outputs, replicated: its loss reads all positions
    ADAPTER = "adapter"  # the replicated matrix of an adapter; each rank has a partial gradient
    ADAPTER_COLUMN = "adapter_column"  # matrix B of the adapter of a COLUMN matrix; split along the outputs
    MAGNITUDE = "magnitude"  # lengths of the rows of a ROW matrix (DoRA): replicated, with a partial gradient
    MAGNITUDE_COLUMN = "magnitude_column"  # those of a COLUMN matrix; split along the outputs
    ADAPTER_ROW = "adapter_row"  # matrix A of the adapter of a ROW matrix; split along the inputs
    EXPERT_COLUMN = "expert_column"  # the first matrices of all experts, [outputs, experts, ...]: split along both dims
    EXPERT_ROW = "expert_row"  # the second matrices of all experts, [inputs, experts, outputs]: split along both dims
    ROUTER_BIAS = (
        "router_bias"  # added to these scores for the choice alone: replicated, updated by the loads of experts
    )
    ROUTER = "router"  # scores of experts: replicated; each rank of tp has a partial gradient


@dataclass(frozen=True)
class Parameter:
    """A parameter, as its model declares it.

    Attributes:
        std, mean: standard deviation and mean of its initial values.
        depths: where the forward pass reads it: 0 the embedding, 1 to L the blocks, L + 1 the head.
        stream: which sequence of a sample this parameter reads, as an index into `Work.streams`; None: all sequences.
        trained: False: it has no gradient, no optimizer state and no master copy.
        alternating: the parameter holds several matrices: so many rows of the first, so many of the second, and so on;
            then again from the first, to the last row. All dims but the last count rows. Empty: it is one matrix.
        quantized: the number format in which a frozen matrix is held, "nf4"; "": that of the run.
        fixed: it is a vector whose length does not follow the width of the model: a bias of logits.
        read_by: the share of the positions that reads an element: of experts those that are routed to one of them; of
            a head that modules for more tokens read, too, more than 1.
        beside: channels that come with what a COLUMN matrix reads: ranks of tp send each other both at once.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    std: float = 0.0
    mean: float = 0.0
    depths: tuple[int, ...] = (0,)
    stream: int | None = None
    trained: bool = True
    alternating: tuple[int, ...] = ()
    fixed: bool = brief(False)
    read_by: float = brief(1.0)
    beside: int = brief(0)
    quantized: str = brief("")

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each matrix that the parameter holds."""
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        period = sum(self.alternating)
        return tuple((rows // period * part, columns) for part in self.alternating) or ((rows, columns),)

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices and embeddings, not to biases, norms and magnitudes."""
        return len(self.shape) >= 2 and self.role is not Role.MAGNITUDE_COLUMN

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """How a tensor is sharded: `shards[axis] = dim` splits that dim over the axis. Other axes replicate the tensor."""

    shards: Mapping[str, int] = field(default_factory=dict)

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Axes with more than one rank over which the tensor is sharded."""
        return tuple(axis for axis in self.shards if mesh.degree(axis) > 1)

    def without(self, axis: str) -> Placement:
        """This placement, but replicated along `axis`."""
        return Placement({name: dim for name, dim in self.shards.items() if name != axis})

    def box(self, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
        """The index range [first, end) that `rank` holds, for each dim.

        Each axis splits the range that the earlier axes left, like torch.chunk: the last parts may be smaller or empty.
        """
        bounds, place = [(0, size) for size in shape], mesh.coordinates(rank)
        for axis, dim in self.shards.items():
            start, stop = bounds[dim]
            size = -(-(stop - start) // mesh.degree(axis))
            first = start + place[axis] * size
            bounds[dim] = (min(first, stop), min(first + size, stop))
        return tuple(bounds)

    def sizes(self, shape: tuple[int, ...], mesh: Mesh, rank: int = 0) -> tuple[int, ...]:
        """Shape of the shard of `rank`. Rank 0 has the largest shard."""
        return _sizes(tuple(self.shards.items()), shape, mesh, rank)

    def numel(self, shape: tuple[int, ...], mesh: Mesh, rank: int = 0) -> int:
        """Number of elements of the shard of `rank`. Rank 0 has the largest shard."""
        return math.prod(self.sizes(shape, mesh, rank))


@lru_cache(maxsize=4096)  # blocks are alike, and so are plans of a search
def _sizes(shards: tuple[tuple[str, int], ...], shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in Placement(dict(shards)).box(shape, mesh, rank))


@dataclass(frozen=True)
class TensorPlan:
    """One parameter with its gradient and optimizer state: dtypes, placements and memories.

    Attributes:
        master_dtype: dtype of the master copy; "": no master copy, the weights themselves are updated.
        optimizer_tensors: number of state tensors of the optimizer, each as large as the parameter (Adam: 2).
        orthogonalized: Muon updates the tensor.
        bucket_dtype: dtype of a copy of the gradient for the collective; "": the gradient itself is sent.
        partial: axes whose ranks replicate the tensor and hold partial sums of its gradient. REDUCE adds them.
        apart: axes whose ranks train apart: their weights and optimizer state differ within a round.
        sign_rate: its update is so many times the sign of its gradient, in place of the optimizer's; None: it is not.
            The norm of all gradients does not count it then.
        rate_factor: the learning rate of the tensor is multiplied by it, and its weight decay divided (`models.mup`).
        averaged: a moving average of the weights is kept beside the optimizer's state, in its dtype.
        weights_in, gradients_in, optimizer_in: the memory where each is stored while unused. The master copy is
            stored, and the update computed, in `optimizer_in`.
    """

    parameter: Parameter
    weight_dtype: str
    gradient_dtype: str
    optimizer_dtype: str
    master_dtype: str
    optimizer_tensors: int
    bucket_dtype: str = ""
    weights: Placement = Placement()
    gradients: Placement = Placement()
    optimizer: Placement = Placement()
    partial: tuple[str, ...] = ()
    weights_in: Memory = Memory.DEVICE
    gradients_in: Memory = Memory.DEVICE
    optimizer_in: Memory = Memory.DEVICE
    orthogonalized: bool = False
    apart: tuple[str, ...] = brief(())
    averaged: bool = brief(False)
    rate_factor: float = brief(1.0)
    sign_rate: float | None = brief(None)

    @property
    def updated_on_host(self) -> bool:
        """True when the device holds a working copy of a master copy in host memory, both sharded alike.

        False when weights are all-gathered from the master copies. Then the all-gather reads the host's shards.
        """
        return self.optimizer_in is not self.weights_in and self.optimizer == self.weights

    @property
    def gathered_from(self) -> Memory:
        """Memory of the shards that the all-gather of the weights reads. Without an all-gather: that of the weights."""
        return self.weights_in if self.updated_on_host else self.optimizer_in

    def weights_bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes of the weights on a rank. Rank 0 has the largest shard. Of a quantized matrix with its scales."""
        if self.parameter.quantized:
            shape = self.parameter.shape
            return nf4_bytes(self.weights.sizes(shape, mesh, rank), shape, self.parameter.alternating)
        return self.weights.numel(self.parameter.shape, mesh, rank) * DTYPE_BYTES[self.weight_dtype]

    def gradients_bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes of the gradients on a rank, including the copy in `bucket_dtype`."""
        if not self.parameter.trained:
            return 0
        per_element = DTYPE_BYTES[self.gradient_dtype] + (DTYPE_BYTES[self.bucket_dtype] if self.bucket_dtype else 0)
        return self.gradients.numel(self.parameter.shape, mesh, rank) * per_element

    def optimizer_bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes of the optimizer state, the master copy and the moving average on a rank."""
        if not self.parameter.trained:
            return 0
        master_bytes = DTYPE_BYTES[self.master_dtype] if self.master_dtype else 0
        per_element = (self.optimizer_tensors + self.averaged) * DTYPE_BYTES[self.optimizer_dtype] + master_bytes
        return self.optimizer.numel(self.parameter.shape, mesh, rank) * per_element

    def state_bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes of weights, gradients and optimizer state on a rank."""
        return self.weights_bytes(mesh, rank) + self.gradients_bytes(mesh, rank) + self.optimizer_bytes(mesh, rank)

    def host_bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """The part of `state_bytes` that is in host memory."""
        found = (
            (self.weights_in, self.weights_bytes(mesh, rank)),
            (self.gradients_in, self.gradients_bytes(mesh, rank)),
            (self.optimizer_in, self.optimizer_bytes(mesh, rank)),
        )
        return sum(size for memory, size in found if memory is Memory.HOST)


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that a strategy keeps between steps, such as an anchor or a residual.

    Attributes:
        name: in a checkpoint.
        shape: of the whole tensor.
        placement: how the ranks of a replica divide it.
        stage: the pipeline stage whose ranks hold it; None: every stage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement = Placement()
    stage: int | None = None

    def bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes on a rank of the stage. Rank 0 has the largest shard."""
        return self.placement.numel(self.shape, mesh, rank) * DTYPE_BYTES[self.dtype]
