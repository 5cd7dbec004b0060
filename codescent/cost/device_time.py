"""In: operators of a rank, a device, a software. Out: the seconds in which the device computes them.
Does not know what a rank sends (collective_time.py does) and does not measure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from codescent.clusters.cluster import ClusterDevice, Software
from codescent.cost.operators import ATTENTION, PRODUCT, Computed

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
"""Tiles: parts of a product that one unit of a GPU computes. Each has rows, columns, and its share of the best speed.
Small tiles load more than they compute (NVIDIA 2023, "Matrix Multiplication Background User's Guide", section 4.1). A
library chooses the fastest one."""
DEPTH = 100
"""Sums over so many elements reach half of a tile's speed: it has to be loaded and stored."""
QUERIES = 128
"""Queries that one unit takes in a fused attention kernel (Dao 2023, "FlashAttention-2", section 3.3)."""
CHANNELS = 50
"""Heads of so many channels reach half of the speed of attention."""
WHOLE_LOGITS = 28 / 6
"""A loss that is computed for all tokens at once reads and writes 28 bytes of each logit: a copy in fp32, the logarithm
of its softmax, and the gradients of both. In chunks these are 6 bytes: a logit is read twice, and its gradient
written."""
FORMS = 3
"""Products of a matrix: forward, the gradient of the input, the gradient of the matrix."""


@dataclass(frozen=True)
class Spent:
    """Seconds of some operators, by what bounds them, and how many operators a host launches."""

    products_s: float = 0.0
    attention_s: float = 0.0
    moved_s: float = 0.0
    launches: int = 0

    @property
    def device_s(self) -> float:
        """Seconds in which the device is busy."""
        return self.products_s + self.attention_s + self.moved_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.products_s + other.products_s,
            self.attention_s + other.attention_s,
            self.moved_s + other.moved_s,
            self.launches + other.launches,
        )


def utilization(device: ClusterDevice, peak: float, rows: float, columns: float, depth: float) -> float:
    """The share of a peak that a product [rows, depth] x [depth, columns] reaches.

    What keeps it below is that units wait for data, and that the clock falls. Both weigh less with a number format in
    which the device computes more slowly.
    """
    strain = _strain(device, peak)
    filled = max(_filled(device.units, rows, columns, strain, *tile) for tile in TILES) if device.units else 1.0
    return filled * depth / (depth + strain * DEPTH) * _reached(device.sustained, strain)


def _strain(device: ClusterDevice, peak: float) -> float:
    """How much units wait, and how far the clock falls, relative to products in 16 bits. fp8 has twice their peak and
    reaches 1.6 times their speed: the square root says so."""
    ratio = peak / max(device.peak("bf16"), device.peak("fp16"))
    return min(ratio, math.sqrt(ratio))


def _reached(share: float, strain: float) -> float:
    """The share that is reached where 16 bits reach `share`: what is lost takes time in proportion to the strain."""
    return 1.0 / (1.0 + strain * (1.0 / share - 1.0))


def _filled(units: int, rows: float, columns: float, strain: float, high: int, wide: int, speed: float) -> float:
    """The last wave of tiles leaves units idle. The square root: all units share a clock and a power limit, so those
    that compute are faster while others are idle."""
    tiles = math.ceil(rows / high) * math.ceil(columns / wide)
    waves = tiles / units
    used = rows * columns / (tiles * high * wide) * math.sqrt(waves / math.ceil(waves))
    return used * _reached(speed, strain)


def spent(
    operators: Iterable[Computed], device: ClusterDevice, software: Software, precision: str, num_layers: int
) -> tuple[Spent, Spent]:
    """What the forward and the backward pass of a micro-batch take.

    The time of an operator is that of its FLOPs or of its bytes, whichever is longer (Williams et al. 2009,
    "Roofline"). `precision`, `num_layers`: of the run.
    """
    forward, backward = Spent(), Spent()
    for one in operators:
        if one.kind == PRODUCT:
            found = _product(one, device, software, software.precision or precision)
        elif one.kind == ATTENTION:
            found = _attention(one, device, software, software.precision or precision)
        else:
            found = _moved(one, device, software, of_head=one.depth > num_layers)
        forward, backward = forward + found[0], backward + found[1]
    return forward, backward


def copies_per_s(device: ClusterDevice, software: Software) -> float:
    """Bytes that a device reads and writes per second."""
    return device.memory_bytes_per_s * software.memory_efficiency


def _product(one: Computed, device: ClusterDevice, software: Software, precision: str) -> tuple[Spent, Spent]:
    """A head has all of its products in forward. What is computed again has the form of forward."""
    rows, inputs, outputs = one.sizes
    flops = 2.0 * rows * inputs * outputs
    if not flops:
        return Spent(), Spent()
    is_head = one.forward_flops > flops
    usual = precision if is_head or not software.block_products else software.block_products
    peaks = [device.peak(name) for name in one.formats or (usual,) * FORMS]
    moved_s = one.forward_bytes * flops / one.forward_flops / copies_per_s(device, software)
    sizes = ((rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows))
    seconds = [
        max(flops / (peak * software.product_efficiency * utilization(device, peak, *size)), moved_s)
        for peak, size in zip(peaks, sizes, strict=True)
    ]
    forward, backward = round(one.forward_flops / flops), one.backward_flops / flops
    first = [seconds[number % FORMS] for number in range(forward)]
    parts = [min(1.0, backward - number) for number in range(math.ceil(backward - 1e-6))]  # the last may be a part
    second = [part * seconds[number % FORMS] for number, part in enumerate(parts, 1)]
    return Spent(products_s=sum(first), launches=forward), Spent(products_s=sum(second), launches=len(second))


def _attention(one: Computed, device: ClusterDevice, software: Software, precision: str) -> tuple[Spent, Spent]:
    """The products inside of attention."""
    samples, heads, queries, _, channels = one.sizes
    peak = device.peak(precision)
    strain = _strain(device, peak)
    best = peak * _reached(device.sustained, strain) * software.product_efficiency
    best *= _reached(software.attention_efficiency, strain) * channels / (channels + strain * CHANNELS)
    if device.units:
        waves = samples * heads * math.ceil(queries / QUERIES) / device.units
        best *= math.sqrt(waves / math.ceil(waves)) if waves else 1.0
    first, second = (
        Spent(attention_s=max(flops / best, moved / copies_per_s(device, software)), launches=int(flops > 0))
        for flops, moved in _passes(one)
    )
    return first, second


def _moved(one: Computed, device: ClusterDevice, software: Software, *, of_head: bool) -> tuple[Spent, Spent]:
    """What only moves memory. Its FLOPs are not products: they count where they take longer, on a CPU."""
    peak = device.peak("fp32")
    times = WHOLE_LOGITS if of_head and software.logit_bytes else software.fused
    first, second = (
        Spent(moved_s=max(times * moved / copies_per_s(device, software), flops / peak), launches=int(moved > 0))
        for flops, moved in _passes(one)
    )
    return first, second


def _passes(one: Computed) -> tuple[tuple[float, float], tuple[float, float]]:
    """FLOPs and bytes of forward, and of backward."""
    return (one.forward_flops, one.forward_bytes), (one.backward_flops, one.backward_bytes)
