"""In: nothing. Out: the dataclasses of what simulated ranks have done: seconds, waiting, bytes, staleness, a timeline.
Does not simulate (ranks_walk.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codescent.cost.doing import Activity
from codescent.cost.simulate import SimulatedMessage, Span


@dataclass(frozen=True)
class RankMeans:
    """A rank in a step: means over the measured rounds.

    Attributes:
        step_s: seconds of a step.
        busy_s: seconds of arithmetic.
        sent_bytes: bytes that it sends, by the ring algorithms.
        worst_bytes: in the step in which it sends most.
        coding_s: seconds in which its processor encodes, decodes, adds and copies what is exchanged.
    """

    step_s: float
    busy_s: float
    sent_bytes: float
    worst_bytes: float
    coding_s: float = 0.0

    @property
    def waits_s(self) -> float:
        """Exposed waiting: seconds of a step without arithmetic. Coding may be a part of it."""
        return max(0.0, self.step_s - self.busy_s)


def mean_step_s(ranks: Sequence[RankMeans]) -> float:
    """Seconds of a step of all ranks: the inverse of their mean rate, because the speeds of ranks add up, not their
    seconds. A rank that took no step adds no speed. 0: none took one."""
    rate = sum(1 / rank.step_s if rank.step_s else 0.0 for rank in ranks) / len(ranks)
    return 1 / rate if rate else 0.0


@dataclass(frozen=True)
class Walk:
    """What the ranks did.

    Attributes:
        step_s: seconds of a step of all ranks: see `mean_step_s`.
        tokens_per_s: of all ranks together.
        ranks: by rank.
        servers: for each server the share of the time in which its busiest card receives or sends, whichever is longer:
            the card of its host, or its own inside the host.
        staleness: for each applied push, by how many versions its weights were older; with asynchronous gossip for each
            update, by how many averages.
        timeline: the instructions of the measured rounds, with `Span.stage` the rank; times from their begin.
        flights: what was sent in them, with `SimulatedMessage.stage` the rank that sends; a ring's message for each of
            its ranks.
        activities: for what each rank waited in them, and what each server did.
    """

    step_s: float
    tokens_per_s: float
    ranks: tuple[RankMeans, ...]
    servers: tuple[float, ...] = ()
    staleness: tuple[int, ...] = ()
    timeline: tuple[Span, ...] = ()
    flights: tuple[SimulatedMessage, ...] = ()
    activities: tuple[Activity, ...] = ()

    @property
    def computes(self) -> float:
        """The share of the time in which the busiest rank computes. A rank that took no step does not count."""
        return max((rank.busy_s / rank.step_s for rank in self.ranks if rank.step_s), default=1.0)
