"""In: sizes of a GPT-2 and of one step, a precision. Out: a function that computes that step's matrix products alone.
Is no training: it bounds how fast any program can train on this processor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from work import Work

REPEATS = 7
ERROR_ALLOWED = 4.0
"""Kernels count as fp32 where their error is at most this many times that of torch's default ones."""

LINE_BYTES = 64


@dataclass
class Product:
    """One product of a layer, with the kernels (a setting of torch) to use, computed `count` times in a step."""

    left: torch.Tensor
    right: torch.Tensor
    kernels: str
    count: int

    def __call__(self) -> None:
        """Compute it; the result is dropped."""
        torch.set_float32_matmul_precision(self.kernels)
        torch.mm(self.left, self.right)


def products(work: Work, precision: str) -> Callable[[], None]:
    """The products of forward and backward of every linear layer and of the head.

    Each with the fastest kernels, rows one after the other or a cache line apart, whichever is faster. Layers of a
    shape share their operands, which favours the caches. Those of attention are left out (3 % of GPT-2 124M at 256
    tokens).
    """
    found = [min(candidates, key=_seconds) for candidates in _candidates(work, precision)]

    def step() -> None:
        for product in found:
            for _ in range(product.count):
                product()

    return step


def _candidates(work: Work, precision: str) -> Iterator[list[Product]]:
    """y = x W^T, dx = dy W, dW = dy^T x of each shape of weights, in every way that is to be tried."""
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
    """Makes random matrices whose rows are so many bytes apart."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def new(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns + apart_bytes // dtype.itemsize).to(dtype)[:, :columns]

    return new


def _kernels(precision: str) -> list[str]:
    """Settings of torch whose fp32 products are fp32; bf16 has one way only."""
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
