"""In: a seed and a declared parameter, or slices of it. Out: random initial values, computed for these slices only.
Does not depend on device, layout, threads or other parameters: a value is a function of (seed, name, index)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from codescent.plan.shard import Parameter

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Target = tuple[Parameter, torch.Tensor, tuple[slice, ...] | None]
"""A parameter, the tensor to fill, and the slices of the parameter that the tensor holds; None: the whole parameter."""

_BLOCK_WORDS = 1 << 15  # random 64-bit words (two values each) generated at a time: they fit in a core's cache
_F = np.float32
_SIGN = np.uint32(1 << 31)
_SQRT_HALF_BITS = np.float32(math.sqrt(0.5)).view(np.int32)


def initial_values(seed: int, parameter: Parameter, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
    """Initial values of a parameter, or of slices of it, in fp32. Slicing does not change a value, bitwise.

    Raises:
        ValueError: `slices` is not one slice of step 1 for each dim.
    """
    bounds = _bounds(parameter.shape, slices)
    out = np.full([stop - start for start, stop in bounds], parameter.mean, dtype=np.float32)
    if parameter.std > 0.0 and out.size:
        _fill(out, _key(seed, parameter.name), parameter, bounds)
    return torch.from_numpy(out)


def initialize_(module: nn.Module, seed: int, parameters: Iterable[Parameter]) -> None:
    """Write the initial values of every declared parameter into the module, in its dtype and on its device.

    Raises:
        ValueError: the names or shapes of the module's parameters differ from the declared ones.
    """
    declared = {parameter.name: parameter for parameter in parameters}
    present = dict(module.named_parameters())
    if {name: tuple(tensor.shape) for name, tensor in present.items()} != {p.name: p.shape for p in declared.values()}:
        different = sorted(set(declared) ^ set(present)) or "in shape"
        raise ValueError(f"declared and present parameters differ: {different}")
    fill_(seed, [(declared[name], tensor, None) for name, tensor in present.items()])


def fill_(seed: int, targets: Iterable[Target]) -> None:
    """Write initial values into each tensor. Values outside a tensor's slices are not computed."""

    def write(target: Target) -> None:
        parameter, tensor, slices = target
        with torch.no_grad():
            tensor.copy_(initial_values(seed, parameter, slices))

    largest_first = sorted(targets, key=lambda target: -target[1].numel())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, largest_first))


def _bounds(shape: tuple[int, ...], slices: tuple[slice, ...] | None) -> list[tuple[int, int]]:
    slices = (slice(None),) * len(shape) if slices is None else slices
    if len(slices) != len(shape) or any(part.step not in (None, 1) for part in slices):
        raise ValueError(f"{slices} are not one slice of step 1 for each dim of {shape}")
    bounds = [part.indices(size)[:2] for part, size in zip(slices, shape)]
    return [(start, max(start, stop)) for start, stop in bounds]


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"codescent initial value\0{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


def _fill(out: Floats, key: int, parameter: Parameter, bounds: list[tuple[int, int]]) -> None:
    """Fill `out` run by run. The values of a run are contiguous in the slice and in the whole parameter."""
    shape = parameter.shape
    dim = len(shape)
    while dim > 0 and (dim == len(shape) or bounds[dim] == (0, shape[dim])):
        dim -= 1
    # All dims after `dim` are whole, so a run covers bounds[dim] and every later dim.
    inner = math.prod(shape[dim + 1 :])
    run = (bounds[dim][1] - bounds[dim][0]) * inner
    strides = [math.prod(shape[index + 1 :]) for index in range(dim)]
    flat = out.reshape(-1, run)
    scale, mean = _F(parameter.std), _F(parameter.mean)
    for number, outer in enumerate(np.ndindex(*[stop - start for start, stop in bounds[:dim]])):
        first = sum((index + bounds[at][0]) * strides[at] for at, index in enumerate(outer)) + bounds[dim][0] * inner
        _fill_run(flat[number], key, first, scale, mean)


def _fill_run(out: Floats, key: int, first: int, scale: np.float32, mean: np.float32) -> None:
    """Write values first, first + 1, ... of the random stream into `out`.

    Word w of the stream gives values 2w and 2w + 1. A Philox block has 4 words.
    """
    word, last = first // 2, (first + len(out) + 1) // 2
    generator = np.random.Philox(key=key, counter=word // 4)
    generator.random_raw(word % 4, output=False) if word % 4 else None
    done, skip = 0, first % 2
    while word < last:
        count = min(_BLOCK_WORDS, last - word)
        pairs = _normal_pairs(generator.random_raw(count)).reshape(-1)[skip : skip + len(out) - done]
        pairs *= scale
        pairs += mean
        out[done : done + len(pairs)] = pairs
        word, done, skip = word + count, done + len(pairs), 0


def _normal_pairs(words: Words) -> Floats:
    """[n, 2]: independent standard normal values, computed from n random words (Box and Muller 1958).

    It uses only operations that IEEE 754 rounds exactly, and no library's log, sin or cos. So every machine computes
    the same bits. It selects by bit operations, because numpy.where branches for each number.
    """
    halves = words.view(np.uint32).reshape(-1, 2)
    radius = _log_of_uniform(halves[:, 0])
    radius *= _F(-2.0)
    np.sqrt(radius, out=radius)
    sine, cosine = _unit_vector(halves[:, 1])
    pairs = np.empty((len(words), 2), dtype=np.float32)
    np.multiply(radius, cosine, out=pairs[:, 0])
    np.multiply(radius, sine, out=pairs[:, 1])
    return pairs


def _log_of_uniform(bits: npt.NDArray[np.uint32]) -> Floats:
    """ln((bits + 0.5) / 2**32) by the series of atanh around 1; relative error below 3e-7."""
    uniform = bits.astype(np.float32)
    uniform += _F(0.5)
    uniform *= _F(2.0**-32)
    raw = uniform.view(np.int32)
    exponent = (raw - _SQRT_HALF_BITS) >> 23
    mantissa = (raw - (exponent << 23)).view(np.float32)  # in [sqrt(1/2), sqrt(2))
    z = (mantissa - _F(1.0)) / (mantissa + _F(1.0))
    z2 = z * z
    series = _polynomial(z2, (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0))
    series *= z
    series += exponent.astype(np.float32) * _F(math.log(2.0))
    return np.minimum(series, _F(0.0), out=series)


def _unit_vector(bits: npt.NDArray[np.uint32]) -> tuple[Floats, Floats]:
    """(sin, cos) of a uniform angle: an angle in [-pi/4, pi/4] by Taylor's series, then one of four quarter turns."""
    angle = (bits << np.uint32(2)).view(np.int32).astype(np.float32)
    angle *= _F(math.pi / 4 * 2.0**-31)
    a2 = angle * angle
    sine = _polynomial(a2, (1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0))
    sine *= angle
    cosine = _polynomial(a2, (1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0))
    quarter = ((bits << np.uint32(1)).view(np.int32) >> 31).view(np.uint32)  # all ones: turn by a quarter
    half = bits & _SIGN  # the sign: turn by a half
    sine_bits, cosine_bits = sine.view(np.uint32), cosine.view(np.uint32)
    exchange = (sine_bits ^ cosine_bits) & quarter
    sine_bits ^= exchange ^ half
    cosine_bits ^= exchange ^ half ^ (quarter & _SIGN)
    return sine, cosine


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Horner's scheme, highest power first; the value is a new array."""
    value = x * _F(coefficients[0])
    for coefficient in coefficients[1:-1]:
        value += _F(coefficient)
        value *= x
    value += _F(coefficients[-1])
    return value
