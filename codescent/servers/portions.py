"""In: workers that ask for work, finish it or die, in order. Out: numbered portions of work, each done exactly once.
Does not know the samples of a portion: (seed, step, part) decide them, whoever computes it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Portion:
    """A part of the samples of a step: part `part` of `Portions.parts`."""

    step: int
    part: int


class Portions:
    """Gives out the portions of steps `first` to `end - 1` in order, each of `parts` equal parts.

    A worker holds one portion at a time. It takes a portion after it has pulled weights, never before. A live worker
    that held a portion of the next step could not take that of a dead one. The version would never be complete.
    Portions of the dead are given first. A step lies in one epoch, so each sample is used once an epoch.

    With `own` worker w gets part w of each step. It gets another part only if the worker of that part has left. So the
    residuals of lossy pushes do not depend on who is first.

    With a `period` a portion has part `part` of so many steps, of which `step` is the first.

    Raises:
        ValueError: there is no part, `end` is below `first`, or one of them is not at the end of a period.
    """

    def __init__(self, parts: int, first: int, end: int, *, own: bool = False, period: int = 1) -> None:
        if parts < 1 or not 0 <= first <= end or period < 1 or first % period or end % period:
            raise ValueError(f"{parts} parts of steps {first} to {end}, by {period}")
        self._parts, self._period, self._end, self._own = parts, period, end // period * parts, own
        self._next = first // period * parts  # portions have one running number: step / period * parts + part
        self._first = self._next
        self._back: list[int] = []  # sorted: given out, and given back; with `own` also those of the present step
        self._held: dict[int, int] = {}  # by worker
        self._ready: set[int] = set()  # workers that have weights
        self._left: set[int] = set()

    @property
    def parts(self) -> int:
        """Portions of a step."""
        return self._parts

    @property
    def end(self) -> int:
        """The step before which the portions end."""
        return self._end // self._parts * self._period

    def end_after_given(self) -> int:
        """End with the last step of which a portion was given out. Returns the step before which the portions end.

        If none was, it is the first step: workers know the step before it, and wait for something new.
        """
        given = max(self._next, self._first + 1)
        self._end = min(self._end, -(-given // self._parts) * self._parts)
        return self.end

    @property
    def finished(self) -> bool:
        """Whether all portions are done."""
        return self._next == self._end and not self._back and not self._held

    @property
    def held(self) -> Mapping[int, Portion]:
        """The portions being computed, by worker."""
        return {worker: self._portion(number) for worker, number in self._held.items()}

    @property
    def done_before(self) -> int:
        """The first step of which a portion is not done."""
        return min([self._next, *self._back[:1], *self._held.values()]) // self._parts * self._period

    def weights_given(self, worker: int) -> None:
        """The worker has pulled weights: from now on it may take portions."""
        self._ready.add(worker)
        self._left.discard(worker)

    def returned(self, worker: int) -> None:
        """The worker is there again: with `own` nobody else takes its parts of later steps."""
        self._left.discard(worker)

    def offers(self, worker: int) -> bool:
        """Whether `take` has a portion for this worker, as soon as it has weights."""
        return worker in self._held or self._choice(worker) is not None

    def is_ready(self, worker: int) -> bool:
        """Whether the worker has pulled weights since it came, so that it may take a portion."""
        return worker in self._ready

    def take(self, worker: int) -> Portion | None:
        """A portion for a worker; the same one again until it is done.

        Returns:
            None if all portions are given out. Then either all work is finished, or a portion may come back.

        Raises:
            LookupError: the worker has no weights yet.
        """
        if worker not in self._ready:
            raise LookupError(f"worker {worker} asks for work before it has pulled weights")
        if worker not in self._held:
            if (number := self._choice(worker)) is None:
                return None
            if number == self._next:
                self._next += 1
            else:
                self._back.remove(number)
            self._held[worker] = number
        return self._portion(self._held[worker])

    def _choice(self, worker: int) -> int | None:
        """The number of the portion that a worker without one would take. With `own` the step begins for all at once:
        its portions are in `_back`."""
        if not self._own:
            return self._back[0] if self._back else self._next if self._next < self._end else None
        if not self._back and not self._held and self._next < self._end:
            self._back = list(range(self._next, self._next + self._parts))
            self._next += self._parts
        owners = {worker, *self._left}
        return next((number for number in self._back if number % self._parts in owners), None)

    def holds(self, worker: int, portion: Portion) -> bool:
        """Whether this portion is this worker's. Ask it before a push is applied: a late one's may be another's now."""
        return self._held.get(worker) == portion.step // self._period * self._parts + portion.part

    def done(self, worker: int, portion: Portion) -> None:
        """The push of a portion is applied: it will not be given again.

        Raises:
            LookupError: the worker does not hold it. Then its push should not have been applied.
        """
        if not self.holds(worker, portion):
            raise LookupError(f"worker {worker} does not hold {portion}")
        del self._held[worker]

    def drop_open(self) -> list[Portion]:
        """Give up what is not done of all that was begun: those portions will not be given again. Returns them."""
        dropped = sorted([*self._back, *self._held.values()])
        self._back, self._held = [], {}
        self._ready.clear()  # weights that were pulled for these portions are old now
        return [self._portion(number) for number in dropped]

    def leave(self, worker: int) -> None:
        """The worker has died or stands still too long. What it holds is given again; it needs weights before work."""
        if worker in self._held:
            bisect.insort(self._back, self._held.pop(worker))
        self._ready.discard(worker)
        self._left.add(worker)

    def state(self) -> dict[str, Any]:
        """The portions that are not done, as JSON. Save it together with the weights and the ledger."""
        undone = sorted([*self._back, *self._held.values()])
        facts = {"parts": self._parts, "next": self._next, "end": self._end, "undone": undone, "own": self._own}
        return {**facts, "period": self._period}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Portions:
        """Goes on from a saved state. No worker holds a portion, and each needs weights before work."""
        portions = cls(state["parts"], 0, 0, own=state["own"], period=state["period"])
        portions._next, portions._end, portions._back = state["next"], state["end"], sorted(state["undone"])
        return portions

    def _portion(self, number: int) -> Portion:
        step, part = divmod(number, self._parts)
        return Portion(step * self._period, part)
