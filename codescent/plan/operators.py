"""In: nothing. Out: the dataclass LayerOperator: what a depth computes beside the products of its matrices.
Does not know seconds. The products of matrices follow from the parameters (cost/operators.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from codescent.base.dtypes import DTYPE_BYTES
from codescent.plan.brief import brief
from codescent.plan.divided import Dim, Divided
from codescent.plan.mesh import AXES, Mesh
from codescent.plan.shard import Placement

ATTENTION_DIMS = 5
"""Samples, query heads, queries, keys, channels of a head."""


@dataclass(frozen=True)
class LayerOperator(Divided):
    """An operator that reads no matrix, in the forward pass of a micro-batch, at each of some depths.

    Attributes:
        name: what it is, such as "norm_1" or "attn scores".
        layer: the layer in whose place it comes, or behind whose product.
        shape: of the undivided tensor that it reads or writes. A product inside of attention has the sizes of
            ATTENTION_DIMS.
        dims: what each dim of `shape` counts.
        depths: the depths [first, end) that compute it.
        flops: for each element of `shape`, in forward and in backward.
        moves: how often forward, and backward, read or write a tensor of this shape. Of a product inside of attention:
            one tensor of the queries' shape together with one of the keys' shape.
        shared: query heads that read the same keys and values, in a product inside of attention; 0: it is none.
        again: the values of parallel.recompute with which backward computes it once more.
        joins: the layer whose product a CPU computes together with it. Then parallel.recompute = "products" computes
            this product again, whether or not backward needs it.
        on: the kind of device that computes it; "": every kind.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    dtype: str
    depths: tuple[int, int]
    flops: tuple[float, float]
    moves: tuple[float, float]
    placement: Placement = field(default_factory=Placement)
    shared: int = brief(0)
    again: tuple[str, ...] = brief(())
    joins: str = brief("")
    on: str = brief("")

    def elements(self, mesh: Mesh, rank: int = 0) -> int:
        """Elements of `shape` on a rank. Rank 0 has the largest part."""
        return math.prod(self.placement.sizes(self.shape, mesh, rank))

    def moved_bytes(self, mesh: Mesh, rank: int = 0) -> int:
        """Bytes of a tensor that is read or written, on a rank: see `moves`."""
        sizes = self.placement.sizes(self.shape, mesh, rank)
        size = DTYPE_BYTES[self.dtype]
        if not self.shared:
            return math.prod(sizes) * size
        samples, heads, queries, keys, channels = sizes
        return samples * heads * (queries + keys // self.shared) * channels * size

    def refuse_impossible(self) -> None:
        """Raise ValueError: it is no operator, or has another dim than it is cut along."""
        dims = len(self.shape)
        cuts = [axis for axis, dim in self.placement.shards.items() if axis not in AXES or not 0 <= dim < dims]
        pairs = {len(self.depths), len(self.flops), len(self.moves)} == {len(("forward", "backward"))}
        amounts = all(0 <= amount < math.inf for amount in (*self.shape, *self.flops, *self.moves, self.shared))
        whole = dims and len(self.dims) == dims and pairs and amounts
        if not whole or cuts or (self.shared and dims != ATTENTION_DIMS):
            raise ValueError(f"{self.name}: is not an operator of a forward pass")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: there is no dtype {self.dtype!r}")
