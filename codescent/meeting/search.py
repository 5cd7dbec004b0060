"""In: a rank, as its launcher has numbered it. Out: a connection to rank 0 of the same start, once all ranks are there.
Rank 0 serves the store. Does not decide who belongs together (members.py does)."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from codescent.base import token
from codescent.base.call import SURVIVES, followed_call, raise_if_called, waits_without_limit
from codescent.base.early import may_end, raise_if_asked, raise_if_signalled
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.rank import LOOPBACK, Rank
from codescent.meeting.addresses import (
    EVERY,
    addresses_of_first,
    fix,
    is_local,
    leads_here,
    listening_address,
    means_this_machine,
    outward,
)
from codescent.meeting.agent_store import AgentStore, OpenAgent
from codescent.meeting.members import Members, listed
from codescent.meeting.sockets import AGAIN_S, again, connected, listening
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient
from codescent.meeting.store_server import StoreServer
from codescent.transport.authenticate import NotProved

_Where = Callable[[], tuple[list[str], int]]

CONNECT_S = 3.0
"""Seconds of one attempt. The address may be one of an earlier start, on a machine that is off."""
STRANGER_S = 3.0
"""A rank tries again for this many seconds if another job answers at rank 0's port: that job may be about to end."""
ANSWER_S = 5.0
"""Rank 0 has ended, or is cut off, if it does not answer for this many seconds and `store_client.SILENT_S`."""
NOTICE_S = 10.0
"""After this many seconds a rank that waits says for whom."""
CHECK_S = 8.0
"""Seconds after which rank 0 refuses a MASTER_ADDR that leads elsewhere, and a rank one that means its own machine."""
ENDS_S = 2.0
"""Seconds in which all ranks hear of an error of the meeting: the first prints it before a launcher ends all."""


def about(this_rank: Rank) -> dict[str, Any]:
    """This process, as `Members` wants to know it. Its number is new for each start."""
    return {
        "number": secrets.token_hex(16),
        "rank": this_rank.rank,
        "ranks": this_rank.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "late": this_rank.late,
        "call": followed_call(),
        "agrees": 0,
    }


