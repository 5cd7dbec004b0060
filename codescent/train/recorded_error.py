"""In: the error that ends a run on this rank. Out: the event "error" of the run folder, if no other rank writes it.
Does not print (the command does) and does not write events of memory that ran out (out_of_memory.py does)."""

from __future__ import annotations

from contextlib import suppress

from codescent.base.errors import RunFailed, UserError
from codescent.coupling.lost_peer import is_lost_peer
from codescent.record import RunFolder
from codescent.train.failed_allocation import is_out_of_memory
from codescent.train.hang_up import Regroup
from codescent.train.open import OpenRun


def record(error: BaseException, run: OpenRun) -> None:
    """Record an error that has no event of its own. Other ranks than rank 0 record what they have alone.

    Rank 0 may be unable to: under NCCL it waits for this rank until it is killed. An event is one appended line, so it
    needs no lock.
    """
    if isinstance(error, RunFailed | Regroup) or is_out_of_memory(error):
        return
    if run.folder is None and (getattr(error, "everywhere", False) or is_lost_peer(error)):
        return
    with suppress(UserError):  # the disk may be full, or the folder removed
        folder = run.folder or RunFolder.open(run.path)
        folder.event("error", problems=getattr(error, "problems", (repr(error),)), rank=run.world.this_rank.rank)
