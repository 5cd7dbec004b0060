"""In: which processes of a machine take part in a run from now on. Out: the same, as bytes; a rank that waits is told.
Does not decide it (launch/places.py does) and stores nothing (progress.py does)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ON_LOSS = "CODESCENT_ON_LOSS"
"""Variable of a rank that an agent has started: the survive.on_loss for which its script was written."""

AGAIN = "CODESCENT_AGAIN"
"""Set for ranks of a launcher that starts dead workers again, one by one, while the others go on."""

SURVIVES = "CODESCENT_SURVIVES"
"""Variable of a rank that its launcher calls again after a loss. It has the number of the first call that may name the
rank. Behind it is a page, if the process waits for a place: there it says that it is ready."""

INVITED = "CODESCENT_INVITED"
"""Variable of a process that waits for a place: a folder. It says that it is ready when this has a folder named by its
process id, or when a call names it. So a proof decides when a rank joins (launch/let_in.py)."""


@dataclass(frozen=True)
class Call:
    """The launcher calls the ranks together: after a loss, or because one more joins.

    Attributes:
        number: counts the calls of a launch, from 1. 0: the processes take part as they were started.
        places: the rank of each process of this machine that takes part, by process id. Others wait.
        values: keys of the config, by "section.key", that differ from those of the user: another layout.
        urgent: the number of the last call that was made because ranks had died: what was under way then is given up.
            At another call the ranks come at the end of a step.
        ranks: how many take part on all machines.
        notes: what the launcher has told the user of the layout; rank 0 records it.
    """

    number: int = 0
    places: Mapping[int, int] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    urgent: int = 0
    ranks: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_urgent(self) -> bool:
        """Whether ranks have died since the call before."""
        return 0 < self.urgent == self.number

    def to_bytes(self) -> bytes:
        """As text."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def of(cls, stored: bytes) -> Call | None:
        """From `to_bytes`; None: it is being written, or none has been."""
        try:
            data = json.loads(stored)
            places = {int(pid): int(rank) for pid, rank in data["places"].items()}
            return cls(**data | {"places": places, "notes": tuple(data["notes"])})
        except (ValueError, TypeError, LookupError, AttributeError):
            return None


class CalledAnew(Exception):
    """The launcher has called the ranks together once more, while this one looked for the others."""


_is_over: Callable[[bool], bool] | None = None  # of this process: whether there is a newer call than it follows
_waits_without_limit = False
_followed = 0  # the number of the call by which this process has its rank


def follow_calls(is_over: Callable[[bool], bool] | None) -> None:
    """From now on `raise_if_called` asks this function; None: nobody calls this process."""
    global _is_over
    _is_over = is_over


def raise_if_called(*, agreed: bool = False) -> None:
    """Raise CalledAnew if there is a newer call than this process follows. Who looks for other ranks asks often.

    `agreed`: it has agreed to a list of ranks, so only a loss calls it away: the others may have met by this list.
    """
    if _is_over is not None and _is_over(agreed):
        raise CalledAnew("the ranks are called together anew")


def take_rank_by(number: int) -> None:
    """This process has its rank by the call of this number."""
    global _followed
    _followed = number


def followed_call() -> int:
    """See `take_rank_by`. Ranks of one call meet; those of another one have other numbers."""
    return _followed


def wait_without_limit(whether: bool) -> None:
    """Whether this process joins ranks that take steps: they come to the meeting when their step has ended."""
    global _waits_without_limit
    _waits_without_limit = whether


def waits_without_limit() -> bool:
    """See `wait_without_limit`."""
    return _waits_without_limit
