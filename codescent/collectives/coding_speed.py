"""In: a plan. Out: how fast this processor encodes, decodes and adds what the plan's ranks exchange, measured.
Does not send anything: it calls the encoders of a run (strategies/wire_codecs.py, wire_sums.py) on random numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.cost.coding import Coding
from codescent.plan import Plan
from codescent.plan.wire import Wire
from codescent.strategies.ddp import buckets
from codescent.strategies.wire_codecs import codec, largest
from codescent.strategies.wire_sums import PowerSGD

MEASURED_S = 0.3
"""Seconds for each of the three figures; ranks that share a machine measure one figure at the same time."""
LEAST_TIMES = 3
MOST_ELEMENTS = 1 << 25
"""Of a larger model the first elements are coded: 128 MiB in fp32 are far more than a cache holds."""


def measure(plan: Plan, seconds: float = MEASURED_S) -> Coding:
    """Measure the three figures, each for `seconds`, on the CPU with torch's present number of threads.

    The sizes are those of the plan's buckets, weights or servers: whether they fit into a cache decides.
    """
    wire, dtype = Wire.parse(plan.layout.wire), TORCH_DTYPE[plan.trained[0].optimizer_dtype]
    vectors = [
        _Vector(shapes, torch.randn(sum(map(prod, shapes)), dtype=dtype)) for shapes in _first(messages_of(plan))
    ]
    ranks, numel = max(2, plan.mesh.dp_replicate), sum(len(one.values) for one in vectors)
    others = [(torch.randn_like(one.values), torch.empty_like(one.values)) for one in vectors]

    def add() -> None:
        for vector, (other, into) in zip(vectors, others, strict=True):
            torch.add(vector.values, other, out=into)

    stream_s = _median_s(add, seconds) / 3
    others.clear()
    if wire.method == "none":
        return Coding(stream_s / numel)
    calls = [_calls(wire, vector, ranks) for vector in vectors]
    encode_s, decode_s = (_median_s(partial(_all, one), seconds) for one in zip(*calls, strict=True))
    return Coding(stream_s / numel, encode_s / numel, decode_s / numel)


def messages_of(plan: Plan, stage: int = 0) -> list[list[tuple[int, ...]]]:
    """The shapes of what a rank of a stage codes at a time: buckets of gradients, the parts of servers, or weights."""
    if plan.layout.served:
        return [[(sum(piece.numel for piece in pieces),)] for pieces in plan.pieces]
    trained = [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained]
    if plan.layout.apart:
        return [[tensor.optimizer.sizes(tensor.parameter.shape, plan.mesh) for tensor in trained]]
    shapes = [tensor.gradients.sizes(tensor.parameter.shape, plan.mesh) for tensor in trained]
    filled = buckets([prod(shape) for shape in shapes], plan.layout.bucket_bytes, plan.trained[0].optimizer_dtype)
    return [[shapes[index] for index in bucket] for bucket in filled]


def _first(messages: Sequence[Sequence[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """The first tensors, up to MOST_ELEMENTS. The last one may lose rows."""
    left, found = MOST_ELEMENTS, list[list[tuple[int, ...]]]()
    for shapes in messages:
        kept = []
        for shape in shapes:
            rows, row = (shape[0] if shape else 1), prod(shape[1:])
            if left < row:
                break
            kept.append((min(rows, left // row), *shape[1:]))
            left -= prod(kept[-1])
        if kept:
            found.append(kept)
    return found


@dataclass(frozen=True)
class _Vector:
    """Tensors of these shapes, one behind the other."""

    shapes: list[tuple[int, ...]]
    values: torch.Tensor


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _median_s(call: Callable[[], object], seconds: float) -> float:
    """The median time of a call. The first one, which touches new memory, does not count."""
    call()
    found, end_s = list[float](), time.perf_counter() + seconds
    while len(found) < LEAST_TIMES or time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def _calls(wire: Wire, vector: _Vector, ranks: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Encode a vector; decode it."""
    values = vector.values
    if wire.method == "topk":
        return _of_topk(wire, values)
    if wire.method == "powersgd":
        return _of_powersgd(wire, vector, ranks)
    parts, part = wire.parts(ranks), wire.part(len(values), ranks)
    rows = values.new_zeros(parts, part)
    rows.view(-1)[: len(values)] = values
    scratch = torch.empty_like(rows)
    messages = torch.empty(parts, wire.message(part), dtype=TORCH_DTYPE[wire.message_dtype])
    one = codec(wire)
    return lambda: one.encode(rows, messages, scratch), lambda: one.decode(messages, scratch)


def _of_topk(wire: Wire, values: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    scratch, count = torch.empty_like(values), wire.top(len(values))
    indices = largest(values, count, scratch)
    chosen, places = values[indices], indices.int()

    def encode() -> None:
        found = largest(values, count, scratch)
        torch.index_select(values, 0, found, out=chosen)
        values.index_fill(0, found, 0.0)

    return encode, lambda: scratch.index_add_(0, places, chosen)


def _of_powersgd(wire: Wire, vector: _Vector, ranks: int) -> tuple[Callable[[], object], Callable[[], object]]:
    values, dtype = vector.values, str(vector.values.dtype).replace("torch.float", "fp")
    state = {one.name: values.new_zeros(one.shape) for one in wire.state(vector.shapes, dtype, ranks)}
    one = PowerSGD(wire, vector.shapes, _Group(ranks), state, values[:0])  # type: ignore[arg-type]

    def encode() -> None:
        one.values.copy_(values)  # else turn by turn less is left of it
        one.project()
        one.factor()

    return encode, one.multiply


@dataclass(frozen=True)
class _Group:
    """What a sum asks of a process group that sends nothing."""

    ranks: int

    def size(self) -> int:
        """Ranks of the group."""
        return self.ranks

    def rank(self) -> int:
        """Of this process."""
        return 0
