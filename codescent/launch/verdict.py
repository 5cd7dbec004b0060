"""In: what the ranks of a host do while none moves. Out: who holds up the others, and the likely cause.
Does not look at processes (supervisor.py does) and prints nothing (verdict_words.py has the words)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from codescent.base.page import GroupUse, Page
from codescent.base.progress import ENDED, READING
from codescent.launch.stacks import StackFrame, waits_for_others

WITHOUT_GIL_S = 4.0
"""A heartbeat is written each second. If the process runs and the last one is older, nobody gets the GIL."""
BUSY = 0.7
"""A rank that uses so much of a processor is computing, or spins."""
NEVER_WAITS = "send"
SAME_SIZE = {"all_reduce", "broadcast"}
"""Collectives whose first buffer has one size on all ranks."""


@dataclass(frozen=True)
class RankState:
    """What is known of a rank.

    Attributes:
        pid: its process.
        page: its page.
        word: the state of its process (process_state.py).
        busy: processors that it has used since the look before.
        frames: of its main thread, innermost first; empty: unknown.
        since_s: seconds for which it has not moved.
        without_gil_s: seconds since its last heartbeat; 0: it has none.
    """

    pid: int
    page: Page
    word: str = ""
    busy: float = 0.0
    frames: tuple[StackFrame, ...] = ()
    since_s: float = 0.0
    without_gil_s: float = 0.0

    @property
    def is_halted(self) -> bool:
        """Whether the process cannot run at all."""
        return self.word in ("stopped", "frozen", "gone")

    @property
    def waits(self) -> bool:
        """Whether its stack says that it waits for other ranks."""
        return waits_for_others(list(self.frames)) and self.busy < BUSY


@dataclass(frozen=True)
class HangVerdict:
    """Why the ranks stand still.

    Attributes:
        cause: a word of CAUSES in verdict_words.py.
        culprits: the ranks that hold up the others; empty: none of this host does.
        missing: the collective to which a culprit has not come, and where the others are.
    """

    cause: str
    culprits: tuple[int, ...] = ()
    missing: Mapping[int, GroupUse] = field(default_factory=dict)


RankStates = Mapping[int, RankState]


def judge(ranks: RankStates, *, elsewhere: bool) -> HangVerdict | None:
    """The verdict; None: nobody waits for anybody, so the ranks only work for long.

    `elsewhere`: the run has ranks on other hosts, too.
    """
    living = {rank: seen for rank, seen in ranks.items() if seen.page.position != ENDED and not seen.page.died_s}
    missing = _missing(living)
    for cause, is_so in _STATES:
        if culprits := tuple(rank for rank, seen in living.items() if is_so(seen)):
            return HangVerdict(cause, culprits, {rank: use for rank, use in missing.items() if rank in culprits})
    waits = _waits(living)
    if found := _differing(living):
        return HangVerdict(found[0], found[1])
    awaited = {other for others in waits.values() for other in others}
    if sinks := tuple(sorted(awaited - waits.keys())):
        return HangVerdict(_of_one(sinks, living), sinks, {rank: missing[rank] for rank in sinks if rank in missing})
    if waits:
        return HangVerdict("order", tuple(sorted(awaited)), missing)
    return _by_stacks(living, elsewhere=elsewhere)


_STATES: tuple[tuple[str, Callable[[RankState], bool]], ...] = (
    ("stopped", lambda seen: seen.word == "stopped"),
    ("frozen", lambda seen: seen.word == "frozen"),
    ("gone", lambda seen: seen.word == "gone"),
    ("disk", lambda seen: seen.word == "disk wait"),
    ("gil", lambda seen: seen.without_gil_s > WITHOUT_GIL_S),
)


def _waits(ranks: RankStates) -> dict[int, set[int]]:
    """The ranks that each rank waits for: those that have not come to its last collective."""
    found: dict[int, set[int]] = {}
    for rank, seen in ranks.items():
        last = seen.page.last
        if last is None or last.kind == NEVER_WAITS:
            continue
        late = {other for other, use in _members(ranks, last).items() if use.number < last.number and other != rank}
        if late:
            found[rank] = late
    return found


def _members(ranks: RankStates, last: GroupUse) -> dict[int, GroupUse]:
    """The last collective of each rank of a group."""
    return {rank: use for rank, seen in ranks.items() for use in seen.page.groups if use.group == last.group}


def _missing(ranks: RankStates) -> dict[int, GroupUse]:
    """For each rank that is late in a group: the collective in which most others are."""
    found: dict[int, GroupUse] = {}
    for seen in ranks.values():
        last = seen.page.last
        if last is not None and last.kind != NEVER_WAITS:
            for rank, use in _members(ranks, last).items():
                if use.number < last.number and (rank not in found or found[rank].number < last.number):
                    found[rank] = last
    return found


def _differing(ranks: RankStates) -> tuple[str, tuple[int, ...]] | None:
    """Ranks whose collective of the same number is another one than that of most, or has another size."""
    for seen in ranks.values():
        last = seen.page.last
        if last is None:
            continue
        same = {
            rank: use
            for rank, use in _members(ranks, last).items()
            if use.number == last.number and ranks[rank].page.last == use
        }
        for cause, key in (("order", _kind), ("shapes", _size)):
            if odd := _odd({rank: key(use) for rank, use in same.items()}):
                return cause, odd
    return None


def _kind(use: GroupUse) -> object:
    return "message" if use.kind in (NEVER_WAITS, "receive") else use.kind


def _size(use: GroupUse) -> object:
    return use.size_bytes if use.kind in SAME_SIZE else 0


def _odd(values: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks whose value is not that of most; where no value has most, all of them; empty: all are equal."""
    counts = [*values.values()]
    if len(set(counts)) < 2:
        return ()
    most = max(counts, key=counts.count)
    if counts.count(most) * 2 <= len(counts):
        return tuple(sorted(values))
    return tuple(sorted(rank for rank, value in values.items() if value != most))


def _of_one(culprits: tuple[int, ...], ranks: RankStates) -> str:
    """The cause where these ranks have not come."""
    if all(ranks[rank].page.section == READING for rank in culprits):
        return "reader"
    if all(ranks[rank].waits for rank in culprits):
        return "order"  # each waits in a call that nobody counts
    return "first_alone" if culprits == (0,) else "alone"


def _by_stacks(ranks: RankStates, *, elsewhere: bool) -> HangVerdict | None:
    """The verdict where all have come to the same collectives, or none is counted."""
    if all(seen.page.section == READING for seen in ranks.values()) and ranks:
        return HangVerdict("reader", tuple(sorted(ranks)))
    waiting = {rank for rank, seen in ranks.items() if seen.waits}
    others = tuple(sorted(ranks.keys() - waiting))
    if not waiting or (others and any(not ranks[rank].frames for rank in others)):
        return None
    if others:
        return HangVerdict(_of_one(others, ranks), others)
    if elsewhere:
        return HangVerdict("elsewhere")
    stands = {(seen.page.position, seen.page.collectives) for seen in ranks.values()}
    return HangVerdict("network" if len(stands) == 1 or len(ranks) == 1 else "order", ())
