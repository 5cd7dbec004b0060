"""In: a tensor's name, shape and role. Out: where it lives on the mesh and how many bytes of it a rank holds.
Does not decide a placement (strategies do) and holds no tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from codescent.base.dtypes import DTYPE_BYTES
from codescent.plan.mesh import Mesh


class Memory(StrEnum):
    """Whose memory a tensor is in."""

    DEVICE = "device"  # of the device that computes (a CPU's is the host's)
    HOST = "host"  # of the machine that a CUDA device is in


class Role(StrEnum):
    """What a parameter does in its model. Strategies decide by it, and never by a name."""

    COLUMN = "column"  # the output dim of a matrix may be split (attn.qkv, mlp.up, mlp.gate_up)
    ROW = "row"  # the input dim of a matrix may be split (attn.out, mlp.down)
    VOCAB = "vocab"  # the vocabulary dim of an embedding or head may be split
    POSITION = "position"  # an embedding of positions, or of another small set, whole on every rank
    NORM = "norm"  # scale or shift of a norm
    BIAS_COLUMN = "bias_column"  # bias of a COLUMN matrix or of the vocabulary: split with its output
    BIAS_ROW = "bias_row"  # bias of a ROW matrix, added once, after the sum; or of one that is whole
    WHOLE = "whole"  # a matrix that no rank has a part of (head.dense)
    LOGITS = "logits"  # a head of few outputs, whole on every rank: its loss reads the outputs of all positions
    ADAPTER = "adapter"  # the matrix of an adapter that stays whole; its gradient is partial on each rank
    ADAPTER_COLUMN = "adapter_column"  # the matrix B of an adapter of a COLUMN matrix: split with its outputs
    ADAPTER_ROW = "adapter_row"  # the matrix A of an adapter of a ROW matrix: split with its inputs


@dataclass(frozen=True)
class Parameter:
    """A parameter as its model declares it.

    Its initial values have the mean `mean` and the standard deviation `std`.
    `depths` are the places of the forward pass that read it: 0 the embedding, 1 to L the blocks, L + 1 the head.
    `stream` numbers the sequence of a sample (`Work.streams`) whose positions it reads; None: all.
    One that is not `trained` has no gradient, no optimizer state and no master copy.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    std: float = 0.0
    mean: float = 0.0
    depths: tuple[int, ...] = (0,)
    stream: int | None = None
    trained: bool = True

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices and embeddings, not to biases and norms."""
        return len(self.shape) >= 2

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """Where a tensor lives: `shards[axis] = dim` splits that dim over the axis; other axes replicate it."""

    shards: Mapping[str, int] = field(default_factory=dict)

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Axes of several ranks over which the tensor is divided."""
        return tuple(axis for axis in self.shards if mesh.degree(axis) > 1)

    def without(self, axis: str) -> Placement:
        """This placement, whole along `axis`."""
        return Placement({name: dim for name, dim in self.shards.items() if name != axis})

    def box(self, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
        """First and end of what `rank` holds, in each dim.

        Each axis cuts the box that the axes before it left, as torch.chunk does: the last parts may be smaller or
        empty.
        """
        bounds, place = [(0, size) for size in shape], mesh.coordinates(rank)
        for axis, dim in self.shards.items():
            start, stop = bounds[dim]
            size = -(-(stop - start) // mesh.degree(axis))
            first = start + place[axis] * size
            bounds[dim] = (min(first, stop), min(first + size, stop))
        return tuple(bounds)

    def sizes(self, shape: tuple[int, ...], mesh: Mesh, rank: int = 0) -> tuple[int, ...]:
        """Shape of what `rank` holds; none holds more than rank 0."""
        return tuple(stop - start for start, stop in self.box(shape, mesh, rank))

    def numel(self, shape: tuple[int, ...], mesh: Mesh) -> int:
        """Elements that the fullest rank holds."""
        return math.prod(self.sizes(shape, mesh))


@dataclass(frozen=True)
class TensorPlan:
    """One parameter with its gradient and optimizer state: dtypes, placements, and the number of state tensors.

    `optimizer_tensors` counts the per-element state tensors of the optimizer (Adam: 2), in `optimizer_dtype`.
    `master_dtype` is that of the master copy; "": the weights themselves are updated.
    `bucket_dtype` is that of a second copy of the gradient, which is sent; "": the gradient itself is sent.
    `partial` names axes whose ranks hold the same tensor and a partial sum of its gradient each: REDUCE adds them.
    `weights_in`, `gradients_in`, `optimizer_in`: the memory that they are in when nothing uses them. The master copy is
    where the optimizer's state is, and there the update is made.
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

    @property
    def updated_on_host(self) -> bool:
        """Whether the master copy lives in host memory while the device holds a working copy of the same shape.

        False where weights are gathered from the master copies: the gather reads them on the host.
        """
        return self.optimizer_in is not self.weights_in and self.optimizer == self.weights

    @property
    def gathered_from(self) -> Memory:
        """The memory that holds the shards from which weights are gathered; without a gather that of the weights."""
        return self.weights_in if self.updated_on_host else self.optimizer_in

    def weights_bytes(self, mesh: Mesh) -> int:
        """Bytes of the weights, on the fullest rank (as all of these)."""
        return self.weights.numel(self.parameter.shape, mesh) * DTYPE_BYTES[self.weight_dtype]

    def gradients_bytes(self, mesh: Mesh) -> int:
        """Bytes of the gradients, with the copy in which they travel if there is one."""
        if not self.parameter.trained:
            return 0
        per_element = DTYPE_BYTES[self.gradient_dtype] + (DTYPE_BYTES[self.bucket_dtype] if self.bucket_dtype else 0)
        return self.gradients.numel(self.parameter.shape, mesh) * per_element

    def optimizer_bytes(self, mesh: Mesh) -> int:
        """Bytes of the optimizer's state and of the master copy."""
        if not self.parameter.trained:
            return 0
        master_bytes = DTYPE_BYTES[self.master_dtype] if self.master_dtype else 0
        per_element = self.optimizer_tensors * DTYPE_BYTES[self.optimizer_dtype] + master_bytes
        return self.optimizer.numel(self.parameter.shape, mesh) * per_element

    def state_bytes(self, mesh: Mesh) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights_bytes(mesh) + self.gradients_bytes(mesh) + self.optimizer_bytes(mesh)

    def host_bytes(self, mesh: Mesh) -> int:
        """The part of `state_bytes` that is in host memory."""
        found = (
            (self.weights_in, self.weights_bytes(mesh)),
            (self.gradients_in, self.gradients_bytes(mesh)),
            (self.optimizer_in, self.optimizer_bytes(mesh)),
        )
        return sum(size for memory, size in found if memory is Memory.HOST)
