"""In: what the ranks have found, the cluster that was made of it. Out: a short table for people, in 80 columns.
Does not compute a number (constants.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from codescent.base.amounts import of_bytes, of_seconds, of_share
from codescent.clusters.cluster import Cluster
from codescent.clusters.files import OWN
from codescent.clusters.link import Link
from codescent.cost.collective_time import INSIDE
from codescent.measure import constants
from codescent.measure.constants import flops, rate
from codescent.measure.host_rate import host_spread
from codescent.measure.items import ALONE, BESIDE, CONTENTION, COPY, LAUNCH, PRODUCT, WAITING, OfAllRanks, of_kind
from codescent.measure.machine_findings import MachineFindings
from codescent.measure.spread import Spread
from codescent.plan import Collective

Row = tuple[str, str, str]
"""What was measured, its median, and its 10 to 90 %."""


def summary(found: MachineFindings, cluster: Cluster) -> Iterator[str]:
    """The table, and below it which ranks are outliers, and what to know of the numbers."""
    rows = [("", "median", "10 to 90 %"), *_rows(found, cluster)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, spread in rows:
        yield f"{name:<{first}}  {value:>{second}}  {spread}".rstrip()
    yield from found.outliers
    yield from found.notes


def _rows(found: MachineFindings, cluster: Cluster) -> Iterator[Row]:
    if found.start_s is not None:
        yield _row("start of a rank", found.start_s, of_seconds)
    yield f"memory of {'a small run' if found.has_trained else 'an empty rank'}", of_bytes(found.held_bytes), ""
    yield from _products(found)
    largest = max(of_kind(found.items, COPY), key=lambda one: one.item.amount)
    yield _row(f"copies of {of_bytes(largest.item.sizes[0])}", largest.rate, rate)
    if host := host_spread(found):
        yield _row("copies in the host's memory", host, rate)
    launch = of_kind(found.items, LAUNCH)[0]
    yield _row("launch of an operator", launch.seconds.times(1.0 / launch.item.sizes[0]), of_seconds)
    own = cluster.software[OWN]
    yield _row("attention, beside products", constants.attention_share(found.items, cluster.device), of_share)
    yield "element-wise, beside copies", of_share(own.fused), "of their bytes"
    yield "allocator, beside what is in use", f"+{of_share(own.fragments)}", ""
    yield from _collectives(found)
    if beside := of_kind(found.items, CONTENTION, BESIDE):
        alone = of_kind(found.items, CONTENTION, ALONE)[0].seconds.median
        yield _row("products beside a collective", beside[0].seconds.times(1.0 / alone), "{:.2f} times".format)
    if of_kind(found.items, WAITING):
        yield "slowest rank, beside the mean", f"{own.imbalance:.2f} times", ""
    if own.collective_s:
        yield "a collective besides", of_seconds(own.collective_s), "waking up after a computation"
    for name, link in (("inside", cluster.inside), ("between", cluster.between), ("bus", cluster.bus)):
        source = cluster.sources[f"links.{name}"]
        yield f"link {name}", link_words(link), "" if source.startswith("measured") else source.partition(";")[0]


def _row(name: str, found: Spread, show: Callable[[float], str]) -> Row:
    return name, show(found.median), f"{show(found.low)} to {show(found.high)}"


def _products(found: MachineFindings) -> Iterator[Row]:
    """The smallest and the largest product of each number format, and from which sums on it is fast."""
    for name in dict.fromkeys(one.item.name for one in of_kind(found.items, PRODUCT)):
        products = of_kind(found.items, PRODUCT, name)
        by_size = sorted(products, key=lambda one: one.item.amount)
        for one in dict.fromkeys((by_size[0], by_size[-1])):
            yield _row(f"product {name} {'x'.join(map(str, one.item.sizes))}", one.rate, flops)
        half = constants.half_depth(found, name)
        if half is not None:
            yield f"half of the speed of {name} with", f"{half:,.0f}", "elements of a sum"


def _collectives(found: MachineFindings) -> Iterator[Row]:
    """The largest payload of each collective, and its latency."""
    for link in found.placement.links:
        for collective in Collective:
            items = of_kind(found.items, str(collective), link)
            if items:
                yield _payload(items[0], link)
                yield _payload(items[-1], link)


def _payload(one: OfAllRanks, link: str) -> Row:
    where = "" if link == INSIDE else f" {link}"
    return _row(f"{one.item.kind}{where} {of_bytes(one.item.amount)}", one.seconds, of_seconds)


def link_words(link: Link) -> str:
    """Bandwidth and latency, and whether there is a curve."""
    curve = ", curve" if link.curve else ""
    return f"{rate(link.bytes_per_s)}, {of_seconds(link.latency_s)}{curve}"