class Search:
    """One rank that looks for the others. Rank 0 serves the store from the beginning.

    Attributes:
        key: the secret of this start of the run.
        server: None except on rank 0.
    """

    def __init__(self, this_rank: Rank, seconds: float, listen: str | None, open_agent: OpenAgent) -> None:
        self._this_rank, self._seconds, self._listen = this_rank, seconds, listen
        self._begin_s = time.monotonic()
        self._has_said = False
        self._stranger: tuple[str, float] | None = None  # where another job has answered, and since when
        self._own = ""  # rank 0, if it listens on all interfaces: its address that the others reach
        # The key differs between jobs, so that a rank of another job at the same port is rejected.
        self.key = token.key_of(os.environ, f"{this_rank.job} attempt {this_rank.attempt}")
        self.server: StoreServer | None = None
        self._members: Members | None = None
        self._where: _Where = lambda: (addresses_of_first(this_rank, listen), this_rank.master_port)
        listener = _listening(this_rank, listen) if this_rank.rank == 0 else None
        try:
            agent = AgentStore(this_rank, seconds, open_agent) if this_rank.agent_store else None
            if listener is not None:
                self._serve(listener, agent)
            elif agent is not None:
                self._where = agent.where
        except BaseException:
            self.close()
            if listener is not None:
                listener.close()
            raise

    def _serve(self, listener: socket.socket, agent: AgentStore | None) -> None:
        """Rank 0: serve the store, and say where, or refuse an address that leads elsewhere."""
        this_rank, (address, port) = self._this_rank, listener.getsockname()[:2]
        if address == EVERY:
            self._own = LOOPBACK if is_local(this_rank) else outward(this_rank)
        meets_anew, call = SURVIVES in os.environ, followed_call()
        self._members = Members(this_rank.world_size, self._seconds, meets_anew=meets_anew, call=call)
        self.server = StoreServer(listener, self.key, self._members)
        self._where = lambda: ([LOOPBACK if self._own else address], port)
        if agent is not None:
            agent.publish([self._own or address], port)
        else:
            self._refuse_foreign_address(address, port)

    def close(self) -> None:
        """Rank 0: stop to serve."""
        if self.server is not None:
            self.server.close()

    def join(self) -> StoreClient:
        """Connect to rank 0, again and again, until all ranks are there. Raises UserError."""
        while True:
            store = self.connect()
            try:
                if self._is_member(store):
                    return store
                error: Exception = UserError("its ranks have met without this one")
            except StoreError as lost:
                error = lost
            except UserError:
                self._let_first_print(store)
                raise
            store.close()
            if self._spent_s() > self._seconds and not waits_without_limit():
                raise self._unreached(error)
            time.sleep(AGAIN_S)

    def connect(self) -> StoreClient:
        """Connect to rank 0, and try again until it listens. Raises UserError: it does not, or has another key."""
        self._stranger = None
        return again(self._opened, self._gives_up)

    def _opened(self) -> StoreClient:
        self._stop_if_asked()
        return StoreClient(self._socket, self.key, timedelta(seconds=min(ANSWER_S, self._seconds)))

    def _gives_up(self, error: OSError) -> UserError | None:
        """Why this rank connects to rank 0 no more; None: it tries again."""
        if isinstance(error, NotProved):
            at, now_s = self._shown(), time.monotonic()
            if self._stranger is None or self._stranger[0] != at:
                self._stranger = at, now_s
            return self._other_token(at) if now_s - self._stranger[1] > min(STRANGER_S, self._seconds) else None
        if self._spent_s() > CHECK_S and self._looks_here():
            return self._own_name()
        if self._spent_s() > self._seconds and not waits_without_limit():
            return self._unreached(error)
        self._notice(f"rank 0 at {self._shown()} ({error})")
        return None

    def address(self, store: StoreClient) -> str:
        """The address of this machine that the others reach. Rank 0 reaches itself at loopback if it listens on all."""
        return self._own or store.address()

    def _is_member(self, store: StoreClient) -> bool:
        """Ask until all ranks are there. Returns False: others have met at this rank 0, so it is of another start.

        Raises:
            StoreError: rank 0 has ended.
            UserError: the ranks do not meet.
        """
        this_rank = self._this_rank
        me = about(this_rank)
        pause_s = min(0.2, 0.005 + 0.001 * this_rank.world_size)
        while True:
            raise_if_called(agreed=bool(me["agrees"]))
            if not me["agrees"]:
                self._stop_if_asked()
            answer = store.meet(me)
            if "met" in answer or "refused" in answer:
                return "met" in answer
            if "problems" in answer:
                error = UserError(*answer["problems"])
                error.everywhere = True
                raise error
            if me["agrees"] != answer["list"]:
                me["agrees"] = answer["list"]
                continue
            if this_rank.rank == 0 and answer["missing"]:
                self._notice(f"{listed(answer['missing'])} ({answer['came']} of {this_rank.world_size} are there)")
            time.sleep(pause_s)

    def _stop_if_asked(self) -> None:
        """Raise StopAsked, as in a preparation: the ranks have not met, so none of them depends on this one.

        The time limit counts when others keep this rank waiting: what is ready takes a step before it stops.
        """
        raise_if_called()
        raise_if_signalled()
        if self._spent_s() > NOTICE_S:
            with may_end():
                raise_if_asked()

    def _let_first_print(self, store: StoreClient) -> None:
        """All ranks have the same error. Rank 0 stays until all have it, then ends first; the others end after it."""
        if self._members is None:
            return store.wait_for_end(ENDS_S)
        end_s = time.monotonic() + ENDS_S
        while not self._members.all_told() and time.monotonic() < end_s:
            time.sleep(AGAIN_S / 2)

    def _socket(self) -> socket.socket:
        return connected(*self._where(), max(1.0, min(self._seconds, CONNECT_S)))

    def _spent_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _notice(self, what: str) -> None:
        """Say once that this rank waits."""
        if not self._has_said and NOTICE_S < self._spent_s() < self._seconds:
            self._has_said = True
            warn(f"codescent: {_who(self._this_rank)}: waits for {what}, for {self._seconds:g} s (parallel.meet_s)")

    def _shown(self) -> str:
        try:
            addresses, port = self._where()
            return f"{' or '.join(addresses)}:{port}"
        except OSError:
            return f"{self._this_rank.master_addr}:{self._this_rank.master_port}"

    def _refuse_foreign_address(self, address: str, port: int) -> None:
        """Raise UserError if MASTER_ADDR does not lead to this machine, where rank 0 is."""
        this_rank = self._this_rank
        if is_local(this_rank) or address == EVERY:
            return

        def reach() -> None:
            if not leads_here(this_rank, self._listen, address):  # then it is forwarded to this machine
                StoreClient(partial(connected, [this_rank.master_addr], port, 1.0), self.key, _SHORT).close()

        def gives_up(error: OSError) -> UserError | None:
            if self._spent_s() <= min(CHECK_S, self._seconds):
                return None
            return UserError(
                f"{_who(this_rank)}: MASTER_ADDR={this_rank.master_addr} does not lead to this machine, where "
                f"rank 0 is ({error}); {fix(this_rank)}"
            )

        again(reach, gives_up)

    def _looks_here(self) -> bool:
        """Whether this rank looks for rank 0 on its own machine, by a name that others may know better."""
        this_rank = self._this_rank
        return this_rank.rank > 0 and not this_rank.agent_store and means_this_machine(this_rank)

    def _own_name(self) -> UserError:
        this_rank = self._this_rank
        return UserError(
            f"{_who(this_rank)}: MASTER_ADDR={this_rank.master_addr} is a name that means this machine, and rank 0 "
            f"does not listen here at port {this_rank.master_port}; {fix(this_rank)}"
        )

    def _other_token(self, at: str) -> UserError:
        return UserError(
            f"{_who(self._this_rank)}: the process that listens at {at} has another token than this rank. "
            f"Either another job uses this port: set MASTER_PORT to a free port, for every rank. Or the "
            f"machines have different files {token.FILE}: copy one to all machines, or set {token.TOKEN} to "
            "the same text, hard to guess, for every rank"
        )

    def _unreached(self, error: Exception) -> UserError:
        return UserError(
            f"{_who(self._this_rank)}: rank 0 did not answer at {self._shown()} within {self._seconds:g} s "
            f"(parallel.meet_s): {error}; either rank 0 has ended (see its error message), or it is on another "
            f"machine: {fix(self._this_rank)}"
        )


_SHORT = timedelta(seconds=2)


def _listening(this_rank: Rank, listen: str | None) -> socket.socket:
    """The socket on which rank 0 serves the store: on loopback, or on the interface that other machines reach."""
    port = 0 if this_rank.agent_store else this_rank.master_port
    try:
        return listening(this_rank, listen, [port])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"{_who(this_rank)}: cannot listen at port {port}, which is taken; set MASTER_PORT to a free port, for "
                f"every rank ({error})"
            ) from error
        at = f"{listening_address(this_rank, listen)}:{port}"
        raise UserError(f"{_who(this_rank)}: cannot listen at {at} ({error}); set MASTER_ADDR") from error


def _who(this_rank: Rank) -> str:
    by = f", numbered by {this_rank.launcher}" if this_rank.launcher else ""
    return f"{this_rank.here()}{by}"
