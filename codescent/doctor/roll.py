"""In: processes that say that they are ranks, with what they know of themselves. Out: who has come, who has gone.
Who is missing, surplus or lost is a finding, no error. Does not send or receive (meeting/store_server.py does)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from codescent.meeting.rendezvous import Meeting
from codescent.meeting.store import LocalStore
from codescent.transport.sockets import has_gone, watch

TOO_LATE = "it came too late; give rank 0 a longer --wait"
ONCE = (
    "start each rank once, all of them with the same number of ranks (RANK and WORLD_SIZE, as the launcher sets them)"
)


@dataclass
class Gathered:
    """The ranks that have come to rank 0.

    Attributes:
        address: at which rank 0 listens.
        port: at which it listens.
        taken: what the port of the run is taken by, in words; "": it is free, or torchrun's.
        facts: of each rank, with that of rank 0.
        rejected: addresses of processes that did not know the token. Who only connects (a probe of ports), or is cut
            off, is none of them.
        surplus: numbers and addresses of processes that know the token and are no ranks of this run, and why not.
        lost: why a rank has gone, by rank.
        meeting: the store, and its server.
    """

    address: str
    port: int
    taken: str = ""
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    rejected: Collection[str] = ()
    surplus: set[tuple[int, str, str]] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    meeting: Meeting = field(default_factory=lambda: Meeting(LocalStore(timedelta())))

    def close(self) -> None:
        """Let all ranks go."""
        self.meeting.close()


class Roll:
    """Decides for the store of rank 0 which processes are its ranks: see `store_server.Admission`."""

    def __init__(self, world_size: int, found: Gathered) -> None:
        self._world_size, self._found = world_size, found
        self._peers: dict[int, socket.socket] = {}
        self._change = threading.Condition()
        self._is_over = False

    def ask(self, peer: socket.socket, head: Mapping[str, Any]) -> dict[str, Any]:
        """A process says what it knows of itself. The answer has "refused": why it is no rank; "": it is one."""
        with self._change:
            why = self._enter(peer, dict(head["facts"]))
            self._change.notify_all()
        return {"refused": why}

    def left(self, peer: socket.socket, why: str) -> bool:
        """A connection has ended."""
        with self._change:
            self._found.lost |= {rank: why for rank, one in self._peers.items() if one is peer}
        return False

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have come, or the time is over. Nobody is let in any more."""
        with self._change:
            self._change.wait_for(lambda: len(self._found.facts) == self._world_size, seconds)
            self._is_over = True

    def own_addresses(self) -> list[str]:
        """The addresses of this machine that the ranks have reached."""
        found = []
        with self._change:
            for peer in self._peers.values():
                with suppress(OSError):  # it has gone
                    found.append(str(peer.getsockname()[0]))
        return found

    def _enter(self, peer: socket.socket, facts: dict[str, Any]) -> str:
        """Let a process in. Returns why not; "": it is in.

        A rank whose first connection has gone, because this machine was too busy to answer, may come again.
        """
        rank, ranks = int(facts["rank"]), int(facts["world_size"])
        before, found = self._peers.get(rank), self._found
        if self._is_over:
            return TOO_LATE
        why = ""
        if ranks != self._world_size:
            why = f"is one of {ranks} ranks, but the run has {self._world_size} ranks"
        elif not 0 < rank < self._world_size:
            why = f"is none of {self._world_size} ranks"
        elif before is not None and not has_gone(before):
            why = "is there already"
        if why:
            found.surplus.add((rank, peer.getpeername()[0], why))
            return f"rank {rank} {why}; {ONCE}"
        watch(peer)
        found.lost.pop(rank, None)
        self._peers[rank], found.facts[rank] = peer, facts
        return ""
