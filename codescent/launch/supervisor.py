"""In: process ids and pages of the ranks of this host. Out: ranks that are suspended; the verdict, if none moves.
Does not end a rank (local.py and supervise.py do) and sends no message to ranks: a rank that hangs cannot answer."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from codescent.base.page import Page
from codescent.base.progress import ENDED, Pages
from codescent.launch.deadlines import Deadlines
from codescent.launch.hang_record import HangRecord
from codescent.launch.link_watch import LinkWatch
from codescent.launch.other_hosts import OtherHosts
from codescent.launch.process_state import ProcessState, halted_by, state_of
from codescent.launch.slow_links import SlowLink
from codescent.launch.stacks import Stacks, main_thread
from codescent.launch.stragglers import SlowRank, Stragglers
from codescent.launch.verdict import HangVerdict, RankState, judge
from codescent.launch.verdict_words import doing, one_page, whole

PAUSE_S = 3.0
"""If this process has not looked for so long, it was stopped, perhaps with its ranks. Then nothing follows from it.
It is less than WITHOUT_GIL_S: ranks that were stopped with it wrote no heartbeat either."""


@dataclass(frozen=True)
class Stopped:
    """How long the others wait for a rank that is stopped or frozen.

    Attributes:
        ends_s: then it is ended (parallel.stopped_s); None: it is not.
        timeout_s: of their collectives (parallel.timeout_s); None: unknown here.
    """

    ends_s: float | None = None
    timeout_s: float | None = None

    def __str__(self) -> str:
        if self.ends_s is not None:
            return f"for {self.ends_s:g} s (parallel.stopped_s), then it is ended"
        most = "parallel.timeout_s" if self.timeout_s is None else f"{self.timeout_s:g} s (parallel.timeout_s)"
        return f"for {most}, then the run ends; with parallel.stopped_s=SECONDS it would end earlier"


class Supervisor:
    """Watches the ranks of this host, from the process that has started them (decision 36).

    Args:
        pages: what each rank does.
        ranks: number of ranks of the run.
        stopped: how long the others wait for one that cannot run.
        stacks: asks ranks for their stacks; None: nobody can.
        record: where verdicts are written; None: nowhere.
        others: the supervisors of other hosts; None: there are none.
        is_whole: whether all ranks of the run are on this host.
    """

    def __init__(
        self,
        pages: Pages,
        ranks: int,
        stopped: Stopped = Stopped(),
        stacks: Stacks | None = None,
        record: HangRecord | None = None,
        others: OtherHosts | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        self.pages, self.ranks, self._stopped = pages, ranks, stopped
        self._stacks, self._record, self._is_whole = stacks, record, is_whole
        self._since_s: dict[int, float] = {}  # when each rank of `stuck` was found so
        self.stuck: dict[int, str] = {}
        """Ranks that cannot run now, with the reason in words."""
        self.deadlines = Deadlines(stopped.timeout_s)
        self._stragglers, self._said_slow = Stragglers(), ""
        self._states: dict[int, ProcessState] = {}
        self._looked_s = self._left_s = time.monotonic()  # when the last look began, and when it ended
        self._moved: dict[int, tuple[object, ...]] = {}
        self._moved_s: dict[int, float] = {}  # when each rank was last seen to move
        self._wanted_s = 0.0  # stand still so long before the stacks are asked for again
        self._others = others or OtherHosts(pages, {})
        self._links = None if is_whole else LinkWatch(self._others, ranks)
        self._asked: tuple[Mapping[int, RankState], Mapping[int, str]] | None = None  # while other hosts are asked
        self._hangs_s = 0.0  # since when no rank moves, if a verdict was given

    def begin_anew(self, ranks: int) -> None:
        """Others take part, so many, and all begin anew: what was seen of ranks says nothing of the next ones."""
        self.ranks, self._stragglers, self.stuck = ranks, Stragglers(), {}
        self._moved, self._asked, self._states = {}, None, {}
        self._moved_s = dict.fromkeys(range(ranks), time.monotonic())
        if self._links is not None:
            self._links.begin_anew(ranks)

    def look(self, running: Mapping[int, int]) -> list[str]:
        """Sentences on changes since the last call. `running`: process id of each rank that has not ended."""
        halted = {rank: how for rank, pid in running.items() if (how := halted_by(pid))}
        said = [
            f"rank {rank} of {self.ranks} (pid {running[rank]}) {how}: the others wait for it {self._stopped}"
            for rank, how in halted.items()
            if rank not in self.stuck
        ]
        said += [
            f"rank {rank} of {self.ranks} continues" for rank in self.stuck if rank in running and rank not in halted
        ]
        self.stuck = halted
        now_s = time.monotonic()
        before = {} if now_s - self._left_s > PAUSE_S else self._since_s
        self._since_s = {rank: before.get(rank, now_s) for rank in halted}
        if self._record is not None:
            self._record.look()
        said += self._hang(running, now_s)
        self._left_s = time.monotonic()  # a disk that does not answer may have kept this look: that is no pause
        return said

    def overdue(self) -> list[int]:
        """The ranks that could not run for so long that they are to be ended. Each is named once."""
        if self._stopped.ends_s is None:
            return []
        latest_s = time.monotonic() - self._stopped.ends_s
        found = [rank for rank, since_s in self._since_s.items() if since_s <= latest_s]
        self._since_s |= dict.fromkeys(found, math.inf)  # a frozen process ends when it continues, not now
        return found

    def ended_early(self, rank: int) -> bool:
        """Whether a rank with exit code 0 ended after it began to train and before its training returned."""
        return 0 < self.pages.read(rank).position < ENDED

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's training has returned: after the last step, or after a stop that was requested."""
        return self.pages.read(rank).position == ENDED

    def meets(self, rank: int) -> bool:
        """Whether a rank is in collectives with all others, between two segments of work that is given out."""
        return self.pages.read(rank).meets > 0

    def record_crash(self, rank: int, pid: int, ending: str, step: int | None, of_host: str | None = None) -> None:
        """Record a rank that has died, as an event of the run. `ending`: how, in words. `of_host`: None: this one."""
        if self._record is not None:
            where = {"host": of_host or host(), "process": pid}
            self._record.event("crash", rank=rank, **where, step=step, ending=ending)

    def _hang(self, running: Mapping[int, int], now_s: float) -> list[str]:
        """The page of a verdict, if no rank has moved for longer than each may."""
        pages = {rank: self.pages.read(rank) for rank in running}
        self.deadlines.learn(pages, now_s)
        states = {rank: state_of(pid) for rank, pid in running.items()}
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        busy = {rank: _busy(self._states.get(rank), state, gap_s) for rank, state in states.items()}
        self._states = states
        slow = self._slow(pages, now_s, running)
        moved = {rank: page.moved for rank, page in pages.items()}
        for rank in moved:  # one that failed before the first look at it is not among `changed`
            self._moved_s.setdefault(rank, now_s)
        if now_s - self._left_s > PAUSE_S:  # this process was stopped itself
            self._moved_s = dict.fromkeys(self._moved_s, now_s)
        changed = {rank for rank in moved if moved[rank] != self._moved.get(rank) and not pages[rank].failed_s}
        if changed:  # that a rank has ended, or ends by an error, is no progress
            self._moved, self._wanted_s = moved, 0.0
            if self._asked is not None or self._hangs_s:
                self._asked = None
                self._withdraw(moved)
            self._moved_s = {rank: now_s if rank in changed else self._moved_s[rank] for rank in moved}
            return [*slow, *self._goes_on(now_s)]
        since_s = now_s - max(self._moved_s.values(), default=now_s)
        if self._asked is not None:
            return [*slow, *([] if self._others.waits else self._judged(*self._asked))]
        waiting = [page for page in pages.values() if page.position != ENDED and not page.died_s]
        deadline_s = max([self.deadlines.of(page) for page in waiting], default=math.inf)
        if self._hangs_s or since_s < max(deadline_s, self._wanted_s):
            return slow
        able = {rank: pid for rank, pid in running.items() if rank not in self.stuck}
        stacks = {} if self._stacks is None else self._stacks.ask(able)
        seen = {
            rank: RankState(
                running[rank],
                page,
                states[rank].word,
                busy[rank],
                tuple(main_thread(stacks.get(rank, ""))),
                now_s - self._moved_s[rank],
                now_s - page.beat_s if page.beat_s else 0.0,
                host(),
            )
            for rank, page in pages.items()
        }
        if self._is_whole or not self.pages.hub:
            return [*slow, *self._judged(seen, stacks)]
        self._others.ask(seen)
        self._asked = seen, stacks
        return slow

    def _judged(self, own: Mapping[int, RankState], stacks: Mapping[int, str]) -> list[str]:
        """The page of a verdict on these ranks, and on those of other hosts that have answered."""
        self._asked = None
        seen = {**own, **self._others.found}
        verdict = judge(seen, elsewhere=not self._is_whole and len(seen) < self.ranks)
        since_s = min(state.since_s for state in own.values())
        if verdict is None:  # they work: ask again when it has lasted twice as long
            self._wanted_s = 2 * since_s
            self._withdraw(own)
            return []
        self._hangs_s = time.monotonic() - since_s
        if 0 in seen and 0 not in own and len(seen) == self.ranks:
            return [f"no rank of {host()} has moved for {since_s:.0f} s: {seen[0].host}, which has rank 0, says why"]
        return self._told(verdict, dict(sorted(seen.items())), stacks)

    def _withdraw(self, own: Mapping[int, object]) -> None:
        if not self._is_whole and self.pages.hub:
            self._others.withdraw(own)

    def _slow(self, pages: Mapping[int, Page], now_s: float, running: Mapping[int, int]) -> list[str]:
        """Sentences on a rank, or a link, that has become slower than the others. The step lines name it, too."""
        rank = self._stragglers.look(pages, now_s)
        link = None if self._links is None else self._links.look(pages, running, now_s)
        words = str(self._stragglers.current or (self._links and self._links.current) or "")
        if words != self._said_slow:
            self.pages.slowest = self._said_slow = words
        said = []
        if rank is not None:
            self._record_slow(rank, host(), rank.part, pages)
            who = f"rank {rank.rank} of {self.ranks} (pid {running[rank.rank]} on {host()})"
            times_s = f"{rank.own_s:.3g} s a step, the others {rank.others_s:.3g} s"
            said.append(f"{who} is {rank.factor:.1f} times slower than the others: its {rank.part} takes {times_s}")
        if link is not None:
            self._record_slow(link, link.hosts[0], "network", pages, hosts=link.hosts, addresses=link.addresses)
            times_s = f"{link.own_s:.3g} s a step, over the others {link.others_s:.3g} s"
            who = f"{link.who} (rank {link.rank} of {self.ranks})"
            said.append(f"{who} is {link.factor:.1f} times slower than the others: its bytes take {times_s}")
        return said

    def _record_slow(
        self, slow: SlowRank | SlowLink, where: str, part: str, pages: Mapping[int, Page], **more: object
    ) -> None:
        if self._record is not None:
            times = {
                "factor": round(slow.factor, 2),
                "own_s": round(slow.own_s, 6),
                "others_s": round(slow.others_s, 6),
            }
            step = max((page.step or 0 for page in pages.values()), default=0)
            self._record.event("straggler", rank=slow.rank, host=where, part=part, **times, **more, step=step)

    def _told(self, verdict: HangVerdict, seen: Mapping[int, RankState], stacks: Mapping[int, str]) -> list[str]:
        """Record a verdict. Returns its page."""
        record = self._record
        lines = one_page(verdict, seen, self.ranks, record.carries if record is not None else lambda use: "")
        if record is None:
            return lines
        fields = {"cause": verdict.cause, "ranks": list(verdict.culprits), "host": host()}
        positions = {str(rank): one.page.step for rank, one in seen.items()}
        event = {"kind": "hang", **fields, "steps": positions, "problems": lines}
        path = record.write(whole(lines, stacks, datetime.now(UTC).isoformat(timespec="seconds")), event)
        return [*lines, *([] if path is None else [f"  all stacks: {path}"])]

    def _goes_on(self, now_s: float) -> list[str]:
        """A sentence, if the ranks stood still before."""
        if not self._hangs_s:
            return []
        seconds, self._hangs_s = now_s - self._hangs_s, 0.0
        if self._record is not None:
            self._record.event("hang_over", seconds=round(seconds, 1))
        return [f"the ranks go on after {seconds:.0f} s"]


def host() -> str:
    """The name of this host."""
    return socket.gethostname()


def where_of(page: Page) -> str:
    """Where a rank was, as a part of a sentence."""
    if not 0 < page.position < ENDED:
        return "before its first step" if page.position == 0 else "after its last step"
    return f"in step {page.step}, in {doing(page)}"


def _busy(before: ProcessState | None, now: ProcessState, seconds: float) -> float:
    """The processors that a process has used since the last look."""
    return 0.0 if before is None or seconds <= 0 else (now.cpu_s - before.cpu_s) / seconds
