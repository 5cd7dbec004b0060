"""In: sizes of a GPT-2 and of one step, a precision. Out: a function that computes only the step's matrix products.
Does not train: its time is a lower bound for a training step of any program on this processor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from work import Work

REPEATS = 7
ERROR_ALLOWED = 4.0
"""Kernels count as fp32 if their error is at most this many times the error of torch's default kernels."""

LINE_BYTES = 64


@dataclass
class Product:
    """One matrix product of a layer. `kernels` is a setting of torch; a step computes the product `count` times."""

    left: torch.Tensor
    right: torch.Tensor
    kernels: str
    count: int

    def __call__(self) -> None:
        """Compute the product and discard the result."""
        torch.set_float32_matmul_precision(self.kernels)
        torch.mm(self.left, self.right)


def products(work: Work, precision: str) -> Callable[[], None]:
    """A function that computes the products of forward and backward of every linear layer and of the head.

    Each product uses the fastest kernels, and the faster of two memory layouts: rows without gaps, or a cache line
    apart. Layers of equal shape share their operands, which helps the caches. The products of attention are left out
    (3 % of GPT-2 124M at 256 tokens).
    """
    found = [min(candidates, key=_seconds) for candidates in _candidates(work, precision)]

    def step() -> None:
        for product in found:
            for _ in range(product.count):
                product()

    return step


def _candidates(work: Work, precision: str) -> Iterator[list[Product]]:
    """For each shape of weights, y = x W^T, dx = dy W and dW = dy^T x, each in every way to try."""
    width = work.hidden_dim
    vocab = -(-work.vocab_size // LINE_BYTES) * LINE_BYTES
    weights = [(rows, columns, work.num_layers) for rows, columns in _layer(width)] + [(vocab, width, 1)]
    ways = list(itertools.product(_kernels(precision), (0, LINE_BYTES)))
    for rows, columns, count in weights:
        trials: list[list[Product]] = [[], [], []]
        for kernels, apart in ways:
            new = _filler(precision, apart)
            x, weight, d_y = new(work.tokens, columns), new(rows, columns), new(work.tokens, rows)
            for trial, operands in zip(trials, ((x, weight.t()), (d_y, weight), (d_y.t(), x)), strict=True):
                trial.append(Product(*operands, kernels, count))
        yield from trials


def _layer(width: int) -> list[tuple[int, int]]:
    """Rows and columns of a layer's weights: q, k and v together, attention's output, up, down."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def _filler(precision: str, apart_bytes: int) -> Callable[[int, int], torch.Tensor]:
    """A function that creates random matrices, with `apart_bytes` unused bytes between rows."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def new(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns + apart_bytes // dtype.itemsize).to(dtype)[:, :columns]

    return new


def _kernels(precision: str) -> list[str]:
    """Settings of torch whose fp32 products have fp32 accuracy; for bf16 there is only one."""
    if precision == "bf16":
        return ["highest"]
    return [kernels for kernels in ("highest", "medium") if _error(kernels) <= ERROR_ALLOWED * _error("highest")]


def _error(kernels: str) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    torch.set_float32_matmul_precision(kernels)
    return float(((a @ b).double() - a.double() @ b.double()).abs().max())


def _seconds(product: Product) -> float:
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        product()
        taken.append(time.perf_counter() - begun)
    return min(taken)
