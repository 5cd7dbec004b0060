"""In: nothing. Out: the dataclasses of what is measured: an item on one rank, and the same item on all ranks.
Does not measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from codescent.measure.spread import Spread

PRODUCT, COPY, ELEMENTWISE, ATTENTION, LAUNCH = "product", "copy", "element-wise", "attention", "launch"
SUM, NORM, ACTIVATION = "sum", "norm", "activation"
OF_BLOCK: Mapping[str, int] = {SUM: 4, NORM: 2, ACTIVATION: 4}
"""How often a block of GPT-2 does each on a tensor of rows: two sums forward and two backward, an activation of four
times as many channels."""
TO_DEVICE, FROM_DEVICE = "to device", "from device"
HOST_COPY = "host copy"
CONTENTION, ALONE, BESIDE = "contention", "alone", "beside a collective"
WAITING, MEAN, SLOWEST, MET, WITHOUT_WORK = "waiting", "mean rank", "slowest rank", "with a collective", "collective"


@dataclass(frozen=True)
class Item:
    """What a rank has repeated.

    Attributes:
        kind: PRODUCT, COPY, ELEMENTWISE, ATTENTION, LAUNCH, TO_DEVICE, FROM_DEVICE, HOST_COPY, CONTENTION or WAITING;
            of a collective its name.
        name: a number format, an operator, or the link of a collective.
        sizes: of a product rows, columns, and the elements of each sum; else elements, or bytes of a payload.
        amount: FLOPs, or bytes that are read and written; 1 if neither is counted.
        seconds: of one repeat.
    """

    kind: str
    name: str
    sizes: tuple[int, ...]
    amount: float
    seconds: Spread

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Item:
        """Inverse of `to_json`."""
        return cls(**{**found, "sizes": tuple(found["sizes"]), "seconds": Spread(**found["seconds"])})


@dataclass(frozen=True)
class OfAllRanks:
    """An item, as all ranks measured it at the same time. `of_ranks`: the median seconds of each."""

    item: Item
    of_ranks: tuple[float, ...]

    @property
    def seconds(self) -> Spread:
        """Of a rank in the middle."""
        return self.item.seconds

    @property
    def rate(self) -> Spread:
        """FLOPs or bytes per second."""
        return self.seconds.per_second(self.item.amount)


def joined(ranks: Sequence[Sequence[Item]]) -> list[OfAllRanks]:
    """Items of ranks that measured the same ones in the same order."""
    found = []
    for same in zip(*ranks, strict=True):
        first = same[0]
        seconds = Spread.joined([one.seconds for one in same])
        one = Item(first.kind, first.name, first.sizes, first.amount, seconds)
        found.append(OfAllRanks(one, tuple(item.seconds.median for item in same)))
    return found


def of_kind(items: Sequence[OfAllRanks], kind: str, name: str | None = None) -> list[OfAllRanks]:
    """Those of a kind, and of a name where it is given."""
    return [one for one in items if one.item.kind == kind and name in (None, one.item.name)]
