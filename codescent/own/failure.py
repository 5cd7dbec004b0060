"""In: an exception that ends this rank. Out: lines on standard error: whose error it is; a wrong argument, told once.
Does not end the other ranks: they end when the connections of this rank close, or with the same error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, ClassVar

from torch.distributed import Store  # type: ignore[attr-defined]

from codescent.base import cause, output
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.launch import environment
from codescent.launch.once import all_said, say_once
from codescent.own.explained import explained
from codescent.own.steps import most_steps
from codescent.train.addresses import is_local
from codescent.train.rendezvous import reach, report_failure, tell_those_who_wait
from codescent.train.silent import is_lost_peer

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
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "scatter")
"""How the names of functions begin that wait for other ranks."""
ALIKE_S = 2.0
"""Seconds in which all ranks of this machine find the same error. Otherwise those that wait for this one are told."""
NOT_THE_USERS = ("codescent", "contextlib", "torch")
"""Packages whose lines are not the place of a wrong argument."""


class ErrorHook:
    """Replaces sys.excepthook until `retire`. `codescent.init` installs one before the ranks are connected, and another
    one after: torch's init_process_group installs a hook, too, which would capture what the first one prints.

    A UserError is printed without a traceback, by one of the ranks that raise it; the process ends with its exit code.
    Any other error is printed with its traceback by every rank, followed by a line that names the first rank.
    With several ranks the process then ends without waiting for the others (base/ending.py).

    Attributes:
        place: this process among the ranks; None: unknown.
        store: of the ranks; None: they are not connected.
        give_up: `World.give_up` of the ranks; None: they are not connected.
        active: the hooks that are not retired, of which `watch` returns the last.
    """

    active: ClassVar[list[ErrorHook]] = []

    def __init__(
        self, place: Rank | None = None, store: Store | None = None, give_up: Callable[..., None] | None = None
    ) -> None:
        self.place, self.store, self.give_up, self._retired = place, store, give_up, False
        self._before = sys.excepthook
        sys.excepthook = self
        self.active.append(self)

    def retire(self) -> None:
        """Restore the hook of before. A hook that was installed later may still call this one, which passes it on.

        If the ranks are connected, the others can see from now on that this rank has left.
        """
        self._retired = True
        self.active.remove(self)
        if sys.excepthook is self:
            sys.excepthook = self._before
        if self.store is not None and not self._alone:
            with suppress(RuntimeError):  # rank 0, which serves the store, has left before
                self.store.set(f"{ENDED} {self._rank}", "")

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """See the class. Raises SystemExit for a UserError: the interpreter then takes its exit code.

        At a prompt (`python` without a script) it does not: the session goes on.
        """
        if not self._retired and (in_our_words := explained(error, trace)) is not None:
            kind, error = UserError, in_our_words
        if not self._retired:
            cause.is_consequence(is_lost_peer(error))
            cause.write_error_file(error, os.environ, most_steps())
        if isinstance(error, UserError) and not self._retired:
            self._ends(error)
            self.refuse(error, trace)
            self._ends(error, said=True)
            if hasattr(sys, "ps1"):
                return
            raise SystemExit(error.exit_code)
        self._ends(error)
        self._waited(error, trace)
        self._before(kind, error, trace)
        self._ends(error, said=True)
        if self._retired or self._alone or self.store is None or issubclass(kind, KeyboardInterrupt):
            return
        mine = {"rank": self._rank, "error": f"{kind.__name__}: {error}", "who": cause.place(most_steps())}
        try:
            first = self._claim(mine)
            self._name_first(mine, first)
            if is_lost_peer(error):
                self._name_lines(is_first=first == mine)
        except RuntimeError:  # the store has ended, and so has rank 0, which serves it
            output.warn(f"codescent: {_words(mine)}")
            output.warn(
                "codescent: rank 0 had ended before: with an error (see its message), or without one, because its "
                "script makes fewer calls than this rank's"
            )

    def _ends(self, error: BaseException, *, said: bool = False) -> None:
        """From now on this process ends soon, unless it is the only rank, has left the others, or is at a prompt."""
        if not (self._retired or self._alone or self.give_up is None or hasattr(sys, "ps1")):
            self.give_up(error, said=said)

    @property
    def _alone(self) -> bool:
        return self.place is None or self.place.world_size == 1

    @property
    def _rank(self) -> int:
        return 0 if self.place is None else self.place.rank

    def _claim(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The first failure of all ranks. It is `mine` if no rank has failed before."""
        assert self.store is not None
        first: dict[str, Any] = json.loads(self.store.compare_set(FIRST, "", json.dumps(mine)))
        return first

    def _name_first(self, mine: dict[str, Any], first: dict[str, Any]) -> None:
        left = self._left() if first == mine else []  # raises before anything is printed, if the store has ended
        ends = "" if first == mine else f"rank {self._rank} ends because "
        output.warn(f"codescent: {ends}{_words(first)}")
        if left:
            output.warn(f"codescent: rank {', '.join(left)} had ended before: every rank must make the same calls")

    def _waited(self, error: BaseException, trace: TracebackType | None) -> None:
        """If this rank has waited for the others in vain, write for them where."""
        if is_lost_peer(error) and not (self._retired or self._alone or self.store is None):
            after = f" after step {steps}" if (steps := most_steps()) else ""
            with suppress(RuntimeError):  # rank 0, which serves the store, has ended
                self.store.set(
                    f"{WAITED} {self._rank}", f"at {_place(trace).removesuffix(': ')}{_within(trace)}{after}"
                )

    def _name_lines(self, *, is_first: bool) -> None:
        """If every rank has waited in vain, none has failed. Say where each waited, unless all did at one place."""
        assert self.store is not None
        assert self.place is not None
        keys = [f"{WAITED} {rank}" for rank in range(self.place.world_size)]
        try:
            self.store.wait(keys, WAITED_S)
            if not is_first:  # rank 0 serves the store, and a launcher ends all ranks when one ends
                return self.store.wait([f"{WAITED} read"], WAITED_S)
            places = [place.decode() for place in self.store.multi_get(keys)]
        except RuntimeError:  # another rank has failed, or stands still: other messages name it
            return
        if len(set(places)) > 1:
            listed = ", ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
            output.warn(
                f"codescent: all ranks waited for each other: {listed}. Every rank must make the same calls, also of "
                "the module"
            )
        with suppress(RuntimeError):
            self.store.set(f"{WAITED} read", "")

    def _left(self) -> list[str]:
        """The ranks that have left: this one may have waited for them."""
        assert self.store is not None
        assert self.place is not None
        return [str(rank) for rank in range(self.place.world_size) if self.store.check([f"{ENDED} {rank}"])]

    def refuse(self, error: UserError, trace: TracebackType | None, *more: str) -> None:
        """Print the problems, unless another rank has printed the same. `more`: lines after them."""
        place = _place(trace)
        lines = [*(f"error: {place}{problem}" for problem in error.problems), *more]
        if self._alone:
            return _print(lines)
        if self.store is None and self.place is not None and is_local(self.place):
            return self._say_once(lines[: -len(more)] if more else lines, more)
        mine = {"rank": self._rank, "error": f"{type(error).__name__}: {error}", "who": cause.place(most_steps())}
        try:
            self.store = self.store or self._connected()
            first = self._claim(mine)
        except (OSError, RuntimeError, UserError):  # rank 0 has ended, or cannot be reached
            return _print([f"rank {self._rank}: {line}" for line in lines])
        if first == mine:
            _print(lines)
        elif first["error"] != mine["error"]:
            _print([f"rank {self._rank}: {line}" for line in lines])
            self._name_first(mine, first)
        self._part(first)

    def _say_once(self, lines: list[str], more: Sequence[str]) -> None:
        """The ranks have not met, and are all on this machine: one prints, without a connection."""
        assert self.place is not None
        mark = say_once(lines, os.environ, more)
        if mark is not None and not all_said(mark, self.place.world_size, ALIKE_S):
            tell_those_who_wait(self.place)

    def _connected(self) -> Store:
        """A connection to ranks that raise the same error before they are connected."""
        assert self.place is not None
        store = reach(self.place, PATIENCE).store
        report_failure(store, self.place)
        return store

    def _part(self, first: dict[str, Any]) -> None:
        """Stay until the first rank has printed, because a launcher ends all ranks when one ends. Rank 0 serves the
        store: it stays until every rank knows whether to print."""
        assert self.store is not None
        assert self.place is not None
        others = range(self.place.world_size) if self._rank == 0 else [first["rank"]]
        with suppress(RuntimeError):  # a rank waits in a collective, or has ended
            self.store.set(f"{SAID} {self._rank}", "")
            self.store.wait([f"{SAID} {rank}" for rank in others], PATIENCE)


