"""In: what the ranks have found. Out: the bandwidth of the memory of a node's host, which its devices share.
Does not copy (host.py does), and knows no update in that memory (cost/update_time.py does)."""

from __future__ import annotations

import statistics

from codescent.base.amounts import of_bytes
from codescent.measure.constants import MeasuredNumber, rate, spread_words
from codescent.measure.items import HOST_COPY, of_kind
from codescent.measure.machine_findings import MachineFindings
from codescent.measure.spread import Spread


def host_spread(found: MachineFindings) -> Spread | None:
    """Bytes that the host of a node reads and writes in a second for all of its ranks; None: the memory of a device is
    that of its host.

    The ranks of a node copied at the same time, so their rates add up. Of several nodes: of one in the middle.
    """
    copied = of_kind(found.items, HOST_COPY)
    if not copied:
        return None
    (one,), devices = copied, found.placement.devices
    rates = [one.item.amount / seconds for seconds in one.of_ranks]
    nodes = [sum(rates[first : first + devices]) for first in range(0, len(rates), devices)]
    return one.rate.times(statistics.median(nodes) / one.rate.median)


def host_bandwidth(found: MachineFindings) -> MeasuredNumber | None:
    """The number of a cluster file; None: see `host_spread`."""
    spread = host_spread(found)
    if spread is None:
        return None
    size, devices = of_kind(found.items, HOST_COPY)[0].item.sizes[0], found.placement.devices
    words = f"measured: copies of {of_bytes(size)} in the memory of the host, read and written, of {devices} ranks at "
    return MeasuredNumber(spread.median, f"{words}once, added up; {spread_words(spread, rate)}")
