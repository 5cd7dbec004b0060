"""In: an error that ends this rank, the store of all ranks. Out: one rank prints it; the others learn who failed first.
Does not end the process. It knows no error of torch, and no line of a script (own/failure.py does)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.rank import Rank
from codescent.meeting.agent_store import OpenAgent
from codescent.meeting.rendezvous import reach
from codescent.meeting.store import Store, StoreError

FIRST = "codescent_failed"
"""Key of the store under which the first rank that fails writes its rank and its error."""
SAID = "codescent_failed_said"
"""Key that this rank sets after it has printed its error."""
ENDED = "codescent_ended"
"""Key that a rank sets when it leaves the others."""
PATIENCE = timedelta(seconds=5)
"""How long a rank waits for the others, to learn whether one of them prints the same error."""
WAITED = "codescent_waited"
"""Key under which a rank that waited for the others in vain writes its line of the script."""
WAITED_S = timedelta(seconds=2)
"""How long a rank waits for the lines of the others. Their waits end with its own, or soon after."""


@dataclass(frozen=True)
class RankFailure:
    """An error that ends a rank.

    Attributes:
        rank: which one.
        error: kind and text of the error.
        who: pid, host and step, in words.
    """

    rank: int
    error: str
    who: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error} ({self.who})"


class Failures:
    """What this rank says of its error at the store, and hears of the others' errors.

    Args:
        this_rank: this process among several ranks.
        store: of the ranks; None: they are not connected. Then `refuse` looks for rank 0.
        open_agent: opens the store of torchrun's agent, if there is one.
    """

    def __init__(self, this_rank: Rank, store: Store | None, open_agent: OpenAgent) -> None:
        self._this_rank, self.store, self._open_agent = this_rank, store, open_agent

    def refuse(self, lines: Sequence[str], mine: RankFailure) -> None:
        """Print the lines of an error, unless another rank has printed the same."""
        marked = [f"rank {mine.rank}: {line}" for line in lines]
        try:
            self.store = self.store or reach(self._this_rank, PATIENCE, self._open_agent).store
            first = self._claim(self.store, mine)
        except (OSError, RuntimeError, UserError):  # rank 0 has ended, or cannot be reached
            return warn(*marked)
        if first == mine:
            warn(*lines)
        elif first.error != mine.error:
            warn(*marked)
            self._name_first(self.store, mine, first)
        self._part(self.store, first)

    def name_first(self, mine: RankFailure) -> bool:
        """Print which rank has failed first, and who had left before. Returns whether it is this one.

        Raises StoreError: the store has ended, and so has rank 0.
        """
        assert self.store is not None, "the ranks are connected"
        first = self._claim(self.store, mine)
        self._name_first(self.store, mine, first)
        return first == mine

    def waited(self, where: str) -> None:
        """This rank has waited for the others in vain. `where`: the line of its script."""
        if self.store is not None:
            with suppress(StoreError):  # rank 0, which serves the store, has ended
                self.store.set(f"{WAITED} {self._this_rank.rank}", where)

    def name_lines(self, *, is_first: bool) -> None:
        """If every rank has waited in vain, none has failed. Say where each waited, unless all did at one place."""
        assert self.store is not None, "the ranks are connected"
        keys = [f"{WAITED} {rank}" for rank in range(self._this_rank.world_size)]
        try:
            self.store.wait(keys, WAITED_S)
            if not is_first:  # rank 0 serves the store, and a launcher ends all ranks when one ends
                return self.store.wait([f"{WAITED} read"], WAITED_S)
            places = [place.decode() for place in self.store.multi_get(keys)]
        except StoreError:  # another rank has failed, or stands still: other messages name it
            return
        if len(set(places)) > 1:
            listed = ", ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
            warn(
                f"codescent: all ranks waited for each other: {listed}. Every rank must make the same calls, also of "
                "the module"
            )
        with suppress(StoreError):
            self.store.set(f"{WAITED} read", "")

    def leave(self) -> None:
        """From now on the others can see that this rank has left them."""
        if self.store is not None:
            with suppress(StoreError):  # rank 0, which serves the store, has left before
                self.store.set(f"{ENDED} {self._this_rank.rank}", "")

    def _claim(self, store: Store, mine: RankFailure) -> RankFailure:
        """The first failure of all ranks. It is `mine` if no rank has failed before."""
        return RankFailure(**json.loads(store.compare_set(FIRST, "", json.dumps(asdict(mine)))))

    def _name_first(self, store: Store, mine: RankFailure, first: RankFailure) -> None:
        left = self._left(store) if first == mine else []  # raises before anything is printed, if the store has ended
        ends = "" if first == mine else f"rank {mine.rank} ends because "
        warn(f"codescent: {ends}{first}")
        if left:
            warn(f"codescent: rank {', '.join(left)} had ended before: every rank must make the same calls")

    def _left(self, store: Store) -> list[str]:
        """The ranks that have left: this one may have waited for them."""
        return [str(rank) for rank in range(self._this_rank.world_size) if store.check([f"{ENDED} {rank}"])]

    def _part(self, store: Store, first: RankFailure) -> None:
        """Stay until the first rank has printed, because a launcher ends all ranks when one ends. Rank 0 serves the
        store: it stays until every rank knows whether to print."""
        others = [first.rank] if self._this_rank.rank else range(self._this_rank.world_size)
        with suppress(StoreError):  # a rank waits in a collective, or has ended
            store.set(f"{SAID} {self._this_rank.rank}", "")
            store.wait([f"{SAID} {rank}" for rank in others], PATIENCE)
