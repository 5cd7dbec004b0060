"""In: a function of tensors. Out: the same function; on CUDA it is compiled alone, so that it is one kernel or few.
Does not compile on a CPU, or inside of a compiled region, which takes the function in as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_OLDEST = (7, 0)  # compute capability of the oldest GPU for which Triton generates code (Volta)


def compiled_off_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for a function of tensors and numbers that has no loop over elements and no side effect but on them.

    On CUDA the first call compiles the function, and so does the first call with another dtype, number of dims or
    layout. A size that changes is compiled once more, for any size. After torch's limit of recompilations
    (torch._dynamo.config.recompile_limit) torch calls the plain function. The first tensor decides for the device.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        device = next(argument.device for argument in args if isinstance(argument, Tensor))
        return (alone(function) if fuses(device) else function)(*args, **kwargs)

    return call


@functools.cache
def alone(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled by itself. Nothing is compiled before its first call."""
    return torch.compile(function)


@functools.cache
def fuses(device: torch.device) -> bool:
    """Whether such functions are compiled on a device. Without Triton they are computed operator by operator."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= _OLDEST


def has_triton() -> bool:
    """Whether Triton, which compiles kernels for CUDA, is installed. torch's wheels for CUDA bring it along."""
    return find_spec("triton") is not None
