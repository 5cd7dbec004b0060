"""In: nothing. Out: the dataclass Traffic: one collective of a step, with the bytes that one rank sends.
Does not send anything and does not know the speed of a link."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from codescent.plan.brief import brief
from codescent.plan.schedule import Verb


class Collective(StrEnum):
    """Collectives, with their MPI and NCCL names."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    SEND = "send"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"  # parts of different sizes: alltoallv in MPI
    PUSH = "push"  # from a worker to a parameter server
    PULL = "pull"  # from a parameter server to a worker
    COPY = "copy"  # between a device and its host


@dataclass(frozen=True)
class Traffic:
    """One collective of a step.

    Attributes:
        axis: the mesh axis of its group; "": inside one rank, between its devices, or (COPY) device and host.
        payload_bytes: input buffer of the largest rank. For ALL_GATHER: the whole gathered buffer.
        verb: the instruction that starts it; REDUCE: the instruction that waits for it.
        during: the instruction whose last instance it may overlap; None: the ranks wait for it.
        what: its purpose, in words.
        times: how often it runs in a step.
        stage: the pipeline stage whose ranks run it; None: every stage.
        devices: number of devices of one rank, with axis "".
        every: it runs once in so many steps.
        at: in which of these steps (from 0).
        since: the first step (from 0) in which it may run.
        until: the step before which it ends; None: it runs to the end.
        depths: the depths [first, end) to whose computation it belongs. Each has as many of `times`, but a bucket of
            gradients (REDUCE) is one for all of them. (0, 0): it belongs to none.
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
    every: int = brief(1)
    at: int = brief(0)
    since: int = brief(0)
    until: int | None = brief(None)
    depths: tuple[int, int] = brief((0, 0))

    @property
    def in_every_step(self) -> bool:
        """Whether it runs in every step of the run."""
        return self.every == 1 and self.since == 0 and self.until is None

    def runs_in(self, number: int) -> bool:
        """Whether it runs in step `number` (from 0)."""
        ends = self.until is not None and number >= self.until
        return number >= self.since and not ends and number % self.every == self.at

    def wire_bytes(self, degree: int) -> float:
        """Bytes that one rank sends each time, in a ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69).

        For n ranks and payload S: all-reduce 2(n-1)/n S; reduce-scatter, all-gather and all-to-all (n-1)/n S;
        broadcast (from the root) and send S.
        """
        share = (degree - 1) / degree
        if self.collective is Collective.ALL_REDUCE:
            return 2 * share * self.payload_bytes
        if self.collective in (Collective.PUSH, Collective.PULL):
            return float(self.payload_bytes)
        if self.collective in (Collective.BROADCAST, Collective.SEND):
            return float(self.payload_bytes) if degree > 1 else 0.0
        return share * self.payload_bytes

    @property
    def inside_bytes(self) -> float:
        """Bytes that one rank copies each time between its own devices, or between its device and the host.

        For n devices and payload S: broadcast and reduce (n-1) S; scatter and gather (n-1)/n S.
        """
        if self.axis:
            return 0.0
        if self.collective is Collective.COPY:
            return float(self.payload_bytes)
        others = self.devices - 1
        if self.collective in (Collective.SCATTER, Collective.GATHER):
            return others / self.devices * self.payload_bytes
        return float(others * self.payload_bytes)
