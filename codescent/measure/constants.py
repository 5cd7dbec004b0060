"""In: what the ranks have found. Out: the numbers of a cluster file, each with its spread and how it was measured.
Does not make the file (file.py does)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from codescent.base.amounts import of_bytes, of_rate, of_seconds, of_share
from codescent.clusters.cluster import ClusterDevice, Software
from codescent.clusters.link import Link
from codescent.cost.collective_time import BETWEEN
from codescent.cost.device_time import spent, utilization
from codescent.cost.operators import ATTENTION as ATTENTION_KIND
from codescent.cost.operators import Computed
from codescent.measure.fit import LinkFit, TimedCollective, fit, line
from codescent.measure.items import (
    ALONE,
    ATTENTION,
    BESIDE,
    CONTENTION,
    COPY,
    ELEMENTWISE,
    FROM_DEVICE,
    LAUNCH,
    MEAN,
    MET,
    OF_BLOCK,
    PRODUCT,
    SLOWEST,
    TO_DEVICE,
    WAITING,
    WITHOUT_WORK,
    Item,
    OfAllRanks,
    of_kind,
)
from codescent.measure.machine_findings import MachineFindings
from codescent.measure.spread import Spread
from codescent.plan import Collective

EXACT = Software(product_efficiency=1.0, attention_efficiency=1.0, memory_efficiency=1.0)
"""With it a price is that of peaks and bandwidth alone."""
ROUNDS = 8
SMALL_RUN, LARGE_RUN = (
    "a short run of a small GPT-2, less its tensors",
    "a short run of a larger GPT-2, beside its tensors",
)
EMPTY_RANK, TRIAL_STEP = "a rank without a tensor, when all ranks had met", "tensors made and let go of as in a step"


class MeasuredNumber(NamedTuple):
    """A number of a cluster file. `source`: how it was measured, with its spread."""

    value: float
    source: str


def spread_words(found: Spread, show: Callable[[float], str]) -> str:
    """The spread in a sentence. `show`: writes a number with its unit."""
    return f"median of {found.repeats}, 10 to 90 %: {show(found.low)} to {show(found.high)}"


def flops(number: float) -> str:
    """A rate of products."""
    return of_rate(number, "FLOP/s")


def rate(number: float) -> str:
    """A rate of bytes."""
    return of_rate(number, "B/s")


def peaks(found: MachineFindings) -> dict[str, MeasuredNumber]:
    """By number format: the speed that products without end would have, by the curve of the price.

    The price divides this speed by what sizes cost (`utilization`). So it is what the products of all sizes say, not
    the fastest one of them. The curve of a number format depends on the peaks of all: they are found in rounds.
    """
    names = list(dict.fromkeys(one.item.name for one in of_kind(found.items, PRODUCT)))
    products = {name: of_kind(found.items, PRODUCT, name) for name in names}
    best = {name: max(one.rate.median for one in some) for name, some in products.items()}
    constants = {name: MeasuredNumber(rate, "") for name, rate in best.items()}
    for _ in range(ROUNDS):
        device = device_of(found, constants)
        for name, some in products.items():
            shares = [utilization(device, device.peak(name), *one.item.sizes) for one in some]
            of_each = [one.rate.times(1.0 / share) for one, share in zip(some, shares, strict=True)]
            whole = Spread.joined(of_each)
            constants[name] = MeasuredNumber(whole.median, _of_products(of_each, whole, best[name]))
    return constants


def _of_products(of_each: Sequence[Spread], whole: Spread, best: float) -> str:
    """How the peak of a number format was measured."""
    deciles = statistics.quantiles((one.median / whole.median for one in of_each), n=10) if of_each[1:] else ()
    differs = f", sizes differ by {deciles[0]:.2f} to {deciles[-1]:.2f} times" if deciles else ""
    return (
        f"measured: {len(of_each)} products of matrices, each {spread_words(whole, flops)}{differs}; the fastest of "
        f"them {flops(best)}"
    )


def half_depth(found: MachineFindings, name: str) -> float | None:
    """Sums over so many elements reach half of the speed of products without end; None: too few products say so."""
    products = of_kind(found.items, PRODUCT, name)
    if len({one.item.sizes[-1] for one in products}) < 2:
        return None
    try:
        inverse = line([(1.0 / one.item.sizes[-1], 1.0 / one.rate.median) for one in products])
    except ValueError:
        return 0.0  # small ones are as fast as large ones
    return 1.0 / (inverse.latency_s * inverse.bytes_per_s) if inverse.latency_s else math.inf


def bandwidth(found: MachineFindings) -> MeasuredNumber:
    """Of the memory of a device: of the largest copy."""
    largest = max(of_kind(found.items, COPY), key=lambda one: one.item.amount)
    words = spread_words(largest.rate, rate)
    return MeasuredNumber(
        largest.rate.median, f"measured: copies of {of_bytes(largest.item.sizes[0])}, read and written, {words}"
    )


def device_of(found: MachineFindings, peaks_found: Mapping[str, MeasuredNumber]) -> ClusterDevice:
    """The device of a rank."""
    copied = of_kind(found.items, COPY)
    moved = bandwidth(found).value if copied else math.nan
    of_formats = {name: one.value for name, one in peaks_found.items()}
    return ClusterDevice(found.device, found.kind, found.memory_bytes, moved, of_formats, units=found.units)


def software_of(found: MachineFindings, device: ClusterDevice) -> dict[str, MeasuredNumber]:
    """The constants of codescent that were measured, by their names in `Software`."""
    launch = of_kind(found.items, LAUNCH)[0]
    each = launch.seconds.times(1.0 / launch.item.sizes[0])
    constants = {
        "product_efficiency": MeasuredNumber(1.0, "in the peaks: they are what products of many sizes reach"),
        "memory_efficiency": MeasuredNumber(1.0, "in the bandwidth, which copies have reached"),
        "inside_efficiency": MeasuredNumber(1.0, "in the link, which collectives have reached"),
        "between_efficiency": MeasuredNumber(1.0, "in the link, which collectives have reached"),
        "collective_s": MeasuredNumber(0.0, "in the latencies of the links"),
        "hop_s": MeasuredNumber(0.0, "in the latencies of the links"),
        "host_s": MeasuredNumber(each.median, f"measured: operators on one number, {spread_words(each, of_seconds)}"),
        "held_bytes": MeasuredNumber(
            float(found.held_bytes), f"measured: {SMALL_RUN if found.has_trained else EMPTY_RANK}"
        ),
        "fragments": MeasuredNumber(found.fragments, f"measured: {LARGE_RUN if found.has_trained else TRIAL_STEP}"),
        "attention_efficiency": attention_efficiency(found.items, device),
    }
    elementwise = of_kind(found.items, ELEMENTWISE)
    if elementwise and found.kind == "cpu":  # on CUDA a run compiles its blocks, and these operators are not compiled
        constants["fused"] = _fused(elementwise, device)
    if beside := of_kind(found.items, CONTENTION, BESIDE):
        alone = of_kind(found.items, CONTENTION, ALONE)[0].seconds
        ratio = beside[0].seconds.times(1.0 / alone.median)
        words = f"measured: products while an all-reduce runs, {spread_words(ratio, '{:.2f}'.format)}"
        constants["contention"] = MeasuredNumber(max(1.0, ratio.median), words)
    if of_kind(found.items, WAITING):
        constants |= waiting_constants(found.items, found.kind)
    return constants


def waiting_constants(items: Sequence[OfAllRanks], kind: str) -> dict[str, MeasuredNumber]:
    """How long ranks wait for the slowest, and on a CPU what a collective takes besides: threads sleep and wake up.

    On CUDA no host waits for a collective, so what was measured there has a wait that a run does not have.
    """
    mean, slowest, met, without_work = (
        of_kind(items, WAITING, name)[0].seconds for name in (MEAN, SLOWEST, MET, WITHOUT_WORK)
    )
    ratio = slowest.times(1.0 / mean.median)
    words = f"measured: the slowest rank beside the mean of all, {spread_words(ratio, '{:.2f}'.format)}"
    constants = {"imbalance": MeasuredNumber(max(1.0, ratio.median), words)}
    if kind == "cpu":
        more_s = max(0.0, met.median - slowest.median - without_work.median)
        words = f"measured: after {of_seconds(mean.median)} of products, beside the same collective without them"
        constants["collective_s"] = MeasuredNumber(more_s, words)
    return constants


def attention_share(items: Sequence[OfAllRanks], device: ClusterDevice) -> Spread:
    """The share of the speed of other products that attention reaches."""
    one = of_kind(items, ATTENTION)[0]
    return one.seconds.per_second(_attention_s(one.item, device, 1.0))


def _attention_s(item: Item, device: ClusterDevice, efficiency: float) -> float:
    """What a price says that this attention takes with such an efficiency."""
    samples, heads, positions, channels = item.sizes
    sizes = (samples, heads, positions, positions, channels)
    computed = Computed(1, "attn", ATTENTION_KIND, sizes, item.amount, 0.0, 0.0, 0.0)
    software = replace(EXACT, attention_efficiency=efficiency)
    return spent([computed], device, software, item.name, 1)[0].attention_s


def attention_efficiency(items: Sequence[OfAllRanks], device: ClusterDevice) -> MeasuredNumber:
    """The efficiency with which the price is what was measured.

    The seconds of the price grow in proportion to 1 / efficiency - 1. They grow by `strain` of the number format from
    an efficiency of 1 to one of a half.
    """
    share, item = attention_share(items, device), of_kind(items, ATTENTION)[0].item
    strain = _attention_s(item, device, 0.5) / _attention_s(item, device, 1.0) - 1.0
    value = 1.0 / max(1.0, 1.0 + (1.0 / share.median - 1.0) / strain)
    words = f"measured in {item.name}: {item.sizes[2]} positions, forward and backward, {spread_words(share, of_share)}"
    return MeasuredNumber(value, f"{words} of other products")


def _fused(elementwise: Sequence[OfAllRanks], device: ClusterDevice) -> MeasuredNumber:
    """Seconds of the operators of a block, against those of their bytes: more where arithmetic takes longer."""
    times = [OF_BLOCK[one.item.name] for one in elementwise]
    moved_s = sum(often * one.item.amount for often, one in zip(times, elementwise, strict=True))
    moved_s /= device.memory_bytes_per_s
    spreads = [one.seconds.times(often / moved_s) for often, one in zip(times, elementwise, strict=True)]
    found = Spread.summed(spreads)
    names = ", ".join(one.item.name for one in elementwise)
    words = f"measured: {names} of a block against copies, {spread_words(found, '{:.2f}'.format)}"
    return MeasuredNumber(found.median, words)


def of_link(found: MachineFindings, link: str) -> LinkFit | None:
    """The link that collectives have crossed; None: nothing was measured there, or sizes did not differ."""
    kinds = [str(one) for one in Collective]
    items = [one for one in found.items if one.item.kind in kinds and one.item.name == link]
    ranks = len(found.placement.members(link, 0))
    devices = 1 if link == BETWEEN else ranks
    measured = [
        TimedCollective(Collective(one.item.kind), one.item.sizes[0], ranks, devices, one.seconds.median)
        for one in items
    ]
    try:
        return fit(measured) if measured else None
    except ValueError:
        return None


def of_bus(found: MachineFindings) -> Link | None:
    """The link of a device to the memory of its host; None: it is the host's memory itself."""
    items = [*of_kind(found.items, TO_DEVICE), *of_kind(found.items, FROM_DEVICE)]
    return line([(one.item.amount, one.seconds.median) for one in items]) if items else None