def watch() -> ErrorHook:
    """The hook of this process. It is installed here if `codescent.init` was not called: a script may forget it."""
    if not ErrorHook.active:
        place = None
        with suppress(UserError):  # the launcher's variables contradict each other: `init` says so
            place = environment.read(os.environ)
        ErrorHook(place)
    return ErrorHook.active[-1]


def _words(failure: dict[str, Any]) -> str:
    return f"rank {failure['rank']} failed: {failure['error']} ({failure['who']})"


def _print(lines: list[str]) -> None:
    for line in lines:
        output.warn(line)


def _place(trace: TracebackType | None) -> str:
    """File and line of the last call in the user's own code, as a prefix."""
    users = [(frame, line) for frame, line in walk_tb(trace) if _is_the_users(frame)]
    return f"{users[-1][0].f_code.co_filename}:{users[-1][1]}: " if users else ""


def _is_the_users(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")  # None: torch.compile has written the function
    return name is not None and name.partition(".")[0] not in NOT_THE_USERS


def _within(trace: TracebackType | None) -> str:
    """In which collective of a line this rank has waited: a call of a module and a backward pass have several."""
    names = [frame.f_code.co_name.strip("_") for frame, _ in walk_tb(trace)]
    found = [name for name in names if name.startswith(COLLECTIVES)]
    in_backward = " of backward" if "engine_run_backward" in names else ""
    return f", in {found[-1].replace('_', '-')}{in_backward}" if found else in_backward.replace(" of", ", in")
