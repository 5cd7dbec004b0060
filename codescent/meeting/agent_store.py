"""In: the address of the store of torchrun's agent. Out: the address of rank 0, which rank 0 writes there.
Does not trust it: anyone can write to that store, and it keeps what ranks of earlier starts have written.

A false or old address only delays the meeting. At any address a rank proves that it knows the token without sending
it, and only a rank 0 of its own start takes it as one of the ranks (members.py). It reads the address anew each time.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.meeting.addresses import fix, is_local, means_this_machine
from codescent.meeting.sockets import again, connected
from codescent.meeting.store import StoreError

T = TypeVar("T")

KEY = "rank 0"
LOOK_S = 0.2
ANSWER_S = 10.0
"""Seconds in which the agent's store answers. torch's own timeout does not see a link that was cut."""
HERE_S = 8.0
"""Seconds in which an agent on this machine answers. Later a name that means this machine is a wrong one."""


class AgentValues(Protocol):
    """The values of the agent's store. Each method raises StoreError, and may hang."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""

    def check(self, key: str) -> bool:
        """Whether a key has a value."""
        ...


OpenAgent = Callable[[str, int, str, timedelta], AgentValues]
"""Opens the agent's store: its address, its port, a prefix of all keys, and how long it may take to answer.
Raises StoreError: it does not answer. Only torch knows its protocol: see train/torch_store.py."""


class AgentStore:
    """The store of torchrun's agent.

    Args:
        this_rank: this process among the ranks.
        seconds: how long to wait for it.
        open_agent: opens it.

    Raises:
        UserError: no agent answers there.
    """

    def __init__(self, this_rank: Rank, seconds: float, open_agent: OpenAgent) -> None:
        self._this_rank = this_rank
        address, limit = self._reached(seconds), timedelta(seconds=ANSWER_S)
        try:
            self._store = _within(
                lambda: open_agent(address, this_rank.master_port, f"codescent {this_rank.job}", limit)
            )
        except (StoreError, OSError) as error:
            raise self._silent(seconds, error) from error

    def publish(self, addresses: list[str], port: int) -> None:
        """Rank 0: write where it listens. A fresh number makes each start's text another one.

        Raises UserError: the store is silent.
        """
        said = json.dumps([addresses, port, secrets.token_hex(8)])
        try:
            _within(lambda: self._store.set(KEY, said))
        except (StoreError, OSError) as error:
            raise self._silent(ANSWER_S, error) from error

    def where(self) -> tuple[list[str], int]:
        """Where rank 0 listens, as it was written last. Raises OSError: it is not there yet, or the store is silent."""
        try:
            if not _within(lambda: self._store.check(KEY)):
                raise ConnectionError("it has not said yet where it listens")
            addresses, port, _ = json.loads(_within(lambda: self._store.get(KEY)))
        except (StoreError, ValueError) as error:
            raise ConnectionError(f"torchrun's store does not answer: {error}") from error
        return [str(address) for address in addresses], int(port)

    def _reached(self, seconds: float) -> str:
        """Wait until the agent listens, and return its address. torch's store would print each of its attempts.

        Where all ranks are on this machine, it is loopback: the agent's name may not be known here.
        """
        this_rank = self._this_rank
        wrong = means_this_machine(this_rank)
        end_s = time.monotonic() + (min(HERE_S, seconds) if wrong else seconds)
        names = [*([LOOPBACK] if is_local(this_rank) else []), this_rank.master_addr]

        def gives_up(error: OSError) -> UserError | None:
            return self._silent(seconds, error, wrong=wrong) if time.monotonic() > end_s else None

        with again(partial(connected, names, this_rank.master_port, ANSWER_S), gives_up, LOOK_S) as agent:
            return str(agent.getpeername()[0])

    def _silent(self, seconds: float, error: Exception, *, wrong: bool = False) -> UserError:
        this_rank = self._this_rank
        who = this_rank.here()
        at = f"{this_rank.master_addr}:{this_rank.master_port}"
        if wrong:
            return UserError(
                f"{who}: torchrun gave MASTER_ADDR={this_rank.master_addr}, a name that means this machine, where no "
                f"agent listens at port {this_rank.master_port}; {fix(this_rank)}"
            )
        return UserError(
            f"{who}: torchrun's store at {at} did not answer within {seconds:g} s ({error}); either its agent has "
            f"ended, or the address is wrong: {fix(this_rank)}"
        )


def _within(act: Callable[[], T]) -> T:
    """The result of a call of torch's store, which may hang. Raises TimeoutError: there is none after ANSWER_S."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="codescent agent store", daemon=True)
    thread.start()
    thread.join(ANSWER_S + 1)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"torchrun's store gave no answer for {ANSWER_S:g} s")
    return found[0]
