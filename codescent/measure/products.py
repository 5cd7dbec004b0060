"""In: a device. Out: the seconds of products with matrices, by number format, size and form, as layers compute them.
Does not choose kernels for a run (train/choices.py does), and fits nothing (constants.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.measure.items import PRODUCT, Item
from codescent.measure.timer import LEAST, TOO_LONG, Timer
from codescent.operators import products
from codescent.train import machine

SIZES: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "cpu": (
        (64, 128, 512),
        (256, 128, 384),
        (256, 256, 1024),
        (512, 512, 1536),
        (512, 512, 2048),
        (1024, 768, 768),
        (1024, 768, 3072),
        (512, 768, 8192),
    ),
    "cuda": (
        (1024, 768, 768),
        (2048, 768, 3072),
        (4096, 1024, 4096),
        (8192, 2048, 2048),
        (8192, 2048, 8192),
        (8192, 4096, 4096),
        (8192, 4096, 12288),
        (16384, 8192, 8192),
    ),
}
"""Rows, inputs and outputs of layers, from small ones to those of GPT-2 and of Llama; the largest last."""
FORMATS: Mapping[str, tuple[str, ...]] = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16")}
SEED = 0
Operands = tuple[Tensor, Tensor, Tensor]


def measure(timer: Timer, share_s: float) -> Iterator[Item]:
    """Repeat each product on all ranks at the same time, for `share_s` seconds in all. Collective."""
    kind = timer.kernels
    each_s = share_s / (len(SIZES[kind]) * len(FORMATS[kind]) * len(_FORMS))
    for name in FORMATS[kind]:
        if name == "tf32":
            machine.use_matmul("fast")
        per_flop_s = 0.0
        for sizes in SIZES[kind]:
            rows, inputs, outputs = sizes
            flops = 2.0 * rows * inputs * outputs
            if LEAST * flops * timer.together(per_flop_s) > TOO_LONG * each_s:
                break  # larger ones take longer
            operands = _operands(timer.device, "fp32" if name == "tf32" else name, sizes)
            for form in _FORMS:
                seconds = timer.repeated(partial(form.call, *operands), each_s)
                per_flop_s = seconds.median / flops
                yield Item(PRODUCT, name, form.sizes(*sizes), flops, seconds)
        if name == "tf32":
            machine.use_matmul("exact")


def _operands(device: torch.device, name: str, sizes: tuple[int, int, int]) -> Operands:
    """What a layer reads, its matrix, and the gradient of what it gives."""
    rows, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(SEED)
    shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x_NI, weight_OI, d_y_NO = (
        torch.randn(*shape, generator=generator).to(device, TORCH_DTYPE[name]) for shape in shapes
    )
    return x_NI, weight_OI, d_y_NO


def _forward(x_NI: Tensor, weight_OI: Tensor, d_y_NO: Tensor) -> Tensor:
    return products.mm(x_NI, weight_OI.t())


def _gradient_of_input(x_NI: Tensor, weight_OI: Tensor, d_y_NO: Tensor) -> Tensor:
    return products.mm(d_y_NO, weight_OI)


def _gradient_of_matrix(x_NI: Tensor, weight_OI: Tensor, d_y_NO: Tensor) -> Tensor:
    return products.mm(d_y_NO.t(), x_NI)


class _Form(NamedTuple):
    """A product of a layer of so many rows, inputs and outputs. `sizes`: rows and columns of the result, and the
    elements of each sum."""

    sizes: Callable[[int, int, int], tuple[int, int, int]]
    call: Callable[[Tensor, Tensor, Tensor], Tensor]


_FORMS = (
    _Form(lambda rows, inputs, outputs: (rows, outputs, inputs), _forward),
    _Form(lambda rows, inputs, outputs: (rows, inputs, outputs), _gradient_of_input),
    _Form(lambda rows, inputs, outputs: (outputs, inputs, rows), _gradient_of_matrix),
)
