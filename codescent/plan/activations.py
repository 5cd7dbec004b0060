"""In: nothing. Out: the dataclass SavedTensor: a tensor that forward keeps for backward; the bytes of those of a chunk.
Does not know which tensors a model or an operator keeps (models and operators do)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from codescent.base.dtypes import DTYPE_BYTES
from codescent.plan.brief import brief
from codescent.plan.divided import Dim, Divided
from codescent.plan.mesh import AXES, Mesh
from codescent.plan.shard import Placement

CPU, CUDA = "cpu", "cuda"
"""Kinds of devices, where operators keep other tensors."""
EAGER, COMPILED = "eager", "compiled"
"""CUDA with blocks that torch.compile has not compiled, and with those that it has."""
KEPT_ON: Mapping[str, tuple[str, ...]] = MappingProxyType({
    CPU: ("", CPU), CUDA: ("", CUDA, EAGER), COMPILED: ("", CUDA, COMPILED),
})  # fmt: skip
"""Where blocks are computed, and the values of `SavedTensor.on` that hold there."""
_PLACES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "": (CPU, CUDA, COMPILED), CPU: (CPU,), CUDA: (CUDA, COMPILED), EAGER: (CUDA,), COMPILED: (COMPILED,),
})  # fmt: skip
"""The same the other way round."""

RECOMPUTES = ("none", "selective", "products", "full")
"""Values of parallel.recompute."""

SMALL_BYTES = 4 << 20
"""On a CPU, tensors in fp32 and fp64 that backward can make again are kept up to this size."""

ALIGNED_ROWS = 64
"""A product may have so many rows, or a multiple, where fewer are read (`SavedTensor.rounded`)."""


@dataclass(frozen=True)
class SavedTensor(Divided):
    """A tensor that forward keeps for backward, of one micro-batch, at each of some depths.

    Attributes:
        name: what it is, such as "attn.qkv input".
        shape: of the undivided tensor.
        dims: what each dim of `shape` counts.
        depths: the depths [first, end) that keep it (see `Parameter.depths`).
        placement: how the ranks divide it.
        on: the kind of device that keeps it; "": every kind. EAGER or COMPILED: CUDA, if the blocks are so.
        once: the depths of a chunk keep one such tensor together.
        begins: the tensor is the residual stream as a depth receives it. The first depth that reads this stream; 0: it
            is another tensor. At the begin of a chunk it is the memory of what the stage received.
        unless: a chunk with this depth does not keep it; 0: every chunk does.
        border: "first": kept once by a chunk that begins behind the embedding: what it receives. "last": kept once by
            a chunk that ends before the head: what it sends.
        rounded: the rows of a rank are rounded up to ALIGNED_ROWS, from this number on; 0: they are not.
        small: it is kept only where the tensor of this name has at most SMALL_BYTES; "": always.
        layer: the layer whose weight's gradient needs it; "": other gradients need it, too.
        under: the values of parallel.recompute with which it is kept. With the others backward makes it again. None:
            it is a gradient, which backward makes.
        product: the layer whose product waits for it, if gradients of weights are deferred; "": none does.
        core: attention keeps it inside. A strategy with another attention declares its own.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    dtype: str
    depths: tuple[int, int]
    placement: Placement = field(default_factory=Placement)
    on: str = brief("")
    once: bool = brief(False)
    begins: int = brief(0)
    unless: int = brief(0)
    border: str = brief("")
    rounded: int = brief(0)
    small: str = brief("")
    layer: str = brief("")
    under: tuple[str, ...] = brief(RECOMPUTES)
    product: str = brief("")
    core: bool = brief(False)

    def bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes at one depth on a rank. Rank 0 has the largest shard."""
        rows, *others = self.placement.sizes(self.shape, mesh, rank)
        if self.rounded and rows >= self.rounded:
            rows = -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS
        return rows * math.prod(others) * DTYPE_BYTES[self.dtype]

    def refuse_impossible(self) -> None:
        """Raise ValueError: it is no tensor, or has another dim than it is cut along."""
        dims = len(self.shape)
        cuts = [axis for axis, dim in self.placement.shards.items() if axis not in AXES or not 0 <= dim < dims]
        if not dims or len(self.dims) != dims or len(self.depths) != len(("first", "end")) or cuts:
            raise ValueError(f"{self.name}: is not a tensor that forward keeps")
        if self.on not in _PLACES:
            raise ValueError(f"{self.name}: there is no kind of device {self.on[:40]!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: there is no dtype {self.dtype!r}")

    def times(self, part: range, last: int) -> int:
        """How many such tensors a chunk of the depths `part` keeps. `last`: the last depth of the model."""
        if self.border:
            inner = part.start > 0 if self.border == "first" else last not in part
            at = part.start if self.border == "first" else part.stop - 1
            return int(inner and len(part) > 0 and self.depths[0] <= at < self.depths[1])
        if self.unless and self.unless in part:
            return 0
        first, stop = max(self.depths[0], part.start), min(self.depths[1], part.stop)
        received = self.is_received(part)
        if self.once:
            return int(stop > first and not received)
        return max(0, stop - first - int(received))

    def is_received(self, part: range) -> bool:
        """Whether the first one of a chunk of the depths `part` is the memory of what the stage received."""
        first, stop = max(self.depths[0], part.start), min(self.depths[1], part.stop)
        begins = self.begins > 0 and part.start > 0 and first == max(part.start, self.begins)
        return begins and first < stop and self.unless not in part


def settled(tensors: Iterable[SavedTensor], mesh: Mesh) -> Iterator[SavedTensor]:
    """What is kept in the end, as rank 0 has it: without large tensors that are kept where they are small only.

    What is the same in several places is said once.
    """
    every = tuple(tensors)
    sizes = {tensor.name: tensor.bytes(mesh) for tensor in every}
    found: dict[tuple[Any, ...], tuple[SavedTensor, set[str]]] = {}
    for tensor in every:
        if not tensor.small or sizes[tensor.small] <= SMALL_BYTES:
            same = (
                tensor.name,
                tensor.shape,
                tensor.dtype,
                tensor.depths,
                tensor.begins,
                tensor.unless,
                tensor.rounded,
            )
            found.setdefault(same, (tensor, set()))[1].update(_PLACES[tensor.on])
    for tensor, places in found.values():
        for on in _said(places):
            yield replace(tensor, on=on, small="", layer="", under=RECOMPUTES, product="", core=False)


def _said(places: set[str]) -> Iterator[str]:
    """Values of `SavedTensor.on` that say these places, the fewest."""
    while places:
        on = next(on for on, held in _PLACES.items() if places.issuperset(held))
        places = places.difference(_PLACES[on])
        yield on


def kept_on(tensors: Iterable[SavedTensor], device: str) -> Iterator[SavedTensor]:
    """Those that are kept on a device. `device`: CPU, CUDA, or COMPILED."""
    return (tensor for tensor in tensors if tensor.on in KEPT_ON[device])


def chunk_bytes(tensors: Iterable[SavedTensor], part: range, last: int, mesh: Mesh, device: str, rank: int = 0) -> int:
    """Bytes that a chunk keeps for one micro-batch, from its forward to its backward pass."""
    kept = ((tensor, tensor.times(part, last)) for tensor in kept_on(tensors, device))
    return sum(times * tensor.bytes(mesh, rank) for tensor, times in kept if times)


def deferred_bytes(
    tensors: Iterable[SavedTensor], part: range, last: int, mesh: Mesh, device: str, rank: int = 0
) -> int:
    """Bytes that a chunk keeps for one micro-batch, from the input part of its backward pass to the weight part.

    What the stage received is one of them if a product reads it there.
    """
    kept = list(kept_on(tensors, device))
    reads = any(tensor.is_received(part) for tensor in kept)
    held = (tensor for tensor in kept if reads or tensor.border != "first")
    return chunk_bytes(held, part, last, mesh, device, rank)
