"""In: a plan, and which files of the data were known by notes of an earlier reading. Out: these files, read and hashed
again if data.verify says so, or if it costs little.
Does not hash (data/verified.py does) and does not compare (the dataset does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from codescent.base.agreement import together
from codescent.base.cores import available_cores
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.data import verified
from codescent.data.samples import AnyDataset
from codescent.plan import Plan
from codescent.train.world import World

SMALL_BYTES = 1 << 26
"""So many bytes are read again by every run: that takes no longer than its start."""
SHARE = 0.01
"""More is read again if that takes a smaller share of the run's time."""
READ_BYTES_PER_S = 2e8
"""Of a slow shared file system."""
FLOPS_PER_S_OF_CORE, FLOPS_PER_S_OF_DEVICE = 1e11, 1e15
"""More than a core or a GPU reaches: so the time of a run is not estimated too long."""


Verify = Literal["changed", "always"] | None


def verify_again(
    verify: Verify, plan: Plan, num_steps: int, dataset: AnyDataset, world: World, opened: Callable[[], AnyDataset]
) -> None:
    """Read the files again that only a note says are unchanged, on the first rank of each machine. Collective.

    Unless data.verify is "changed", what a step reads is compared with the checksums of the file's blocks, too. So data
    that is too large to be read twice is checked as it is read. Files without checksums get them by being read again,
    if they alone are small enough. Rank 0 says if neither is done.

    Args:
        verify: data.verify; None: auto.
        plan: of the run.
        num_steps: of the run.
        dataset: open on this rank.
        world: of this rank.
        opened: opens the dataset anew.

    Raises:
        UserError: on every rank: a file has changed although size and times are the same.
    """
    verified.compare_reads(verify != "changed")
    if verify == "changed":
        return
    kinds = verified.relied_on, verified.unsummed
    reads = (
        world.this_rank.rank == 0 or world.this_rank.rank in world.leaders
    )  # the others have the hashes of these ranks
    known = together(UserError, lambda: [sum(files().values()) for files in kinds] if reads else [0, 0])
    sizes = [max(of_ranks) for of_ranks in zip(*known, strict=True)]
    most_bytes = math.inf if verify else _most_bytes(plan, num_steps, world)
    again = next((files for files, size_bytes in zip(kinds, sizes, strict=True) if 0 < size_bytes <= most_bytes), None)
    if again is not None:
        world.in_turn(lambda: _read_again(again(), dataset, opened) if reads else None, "verified")
    elif (unsummed := sizes[1]) and world.is_first:
        warn(f'{verified.unnoticed(unsummed)}; data.verify = "always" reads them')


def _read_again(files: Collection[Path], dataset: AnyDataset, opened: Callable[[], AnyDataset]) -> None:
    with verified.without_notes(files):
        again = opened()
    if again.fingerprint != dataset.fingerprint:
        raise UserError(
            f"{dataset.path}: changed on the disk, although size and times are the same: other bytes than at the last "
            "reading; restore the file"
        )


def _most_bytes(plan: Plan, num_steps: int, world: World) -> float:
    """The bytes whose reading takes SHARE of the run's time at most, by a time that the run surely takes."""
    of_rank = FLOPS_PER_S_OF_DEVICE
    if world.device.type == "cpu":
        of_rank = FLOPS_PER_S_OF_CORE * available_cores()
    seconds = plan.flops().total_flops * num_steps / (of_rank * world.this_rank.world_size)
    return max(SMALL_BYTES, SHARE * seconds * READ_BYTES_PER_S)
