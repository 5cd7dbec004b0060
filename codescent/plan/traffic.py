"""In: what a strategy says it will send. Out: one record per collective of a step, with its bytes on the wire.
Does not send anything and knows no link's speed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from codescent.plan.schedule import Verb


class Collective(StrEnum):
    """Collectives by their MPI and NCCL names."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    SEND = "send"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    COPY = "copy"  # between a device and its host


@dataclass(frozen=True)
class Traffic:
    """One collective of a step: over which axis, how large, by which instruction, and what it may hide behind.

    `payload_bytes` is the size of the buffer that a rank hands in (for ALL_GATHER: the whole gathered buffer); where
    ranks have parts of different sizes, that of the fullest.
    `during` is the verb whose last instance it may overlap, or None where the ranks wait for it.
    `times`: how often in a step. `stage`: the pipeline stage whose ranks issue it; None: every stage.
    `devices`: with axis "" the data stays inside a rank: among so many devices, or (COPY) between device and host.
    """

    collective: Collective
    axis: str
    payload_bytes: int
    dtype: str
    verb: Verb
    during: Verb | None
    what: str
    times: int = 1
    stage: int | None = None
    devices: int = 1

    def wire_bytes(self, degree: int) -> float:
        """Bytes that one rank sends each time, in a ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69).

        All-reduce 2(n-1)/n S; reduce-scatter and all-gather (n-1)/n S; broadcast S from the root; a send S.
        """
        share = (degree - 1) / degree
        if self.collective is Collective.ALL_REDUCE:
            return 2 * share * self.payload_bytes
        if self.collective in (Collective.BROADCAST, Collective.SEND):
            return float(self.payload_bytes) if degree > 1 else 0.0
        return share * self.payload_bytes

    @property
    def inside_bytes(self) -> float:
        """Bytes that one rank moves each time between its devices, or between its device and the host.

        Between the first of n devices and the others: broadcast and reduce (n-1) S, scatter and gather (n-1)/n S.
        """
        if self.axis:
            return 0.0
        if self.collective is Collective.COPY:
            return float(self.payload_bytes)
        others = self.devices - 1
        if self.collective in (Collective.SCATTER, Collective.GATHER):
            return others / self.devices * self.payload_bytes
        return float(others * self.payload_bytes)
