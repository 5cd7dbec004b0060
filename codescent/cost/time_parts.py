"""In: nothing. Out: `TimeParts`: the seconds of a step, or of an instruction, by what takes them.
Does not compute them (stage_time.py does)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import add


@dataclass(frozen=True)
class TimeParts:
    """Seconds by what takes them. They sum to the whole.

    Attributes:
        products_s: products with matrices.
        attention_s: products inside of attention.
        moved_s: operators that only move memory: norms, activations, sums, look-ups.
        host_s: the device waits, because its host launches operators more slowly than they run.
        inside_s: ranks wait for messages inside of nodes.
        between_s: ranks wait for messages between nodes.
        bus_s: ranks wait for copies between device and host.
        update_s: the optimizer.
        data_s: ranks wait for their samples: what reading ahead does not hide, and the copy to the device.
        microbatch_s: what each micro-batch takes beside all that.
        step_s: what each step takes beside all that.
        bubble_s: pipeline stages wait for one another.
        imbalance_s: ranks wait for the slowest of them, which does the same work.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    moved_s: float = 0.0
    host_s: float = 0.0
    inside_s: float = 0.0
    between_s: float = 0.0
    bus_s: float = 0.0
    update_s: float = 0.0
    data_s: float = 0.0
    microbatch_s: float = 0.0
    step_s: float = 0.0
    bubble_s: float = 0.0
    imbalance_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return float(sum(vars(self).values()))

    @property
    def exposed_s(self) -> float:
        """Messages and copies that are waited for."""
        return self.inside_s + self.between_s + self.bus_s

    def __add__(self, other: TimeParts) -> TimeParts:
        return TimeParts(*map(add, vars(self).values(), vars(other).values()))

    def times(self, factor: float) -> TimeParts:
        """Each of them so many times."""
        return TimeParts(*[factor * each_s for each_s in vars(self).values()])

    def slower(self, factor: float) -> TimeParts:
        """On a device that takes so many times longer: what it computes, not what it sends."""
        computed = {name: factor * getattr(self, name) for name in COMPUTED}
        return replace(self, **computed)

    def waiting(self, imbalance: float) -> TimeParts:
        """Of a rank that waits for others: the slowest computes `imbalance` times as long as a rank in the mean."""
        computed_s = sum(getattr(self, name) for name in COMPUTED)
        return replace(self, imbalance_s=(imbalance - 1.0) * computed_s)


COMPUTED = ("products_s", "attention_s", "moved_s", "update_s")
"""What the device itself does."""
NAMES = tuple(field.name for field in fields(TimeParts))
