"""In: signals and the time limit of a job, from a script's first question on. Out: one answer for all ranks, exit code.
Does not save and does not leave the loop: the script does both."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from codescent.base.agreement import together
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.progress import ENDED
from codescent.base.stopping import LATER, SAVING, STOPPING, TIME_LIMIT, exit_code_of, reported
from codescent.base.time_limit import forget_others, in_words, stop_at
from codescent.train.stop import StopRequest
from codescent.train.world import World

OVER = 255
"""In the place of a signal's number: the time limit."""
DOES = "the script is asked to save and to stop"


class Stopping:
    """The request of a scheduler or a person to stop, in the loop of a script.

    Before the first question signals do what they did before: most of them end the process. From then on they are
    recorded, until the ranks part. Signals that the script handles itself stay its own.

    Attributes:
        why: what has asked the ranks to stop, and which rank, in words; "": nothing has.
        exit_code: of a process that stops for this reason.
    """

    def __init__(self, world: World) -> None:
        self.why, self.exit_code = "", 0
        self._world = world
        self._request: StopRequest | None = None

    def asked(self) -> bool:
        """Whether a rank was asked to stop. Collective. After a yes the answer stays the same, and is free."""
        if self._request is None:
            together(UserError, self._listen)
        if not self.why:
            self._agree()
        return bool(self.why)

    def stop(self) -> NoReturn:
        """End this process by SystemExit, with the exit code of the request."""
        if not self.why or self._request is None:
            raise UserError("codescent: ranks.stop: nothing asks the ranks to stop: call it after ranks.stopping()")
        self._request.is_obeyed = True
        self._world.at(ENDED)
        if self._world.is_first:
            again = "; to be started again" if self.exit_code == LATER else ""
            warn(f"codescent: stopped by {self.why}{again}")
        sys.exit(reported(self.exit_code, os.environ, writes=not self._world.this_rank.local_rank))

    @property
    def is_obeyed(self) -> bool:
        """Whether the script has called `stop`."""
        return self._request is not None and self._request.is_obeyed

    def retire(self, *, fails: bool) -> None:
        """Signals do what they did before the first question. `fails`: an error ends this rank."""
        if self._request is not None:
            self._request.__exit__()
        if self.why and not fails and not self.is_obeyed and self._world.is_first:
            warn(
                f"codescent: {self.why} has asked the ranks to stop, and the script has ended without ranks.stop(): "
                "its exit code does not say so"
            )

    def _listen(self) -> None:
        """Begin to record signals. Raises UserError: they cannot be, or the time limit cannot be read."""
        if threading.current_thread() is not threading.main_thread():
            raise UserError("codescent: ranks.stopping: must be called in the main thread, which receives signals")
        if (ignored := forget_others(os.environ)) and self._world.is_first:
            warn(*(f"codescent: {sentence}" for sentence in ignored))
        own = [number for number in (*STOPPING, *SAVING) if _is_handled(number)]
        alone, end_s = self._world.this_rank.world_size == 1, stop_at(os.environ)
        self._request = StopRequest(alone=alone, does=DOES, end_s=end_s, spares=own).__enter__()

    def _agree(self) -> None:
        """The lowest rank that was asked to stop gives the reason."""
        assert self._request is not None
        this_rank, number = self._world.this_rank, 0
        if self._request.is_requested():
            number = OVER if self._request.is_over else self._request.signal or 0
        said = torch.tensor([(this_rank.world_size - this_rank.rank) * (OVER + 1) + number if number else 0])
        if this_rank.world_size > 1:
            dist.all_reduce(said, dist.ReduceOp.MAX)
        if not said:
            return
        before, number = divmod(int(said), OVER + 1)
        is_over = number == OVER
        self.why = f"{TIME_LIMIT}{in_words(os.environ)}" if is_over else signal.Signals(number).name
        self.exit_code = LATER if is_over else exit_code_of(number)
        if this_rank.world_size > 1 and not is_over:
            self.why += f" to rank {this_rank.world_size - before}"


def _is_handled(number: int) -> bool:
    """Whether the script, or a library, has a handler for this signal. Python does not know those of native code, such
    as faulthandler's; Linux does. None: it was there before Python, which could not put it back."""
    handler = signal.getsignal(number)
    if handler is None:
        return True
    if callable(handler):
        return handler is not signal.default_int_handler
    return handler == signal.SIG_DFL and bool(_caught() >> (number - 1) & 1)


def _caught() -> int:
    """The signals for which this process has a handler, as a mask; none, where there is no /proc."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    mask = status.partition("SigCgt:")[2].split(maxsplit=1)
    return int(mask[0], 16) if mask else 0
