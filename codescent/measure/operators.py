"""In: a device. Out: the seconds of element-wise operators and of attention, and what it costs a host to launch one.
Does not measure products of matrices (products.py does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.base.dtypes import DTYPE_BYTES
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.measure.items import ACTIVATION, ATTENTION, ELEMENTWISE, LAUNCH, NORM, SUM, Item
from codescent.measure.timer import Timer
from codescent.operators import operations
from codescent.operators.activations import GELU
from codescent.operators.attention import causal_attention
from codescent.operators.saved_attention import AttentionSizes
from codescent.operators.saved_tensors import ForwardPass, Stream

PRECISION: Mapping[str, str] = {"cpu": "fp32", "cuda": "bf16"}
"""The number format in which these operators are measured: the usual one of a device."""
ROWS: Mapping[str, tuple[int, int]] = {"cpu": (2048, 768), "cuda": (8192, 4096)}
"""Positions and channels of the tensor that element-wise operators read."""
CLONE_MOVES = 2
LAUNCHES = 64
"""Operators of a chain on one number: so many forward, and as many backward."""
HEADS: Mapping[str, tuple[int, int, int, int]] = {"cpu": (2, 8, 256, 64), "cuda": (4, 16, 2048, 128)}
"""Samples, heads, positions and channels of a head."""


def launches(timer: Timer, share_s: float) -> Iterator[Item]:
    """A chain of operators on one number, with its backward pass: nearly all of its time is the host's. Collective."""
    one = torch.ones(1, device=timer.device, requires_grad=True)

    def chain() -> None:
        found = one
        for _ in range(LAUNCHES):
            found = found + one
        found.backward()  # type: ignore[no-untyped-call]

    yield Item(LAUNCH, "", (2 * LAUNCHES,), 1.0, timer.repeated(chain, share_s))


def elementwise(timer: Timer, share_s: float) -> Iterator[Item]:
    """Operators of a block, forward and backward, with new memory for each result. Collective."""
    kind = timer.kernels
    name, (rows, width) = PRECISION[kind], ROWS[kind]
    x_NI, d_y_NI = (torch.randn(rows, width, device=timer.device).to(TORCH_DTYPE[name]) for _ in range(2))
    moved = float(rows * width * DTYPE_BYTES[name])
    slope_NI = torch.empty_like(x_NI)

    def activation() -> None:
        GELU.value(x_NI, slope_NI)
        GELU.gradient(slope_NI, d_y_NI.clone())  # it overwrites what it is given

    gelu = activation if kind == "cpu" else _passes(GELU.plain, x_NI, d_y_NI)
    calls: dict[str, tuple[Callable[[], object], float]] = {
        SUM: (lambda: x_NI + d_y_NI, operations.SUM["moves"][0]),
        NORM: (_passes(lambda x: F.layer_norm(x, (width,)), x_NI, d_y_NI), sum(operations.NORM["moves"])),
        ACTIVATION: (gelu, sum(operations.ACTIVATION["moves"]) + CLONE_MOVES * (kind == "cpu")),
    }
    for operator, (call, moves) in calls.items():
        yield Item(ELEMENTWISE, operator, (rows, width), moves * moved, timer.repeated(call, share_s / len(calls)))


def _passes(operator: Callable[[Tensor], Tensor], x: Tensor, d_y: Tensor) -> Callable[[], object]:
    """The forward and the backward pass of an operator."""
    x = x.clone().requires_grad_()
    return lambda: torch.autograd.grad(operator(x), x, d_y)


def attention(timer: Timer, share_s: float) -> Iterator[Item]:
    """Causal attention, forward and backward, in the number formats that the products were measured in. Collective."""
    kind = timer.kernels
    samples, heads, positions, channels = HEADS[kind]
    generator = torch.Generator().manual_seed(0)
    qkv_BTGEK = torch.randn(samples, positions, heads, 3, channels, generator=generator)
    name = PRECISION[kind]
    qkv_BTGEK = qkv_BTGEK.to(timer.device, TORCH_DTYPE[name])
    d_y_BTD = torch.ones(samples, positions, heads * channels, device=timer.device, dtype=qkv_BTGEK.dtype)
    seconds = timer.repeated(_passes(causal_attention, qkv_BTGEK, d_y_BTD), share_s)
    yield Item(ATTENTION, name, HEADS[kind], attention_flops(kind, name), seconds)


def attention_flops(kind: str, name: str) -> float:
    """FLOPs of the attention that is measured, forward and backward, as a model declares them."""
    samples, heads, positions, channels = HEADS[kind]
    stream = Stream(ForwardPass(samples, positions, name, 0), (1, 2), positions, heads * channels)
    sizes = AttentionSizes(heads, heads, channels, positions)
    declared = operations.attention(stream, "attn", "attn.qkv", sizes, causal=True, dropout=False)
    return sum(sum(one.flops) * math.prod(one.shape) for one in declared if one.on in ("", kind))
