"""In: requests of ranks whose replicas average beside the computation. Out: their work, or why the run is over.
Does not average (pair_exchange.py does) and does not divide the work (work_queue.py does)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from codescent.base.errors import RunFailed
from codescent.coupling.failure_detector import FailureDetector, StallTimeout
from codescent.coupling.told import AMOUNT, FLAG, NUMBER, OBJECT, PORTION, SQUARE, Fields, Nonsense, check, up_to
from codescent.coupling.work_queue import WorkQueue
from codescent.servers import Portion

REPORT: Fields = {
    "portion": PORTION, "loss": NUMBER, "losses": AMOUNT, "square": SQUARE, "stop": FLAG, "skipped": FLAG,
    "staleness": NUMBER,
}  # fmt: skip
LOOK_S = 0.05
"""Seconds between two looks whether all ranks know that the run is over."""


class Coordinator:
    """Answers what ranks of asynchronous gossip ask rank 0. A fast rank computes more portions than a slow one.

    Args:
        workers: number of ranks, and of the portions of a step.
        first_step: number of complete steps when the command begins.
        timeout_s: how long a rank waits for an answer. Before that, all ranks hear of one that stands still.
        detector: whose connections have ended; None: a launcher sees ranks die, and ends the others.
    """

    def __init__(
        self, workers: int, first_step: int, timeout_s: float, detector: FailureDetector | None = None
    ) -> None:
        self.stalls, self.over = StallTimeout(timeout_s, "computed nothing"), ""
        self.timeout_s, self.detector = timeout_s, detector
        self.told: set[int] = set()  # ranks that know that the run is over
        self.workers, self.queue = workers, WorkQueue(workers, first_step)
        self.lock = threading.Lock()
        self.hosts: dict[int, str] = {}

    def begin(self, first: int, end: int) -> None:
        """A segment: the steps `first` to `end` - 1."""
        with self.lock:
            self.queue.begin(first, end)
            self.stalls.begin()

    def answer(self, sender: int, told: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a rank that asks for work, and says what it has computed; None: later.

        A request that arrives again is answered again, and counted once. A rank that only looks has no report: it waits
        for a neighbour, and asks whether that one has died.
        """
        with self.lock:
            if not self.over:
                self._check(sender, told)
            if self._has_lost():
                self.told.add(sender)
                return {"over": self.over}
            if told.get("looks"):
                return {}
            if report := told.get("report"):
                self._count(sender, report)
            return self._give(sender, told["known"])

    def _give(self, sender: int, known: int) -> dict[str, Any] | None:
        """The next portion, or that the segment is over. A replica has its weights, so it never waits for them."""
        queue = self.queue
        queue.weights_given(sender)
        portion = queue.take(sender)
        waits = portion is None and not queue.ends  # until the others have finished
        self.stalls.note(sender, known, waits=waits)
        if waits:
            return self._late(sender)
        return None if queue.is_known(known) else queue.facts(sender, known, portion)

    def _check(self, sender: int, told: Mapping[str, Any]) -> None:
        """Raise Nonsense: no rank of this run says this. The others hear of it first."""
        try:
            who = f"rank {sender} (on {self.hosts.get(sender, 'an unknown host')})"
            if "looks" in told:
                check(who, "a question", told, {"looks": FLAG})
                return
            known = {"known": up_to(self.queue.done, "the steps that are done")}
            check(who, "a question", told, known, {"report": OBJECT})
            if "report" in told:
                check(who, "a report", told["report"], REPORT)
        except Nonsense as error:
            self.over = self.over or str(error)
            raise

    def met(self, sender: int, host: str) -> None:
        """A rank connects. Raises Refused: it was taken for dead."""
        self.hosts[sender] = host
        if self.detector is not None:
            with self.lock:
                self.detector.met(sender, host)

    def left(self, sender: int, *, silent: bool) -> None:
        """The connection of a rank was lost."""
        if self.detector is not None:
            with self.lock:
                self.detector.left(sender, self.queue.position(sender), silent=silent)

    def wait_until_told(self) -> None:
        """The run is over, and this process ends. Wait until all ranks that live know why, for `timeout_s` at most."""
        end_s = time.monotonic() + self.timeout_s
        while time.monotonic() < end_s:
            with self.lock:
                dead = {} if self.detector is None else self.detector.deaths()
                if not set(range(self.workers)) - self.told - dead.keys():
                    return
            time.sleep(LOOK_S)

    def _has_lost(self) -> bool:
        """Whether the run is over, because a rank has died."""
        dead = {} if self.detector is None else self.detector.deaths()
        if dead and not self.over:
            assert self.detector is not None
            how = "; ".join(f"rank {worker} {self.detector.how(worker)}" for worker in sorted(dead))
            self.over = f"{how}, and its weights with it; `codescent train --resume` goes on from the last checkpoint"
        return bool(self.over)

    def _late(self, sender: int) -> dict[str, str] | None:
        """Why the run is over, if a rank that computes has stood still too long."""
        try:
            self.stalls.check(self.queue.held, range(self.workers))
        except RunFailed as error:
            self.over = str(error)
            self.told.add(sender)
        return {"over": self.over} if self.over else None

    def _count(self, sender: int, report: Mapping[str, Any]) -> None:
        """Count a portion that is computed: see `PairedReplicas._finish`."""
        portion, step = Portion(*report["portion"]), self.queue.step
        if not self.queue.holds(sender, portion):
            return  # counted when the same request came before
        self.queue.finish(sender, portion)
        step.count(report["staleness"], stop=report["stop"])
        if report["skipped"]:  # this update alone; the loss is the mean of the others
            step.skips += 1
            step.square = math.nan
            step.unsound.add(sender)
        else:
            step.loss += report["loss"]
            step.losses += report["losses"]
            step.square += report["square"] / self.workers
        if report["stop"]:
            self.queue.stop()
        self.queue.complete_step()
