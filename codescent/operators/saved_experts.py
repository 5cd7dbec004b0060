"""In: the sizes of a layer of experts. Out: what it keeps for backward (`SavedTensor`), and what it computes beside
products with matrices (`LayerOperator`).
Does not import torch and does not know a model: models/NAME/declare.py puts such parts together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from codescent.operators import operations, saved_tensors
from codescent.operators.saved_tensors import IN_BLOCKS, UNLESS_RECOMPUTED, Stream
from codescent.plan.activations import SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.operators import LayerOperator

# A plan cannot know how tokens will be routed. It has as many rows on each rank as if experts were equally loaded.


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a layer of experts: see `operators.routing.RouterTraits`. `inner`: channels inside of an expert.

    `shared`: those of a feed-forward beside the experts, "shared"; 0: there is none.
    """

    experts: int
    chosen: int
    inner: int
    normed: bool = True
    capacity: float = 0.0
    sigmoid: bool = False
    shared: int = 0

    def rows(self, positions: int) -> int:
        """Rows of all experts, of a sample of `positions` tokens."""
        share = self.capacity * self.chosen * positions / self.experts
        return self.experts * min(positions, math.ceil(share)) if self.capacity else self.chosen * positions


def layer(stream: Stream, sizes: ExpertSizes, name: str) -> Iterator[SavedTensor]:
    """What a layer of experts keeps: what it reads, its rows before and behind the experts, and what these keep."""
    forward, rows = stream.forward, sizes.rows(stream.positions)
    wide, again = forward.wide, {"under": IN_BLOCKS}

    def of_rows(what: str, width: int, **more: Any) -> SavedTensor:
        dims = (Dim.SAMPLE, Dim.POSITION, Dim.COLUMN if "value" in what or "activation" in what else Dim.WHOLE)
        return stream.tensor(f"{name} {what}", (forward.samples, rows, width), dims, **{**again, **more})

    def of_tokens(what: str, width: int, **more: Any) -> SavedTensor:
        dims = (Dim.SAMPLE, Dim.POSITION, Dim.WHOLE)
        return stream.tensor(f"{name} {what}", (forward.samples, stream.positions, width), dims, **{**again, **more})

    if sizes.shared:
        yield from _shared(stream, sizes.shared, f"{name}.shared")
    if not sizes.shared or forward.gathers:  # else both read one tensor
        yield stream.inputs(f"{name}.router input", layer=f"{name}.router")
    yield of_rows("rows", stream.width)
    yield of_rows("rows of outputs", stream.width)
    yield of_rows("activation input", 2 * sizes.inner)
    yield of_rows("value", sizes.inner, under=UNLESS_RECOMPUTED, layer=f"{name}.experts.down")
    yield of_tokens("logits, their log Z, and scores", 2 * sizes.experts + 1 + sizes.sigmoid, dtype=wide)
    yield of_tokens("weights", 2 * sizes.chosen + 1 if sizes.normed else sizes.chosen, dtype=wide)
    yield of_tokens("experts and places", 2 * sizes.chosen, dtype="int64")
    yield of_rows("tokens of rows", 1, dtype="int64")
    counts = forward.samples, sizes.experts
    yield stream.tensor(f"{name} choices", counts, (Dim.SAMPLE, Dim.WHOLE), dtype=wide, **again)


def _shared(stream: Stream, inner: int, name: str) -> Iterator[SavedTensor]:
    """What a feed-forward beside the experts keeps."""
    yield saved_tensors.read(stream, f"{name}.gate_up")
    yield from saved_tensors.product(stream, f"{name}.gate_up", 2 * inner)
    yield from saved_tensors.activated(stream, f"{name}.down", inner, 2, by_torch=1)


def operators(stream: Stream, sizes: ExpertSizes, name: str) -> Iterator[LayerOperator]:
    """What a layer of experts computes beside its products, and the sum with the residual stream."""
    if sizes.shared:
        layer = f"{name}.shared"
        yield operations.activated(
            stream, f"{layer} activation", f"{layer}.gate_up", sizes.shared, 2, joins=f"{layer}.down"
        )
        yield operations.added(stream, f"{layer} sum", f"{layer}.down")
    rows, forward = sizes.rows(stream.positions), stream.forward
    moved = (forward.samples, rows, stream.width)
    dims = (Dim.SAMPLE, Dim.POSITION, Dim.WHOLE)
    options: dict[str, Any] = {"dtype": forward.precision, "depths": stream.depths}
    gathers: dict[str, Any] = {"flops": (1.0, 2.0), "moves": (2.0, 2.0), "again": operations.OF_BLOCKS, **options}
    yield LayerOperator(f"{name} rows", f"{name}.router", moved, dims, **gathers)
    inner: dict[str, Any] = {**operations.ACTIVATION, "moves": (3.0, 5.0), "again": ("selective", "full"), **options}
    columns = (forward.samples, rows, sizes.inner)
    yield LayerOperator(
        f"{name} activation", f"{name}.experts.gate_up", columns, (Dim.SAMPLE, Dim.POSITION, Dim.COLUMN), **inner
    )
    yield LayerOperator(f"{name} sums of rows", f"{name}.experts.down", moved, dims, **gathers)
    yield from operations.residual(stream, name, f"{name}.experts.down", dropout=False)
