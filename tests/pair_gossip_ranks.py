"""In: words of a run, seconds by rank. Out: a run of known speeds, or one whose last rank is asked to stop.
Does not assert anything (test_pair_gossip does) and starts no process (rank_server does)."""

from __future__ import annotations

import os
import signal

import layout_ranks
from rank_server import Place

from codescent.plan import Instruction
from codescent.train.execute import Executor


def paced(place: Place, words: list[str], seconds: list[float]) -> None:
    """A run in which forward and backward passes of a rank each take so many seconds longer."""
    if place.rank < len(seconds):
        layout_ranks.paced(seconds[place.rank])
    layout_ranks.run(place, words, resume=False)


def asked_to_stop(place: Place, words: list[str], updates: int) -> None:
    """A run whose last rank gets SIGTERM in its update of this number, of whichever step."""
    whole, seen = Executor._reduce, []

    def reduce(self: Executor, instruction: Instruction) -> None:
        seen.append(self.number)
        if len(seen) == updates:
            os.kill(os.getpid(), signal.SIGTERM)
        whole(self, instruction)

    if place.rank == place.ranks - 1:
        Executor._reduce = reduce  # type: ignore[method-assign]
    layout_ranks.run(place, words, resume=False)
