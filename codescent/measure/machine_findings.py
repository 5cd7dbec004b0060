"""In: nothing. Out: `MachineFindings`: all that the ranks have found, on rank 0.
Does not find it (ranks.py does) and makes no cluster of it (constants.py does)."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.measure.items import OfAllRanks
from codescent.measure.placement import RankPlacement
from codescent.measure.spread import Spread


@dataclass(frozen=True)
class MachineFindings:
    """What was measured while all ranks were busy.

    Attributes:
        device: name of the device of each rank.
        kind: "cpu", or "cuda" for a GPU: its kernels.
        threads: of a rank.
        units: of a device, such as streaming multiprocessors; 0: it has none.
        memory_bytes: of a rank's device; on a CPU a rank's share of the host's memory.
        held_bytes: of a rank that has no tensor yet, in the middle of all.
        fragments: the share by which an allocator holds more than is in use, in the middle of all ranks.
        has_trained: these two are of short runs (trial_runs.py).
        start_s: from the start of a rank's process until all ranks had met; None: not known.
        placement: where the ranks are.
        items: all that was repeated.
        outliers: ranks that are slower than the others, in a sentence each.
        notes: what makes the numbers less good, in a sentence each.
        software: torch, and what computes bf16 products.
    """

    device: str
    kind: str
    threads: int
    units: int
    memory_bytes: int
    held_bytes: int
    fragments: float
    has_trained: bool
    start_s: Spread | None
    placement: RankPlacement
    items: tuple[OfAllRanks, ...]
    outliers: tuple[str, ...]
    notes: tuple[str, ...]
    software: str

    @property
    def where(self) -> str:
        """The machine, in words."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)} each" if self.kind == "cpu" else ""
        ranks, nodes = len(self.placement.hosts), self.placement.nodes
        return (
            f"{self.device}: {ranks} rank{'s' * (ranks > 1)} at once on {nodes} node{'s' * (nodes > 1)}{threads}, "
            f"{self.software}"
        )
