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
    """What a parameter does in its model: all that a strategy may know of it."""

    COLUMN = "column"  # the output dim of a matrix may be split (attn.qkv, mlp.up, mlp.gate_up)
    ROW = "row"  # the input dim of a matrix may be split (attn.out, mlp.down)
    VOCAB = "vocab"  # the vocabulary dim of an embedding or head may be split
    POSITION = "position"  # an embedding of positions, or of another small set, whole on every rank
    NORM = "norm"  # scale or shift of a norm
    BIAS_COLUMN = "bias_column"  # bias of a COLUMN matrix or of the vocabulary: split with its output
    BIAS_ROW = "bias_row"  # bias of a ROW matrix, added once, after the sum; or of one that is whole
    WHOLE = "whole"  # a matrix that no rank has a part of (head.dense)
    LOGITS = "logits"  # a head of few outputs, whole on every rank: those of all positions are wanted together
    ADAPTER = "adapter"  # of an adapter's two matrices the one that is whole: each rank makes a part of its gradient
    ADAPTER_COLUMN = "adapter_column"  # the one behind, beside a COLUMN matrix: split with its outputs
    ADAPTER_ROW = "adapter_row"  # the one in front, beside a ROW matrix: split with its inputs


@dataclass(frozen=True)
class Parameter:
    """A parameter as its model declares it.

    `std` is the standard deviation of its initial values; `mean` their mean (a constant where std is 0).
    `depths` are the places of the forward pass that read it: 0 the embedding, 1 to L the blocks, L + 1 the head.
    `stream`: of which of a sample's sequences (`Work.streams`) it reads the positions; None: of all.
    `trained`: whether it is updated; of one that is not there is no gradient, no optimizer state and no master copy.
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
    """Where a tensor lives: `shards[axis] = dim` splits that dim over the axis; the others replicate it."""

    shards: Mapping[str, int] = field(default_factory=dict)

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Axes over which the tensor is really divided."""
        return tuple(axis for axis in self.shards if mesh.degree(axis) > 1)

    def without(self, axis: str) -> Placement:
        """The same, whole along `axis`."""
        return Placement({name: dim for name, dim in self.shards.items() if name != axis})

    def box(self, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
        """First and end of what `rank` holds, in each dim.

        One axis after the other cuts what the one before has left, into parts as torch.chunk cuts them: rounded up,
        the last ones smaller or empty.
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

    `optimizer` counts the per-element state tensors of the optimizer (Adam: 2), in `optimizer_dtype`;
    `master_dtype` is that of the master copy, or "" where the weights themselves are updated; `bucket_dtype` that of a
    second copy of the gradient, in which it travels, or "" where it travels as it is kept.
    `partial` are axes over whose ranks the tensor is alike, and each knows a part of its gradient: REDUCE adds them.
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
    def apart(self) -> bool:
        """Whether a rank updates in the host's memory what it reads in the device's, part for part: the optimizer
        fetches the gradients and sends the weights back. (What weights are gathered from is read where it is.)"""
        return self.optimizer_in is not self.weights_in and self.optimizer == self.weights

    @property
    def gathered_from(self) -> Memory:
        """Where the parts are that the weights are made of before they are read; the weights' own, where none are."""
        return self.weights_in if self.apart else self.optimizer_in

    def weights_bytes(self, mesh: Mesh) -> int:
        """Bytes of the weights that forward and backward read, on the fullest rank."""
        return self.weights.numel(self.parameter.shape, mesh) * DTYPE_BYTES[self.weight_dtype]

    def gradients_bytes(self, mesh: Mesh) -> int:
        """Bytes of the gradients, on the fullest rank, with the copy in which they travel if there is one."""
        if not self.parameter.trained:
            return 0
        per_element = DTYPE_BYTES[self.gradient_dtype] + (DTYPE_BYTES[self.bucket_dtype] if self.bucket_dtype else 0)
        return self.gradients.numel(self.parameter.shape, mesh) * per_element

    def optimizer_bytes(self, mesh: Mesh) -> int:
        """Bytes of the optimizer's state and of the master copy, on the fullest rank."""
        if not self.parameter.trained:
            return 0
        per_element = self.optimizer_tensors * DTYPE_BYTES[self.optimizer_dtype]
        if self.master_dtype:
            per_element += DTYPE_BYTES[self.master_dtype]
        return self.optimizer.numel(self.parameter.shape, mesh) * per_element

    def state_bytes(self, mesh: Mesh) -> int:
        """All that a rank holds of it from step to step, on the fullest rank."""
        return self.weights_bytes(mesh) + self.gradients_bytes(mesh) + self.optimizer_bytes(mesh)

    def host_bytes(self, mesh: Mesh) -> int:
        """What of `state_bytes` is not in the device's memory but in the host's."""
        found = (
            (self.weights_in, self.weights_bytes(mesh)),
            (self.gradients_in, self.gradients_bytes(mesh)),
            (self.optimizer_in, self.optimizer_bytes(mesh)),
        )
        return sum(size for memory, size in found if memory is Memory.HOST)
