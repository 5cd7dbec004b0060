"""In: pulls, pushes and deaths of workers, in order. Out: which push is applied, and which pull or push has to wait.
Does not hold weights, and reads no clock: equal events in equal order give equal decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What the server does with a push."""

    APPLY = "apply"
    """Apply it now, then acknowledge it."""
    KNOWN = "known"
    """It is applied already. Acknowledge it again."""
    WAIT = "wait"
    """Ask again after another push or a death: now it would make an older computation too old."""
    REFUSED = "refused"
    """Too late: its grant is void, because the worker was released or the server restarted. The worker pulls anew."""


@dataclass(frozen=True)
class Decision:
    """A verdict. For `APPLY` the other fields are what a replay needs, in the order of the decisions.

    Without a valid grant `base` is not known; it is then equal to `version`.

    Attributes:
        verdict: what the server does.
        worker: who pushed.
        number: of the push; a worker counts its pushes from 1.
        base: version of the weights with which the worker computed.
        version: version of the weights to which the push is applied. `version - base` is the staleness.
        completes: with this push a version is complete: the server makes the optimizer's step.
    """

    verdict: Verdict
    worker: int
    number: int
    base: int
    version: int
    completes: bool = False


@dataclass(frozen=True)
class Grant:
    """A worker may compute with these weights.

    Attributes:
        version: of the weights.
        ticket: names the grant in the push. No other grant has it, also not of another life of the server.
    """

    version: int
    ticket: int


class Ledger:
    """What one server knows about its workers.

    A version is made of `together` pushes: their sum is one gradient, for one step of the optimizer. A pull is a grant:
    the worker will compute with the present version. The bound `staleness` holds for each push that is applied:
    `version - base <= staleness`. No push of a granted worker is refused. Instead, whoever runs ahead waits:

    * A pull waits if the new computation could be too old when all earlier grants have been pushed.
    * A push waits if it would make an older grant too old. It can be applied after the older ones.

    Both are one rule: the open grants, applied oldest first, must stay within the bound (earliest deadline first; Liu
    and Layland 1973, section 7). So the oldest push never waits, and there is no deadlock.

    This bounds what Ho et al. 2013 (stale synchronous parallel) bound, with versions instead of clocks of workers:
    staleness 0 with `together` = pushes per step is synchronous training. `staleness` None is asynchronous.
    With `together` > 1 and a positive staleness it is the n-softsync of Zhang et al. 2016 with a bound.

    Args:
        staleness: most versions between a worker's weights and those to which its push is applied. None: no bound.
        together: pushes that make one version.
        life: which start of the server this is: 0, or a number that no earlier start had, such as a random one.

    Raises:
        ValueError: `staleness` is below 0, or `together` below 1.
    """

    def __init__(self, staleness: int | None, together: int = 1, life: int = 0) -> None:
        if together < 1 or (staleness is not None and staleness < 0):
            raise ValueError(f"staleness {staleness}, together {together}: at least 0 and 1")
        self._staleness, self._together = staleness, together
        self._pushes = 0  # applied since the beginning
        self._ticket = life << 32
        self._last: dict[int, int] = {}  # number of the last push applied, by worker
        self._grants: dict[int, Grant] = {}  # by worker
        self._refused: dict[int, int] = {}

    @property
    def version(self) -> int:
        """The number of complete versions: the version of the weights."""
        return self._pushes // self._together

    @property
    def pending(self) -> int:
        """Pushes in the sum of the next version. Where it is 0, the weights alone are the server's state."""
        return self._pushes % self._together

    @property
    def granted(self) -> Mapping[int, Grant]:
        """The open grants, by worker."""
        return dict(self._grants)

    @property
    def refused(self) -> Mapping[int, int]:
        """How many pushes were refused, by worker."""
        return dict(self._refused)

    def join(self, worker: int) -> int:
        """Number of the last push applied of this worker. Its next push has a higher number, also after a restart."""
        return self._last.get(worker, 0)

    def pull(self, worker: int) -> Grant | None:
        """Grant the present version to a worker. A second pull replaces the first.

        Returns:
            None: the worker waits. Ask again after another push or a death.
        """
        others = len(self._grants) - (worker in self._grants)
        ahead = (self.pending + others) // self._together
        if self._staleness is not None and ahead > self._staleness:
            return None
        self._ticket += 1
        self._grants[worker] = Grant(self.version, self._ticket)
        return self._grants[worker]

    def push(self, worker: int, number: int, ticket: int) -> Decision:
        """Decide about a push. With `APPLY` it counts as applied: the caller applies it before anything else.

        Args:
            worker: who pushes.
            number: of the push, higher than that of the worker's pushes before.
            ticket: of the grant.
        """
        version, grant = self.version, self._grants.get(worker)
        if number <= self.join(worker):
            return Decision(Verdict.KNOWN, worker, number, version, version)
        if grant is None or grant.ticket != ticket:
            self._refused[worker] = self._refused.get(worker, 0) + 1
            return Decision(Verdict.REFUSED, worker, number, version, version)
        if not self._leaves_time(worker):
            return Decision(Verdict.WAIT, worker, number, grant.version, version)
        self._pushes += 1
        self._last[worker] = number
        del self._grants[worker]
        return Decision(Verdict.APPLY, worker, number, grant.version, version, completes=self.pending == 0)

    def close(self) -> bool:
        """Complete the version with the pushes that there are. Open grants are void: late pushes are refused.

        Returns:
            False: there is no push.
        """
        if not self.pending:
            return False
        self._pushes += self._together - self.pending
        self._grants.clear()
        return True

    def release(self, worker: int) -> None:
        """Take back a worker's grant: it has died, stands still too long, or has no work for these weights."""
        self._grants.pop(worker, None)

    def state(self) -> dict[str, Any]:
        """Everything but the grants, as JSON. Save it with the weights and, where `pending` is not 0, their sum."""
        return {
            "staleness": self._staleness,
            "together": self._together,
            "pushes": self._pushes,
            "last": {str(worker): number for worker, number in self._last.items()},
            "refused": {str(worker): count for worker, count in self._refused.items()},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], life: int) -> Ledger:
        """A ledger that goes on from a saved state. All grants are void: workers pull anew.

        Pushes that were applied after the state was saved are unknown, and their numbers are free again.

        Args:
            state: of `state`.
            life: a number that no earlier start of the server had, such as a random one below 2**31.
        """
        ledger = cls(state["staleness"], state["together"], life)
        ledger._pushes = state["pushes"]
        ledger._last = {int(worker): number for worker, number in state["last"].items()}
        ledger._refused = {int(worker): count for worker, count in state["refused"].items()}
        return ledger

    def _leaves_time(self, worker: int) -> bool:
        """Whether all other grants stay within the bound, if this worker's push is applied now."""
        if self._staleness is None:
            return True
        bases = sorted(grant.version for other, grant in self._grants.items() if other != worker)
        after = self._pushes + 1
        return all((after + i) // self._together - base <= self._staleness for i, base in enumerate(bases))
