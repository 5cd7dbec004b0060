"""In: what the ranks of this host do while none moves. Out: the same of other hosts, so that a verdict names the host.
Does not judge (verdict.py does). What it asks for has a deadline of its own: a link may be cut."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from codescent.base.errors import UserError
from codescent.base.page import GroupUse, Page, Took
from codescent.base.progress import Pages
from codescent.base.token import key_of
from codescent.launch.stacks import StackFrame
from codescent.launch.verdict import RankState
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient
from codescent.meeting.store_server import StoreServer
from codescent.transport.authenticate import NotProved

WAIT_S, ANSWER_S, LOOK_S = 2.5, 1.0, 0.1
"""Seconds in which the other hosts find that their ranks stand still, too; for an answer; between two looks."""
RUN = "supervisors"
"""Of the key of the run, for these messages."""


class OtherHosts:
    """The supervisors of the other hosts of a run.

    Args:
        pages: have the address of the supervisor that serves the others.
        env: has the token of the run.

    Attributes:
        found: the ranks of other hosts that stand still, too. Complete when `waits` is false.
    """

    def __init__(self, pages: Pages, env: Mapping[str, str]) -> None:
        self._pages, self._env = pages, env
        self._server: StoreServer | None = None
        self._thread: threading.Thread | None = None
        self.found: dict[int, RankState] = {}

    def serve(self, listener: socket.socket) -> None:
        """Serve the others, on the host of rank 0. Its ranks find the address on their pages."""
        address, port = listener.getsockname()[:2]
        self._server = StoreServer(listener, key_of(self._env, RUN), says=False)
        self._pages.hub = f"{address} {port}"

    @property
    def waits(self) -> bool:
        """Whether the others are still asked."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, own: Mapping[int, RankState]) -> None:
        """Begin to tell the others what these ranks do, and to ask what theirs do."""
        self._run(self._exchange, own)

    def withdraw(self, own: Mapping[int, object]) -> None:
        """These ranks move again, or only work."""
        self._run(self._forget, own)

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.close()

    def _run(self, act: Any, own: Mapping[int, Any]) -> None:
        """Act in a thread: a request to a host whose link is cut must not hold up the launcher."""
        self.found, before = {}, self._thread

        def in_order(found: dict[int, RankState]) -> None:
            if before is not None:
                before.join()  # what was put last must be withdrawn last
            act(own, found)

        self._thread = threading.Thread(target=in_order, args=(self.found,), name="codescent hosts", daemon=True)
        self._thread.start()

    def _exchange(self, own: Mapping[int, RankState], found: dict[int, RankState]) -> None:
        end_s = time.monotonic() + WAIT_S
        with suppress(StoreError, OSError, NotProved, UserError, ValueError, TypeError, KeyError):
            client = self.client()
            client.set(
                self.key("stands still", min(own)), json.dumps({rank: asdict(state) for rank, state in own.items()})
            )
            while len(own) + len(found) < self._pages.ranks and time.monotonic() < end_s:
                absent = [rank for rank in range(self._pages.ranks) if rank not in own and rank not in found]
                keys = [self.key("stands still", rank) for rank in absent]
                for key, is_there in zip(keys, client.there(keys), strict=True):
                    if is_there:
                        told = json.loads(client.get(key))
                        found |= {int(rank): state_of_json(state) for rank, state in told.items()}
                time.sleep(LOOK_S)
            client.close()

    def _forget(self, own: Mapping[int, object], _found: object) -> None:
        with suppress(StoreError, OSError, NotProved, UserError, ValueError):
            client = self.client()
            client.delete_key(self.key("stands still", min(own)))
            client.close()

    def key(self, what: str, first: int) -> str:
        """Where a host says something. `first`: of its ranks, since the last call: others may take part now."""
        return f"{what} {self._pages.call.number} {first}"

    @property
    def serves(self) -> bool:
        """Whether this is the supervisor of the host of rank 0."""
        return self._server is not None

    def client(self) -> StoreClient:
        """A connection to it. Raises OSError: it does not answer; ValueError: its address is not known; NotProved."""
        address, port = self._pages.hub.split()
        connect = partial(socket.create_connection, (address, int(port)), ANSWER_S)
        return StoreClient(connect, key_of(self._env, RUN), timedelta(seconds=ANSWER_S))


def state_of_json(read: Mapping[str, Any]) -> RankState:
    """A state of a rank, as JSON has it. Raises KeyError, TypeError: it is another object."""
    page = dict(read["page"])
    page["last"] = None if page["last"] is None else GroupUse(**page["last"])
    page["groups"] = tuple(GroupUse(**one) for one in page["groups"])
    page["spent"] = tuple((str(name), int(often), float(seconds)) for name, often, seconds in page["spent"])
    page["took"] = Took(**page["took"])
    frames = tuple(StackFrame(**one) for one in read["frames"])
    return RankState(**{**read, "page": Page(**page), "frames": frames})
