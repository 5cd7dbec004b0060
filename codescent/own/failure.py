"""In: an exception that ends this rank. Out: lines on standard error: whose error it is; a wrong argument, told once.
Does not end the other ranks: they end when the connections of this rank close, or with the same error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import ClassVar

from codescent.base import cause, output
from codescent.base.errors import UserError
from codescent.base.fallen import fallen
from codescent.base.rank import Rank
from codescent.coupling.lost_peer import is_lost_peer
from codescent.launch import environment
from codescent.launch.once import say_once_or_tell
from codescent.meeting.addresses import is_local
from codescent.meeting.failure import Failures, RankFailure
from codescent.meeting.store import Store, StoreError
from codescent.own.explained import explained
from codescent.own.steps import most_steps
from codescent.train.torch_store import open_agent

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "scatter")
"""How the names of functions begin that wait for other ranks."""
NOT_THE_USERS = ("codescent", "contextlib", "torch")
"""Packages whose lines are not the place of a wrong argument."""


class ErrorHook:
    """Replaces sys.excepthook until `retire`. `codescent.init` installs one before the ranks are connected, and another
    one after: torch's init_process_group installs a hook, too, which would capture what the first one prints.

    A UserError is printed without a traceback, by one of the ranks that raise it; the process ends with its exit code.
    Any other error is printed with its traceback by every rank, followed by a line that names the first rank.
    With several ranks the process then ends without waiting for the others (base/ending.py).

    Attributes:
        this_rank: this process among the ranks; None: unknown.
        store: of the ranks; None: they are not connected.
        give_up: `World.give_up` of the ranks; None: they are not connected.
        active: the hooks that are not retired, of which `watch` returns the last.
    """

    active: ClassVar[list[ErrorHook]] = []

    def __init__(
        self, this_rank: Rank | None = None, store: Store | None = None, give_up: Callable[..., None] | None = None
    ) -> None:
        self.this_rank, self.store, self.give_up, self._retired = this_rank, store, give_up, False
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
        if (failures := self._failures()) is not None:
            failures.leave()

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
        failures = None if self._retired or self.store is None else self._failures()
        if failures is not None and is_lost_peer(error):
            failures.waited(_waited_at(trace))
        self._before(kind, error, trace)
        self._ends(error, said=True)
        if failures is None or issubclass(kind, KeyboardInterrupt):
            return
        if is_lost_peer(error) and (words := fallen()):
            output.warn(f"codescent: {cause.who(most_steps())} ends as a consequence: {words}")
            return
        mine = self._failure(error)
        try:
            is_first = failures.name_first(mine)
            if is_lost_peer(error):
                failures.name_lines(is_first=is_first)
        except StoreError:  # the store has ended, and so has rank 0, which serves it
            output.warn(f"codescent: {mine}")
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
        return self.this_rank is None or self.this_rank.world_size == 1

    def _failures(self) -> Failures | None:
        """What this rank says to the others; None: there are none."""
        return None if self.this_rank is None or self._alone else Failures(self.this_rank, self.store, open_agent)

    def _failure(self, error: BaseException) -> RankFailure:
        rank = 0 if self.this_rank is None else self.this_rank.rank
        return RankFailure(rank, f"{type(error).__name__}: {error}", cause.place(most_steps()))

    def refuse(self, error: UserError, trace: TracebackType | None) -> None:
        """Print the problems, unless another rank has printed the same."""
        at = _place(trace)
        lines = [f"error: {at}{problem}" for problem in error.problems]
        failures = self._failures()
        if self.this_rank is None or failures is None:
            output.warn(*lines)
        elif self.store is None and is_local(self.this_rank):
            say_once_or_tell(lines, (), self.this_rank, os.environ, open_agent)
        else:
            failures.refuse(lines, self._failure(error))
            self.store = failures.store


def watch() -> ErrorHook:
    """The hook of this process. It is installed here if `codescent.init` was not called: a script may forget it."""
    if not ErrorHook.active:
        place = None
        with suppress(UserError):  # the launcher's variables contradict each other: `init` says so
            place = environment.read(os.environ)
        ErrorHook(place)
    return ErrorHook.active[-1]


def _place(trace: TracebackType | None) -> str:
    """File and line of the last call in the user's own code, as a prefix."""
    users = [(frame, line) for frame, line in walk_tb(trace) if _is_the_users(frame)]
    return f"{users[-1][0].f_code.co_filename}:{users[-1][1]}: " if users else ""


def _is_the_users(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")  # None: torch.compile has written the function
    return name is not None and name.partition(".")[0] not in NOT_THE_USERS


def _waited_at(trace: TracebackType | None) -> str:
    """The line of the user's script in which this rank has waited, with its collective and step."""
    after = f" after step {steps}" if (steps := most_steps()) else ""
    return f"at {_place(trace).removesuffix(': ')}{_within(trace)}{after}"


def _within(trace: TracebackType | None) -> str:
    """In which collective of a line this rank has waited: a call of a module and a backward pass have several."""
    names = [frame.f_code.co_name.strip("_") for frame, _ in walk_tb(trace)]
    found = [name for name in names if name.startswith(COLLECTIVES)]
    in_backward = " of backward" if "engine_run_backward" in names else ""
    return f", in {found[-1].replace('_', '-')}{in_backward}" if found else in_backward.replace(" of", ", in")
