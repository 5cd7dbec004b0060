"""In: a function of tensors. Out: the same function; on CUDA it is compiled alone, so that it is one kernel or few.
Does not compile on a CPU, or inside of a compiled region, which takes the function in as it is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_used = False
COMPILER = "torch._dynamo"
"""torch's compiler. torch's optimizers import it, too, so that compiled code leaves them alone. That takes 1.1 s, and
eager code needs it nowhere."""
_waiting: list[Callable[[], None]] = []


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: compiled code calls the function once, and keeps the result as a constant.

    So does torch.compiler.assume_constant_result, which imports the compiler to set this mark. That takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


FEW = 1 << 15
"""In the engine's passes, so few elements are computed by torch's own operators: a node of autograd, and pieces, would
take longer than the product of one token with the matrix. More are faster in pieces on a CPU."""


def plain_inference() -> bool:
    """Whether this is a pass of the engine: in torch's inference mode, and not being compiled.

    Then a layer may call torch's operators directly. A node of autograd would take longer than the product of one token
    with a small matrix.
    """
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: compiled code breaks its graph here, and calls the function as it is.

    So does torch.compiler.disable, which imports the compiler when it decorates. Here that waits for who compiles.
    """
    called: list[Callable[P, R]] = [function]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if called[0] is function and COMPILER in sys.modules:
            leave_alone()
        return called[0](*args, **kwargs)

    def disable() -> None:
        called[0] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    _waiting.append(disable)
    return call


def leave_alone() -> None:
    """Call this before anything is compiled: then Dynamo finds functions that it knows to leave alone."""
    while _waiting:
        _waiting.pop()()


def use(wanted: bool) -> None:
    """Compile these functions in this process, on devices other than a CPU; or call them as they are.

    A run that trains decides it at its start (train/compiling.py). Who does a few passes, such as `codescent sample`,
    does without: to compile takes longer than it would save.
    """
    global _used
    _used = wanted


def fuses(device: torch.device) -> bool:
    """Whether these functions are compiled on a device. Otherwise they are computed operator by operator."""
    return _used and device.type != "cpu"


def compiled_off_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for a function of tensors and numbers. The first tensor decides for the device.

    On CUDA the first call compiles the function, and so does the first call with another dtype, number of dims or
    layout. A size that changes is compiled once more, for any size. After torch's limit of recompilations
    (torch._dynamo.config.recompile_limit) torch calls the plain function.
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
