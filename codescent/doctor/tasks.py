"""In: requests of rank 0. Out: what this rank has done or found, as JSON data. Each request is a function.
Does not decide what is asked (examine.py does)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from codescent.doctor import folders, pairs
from codescent.doctor.hub import FAILED, Request
from codescent.doctor.mtu import path_mtu
from codescent.doctor.names import resolved
from codescent.doctor.processes import left_behind, listener, on_devices
from codescent.meeting.clocks import measure
from codescent.meeting.store import Store, StoreError

CLOCK_ROUNDS = 5
"""Round trips to rank 0; the shortest one says how far the clock of a rank is ahead."""


class Tasks:
    """Does what rank 0 asks for.

    Args:
        address: of this host, on which it may listen.
        key: the secret of the run.
        store: of rank 0.
    """

    def __init__(self, address: str, key: bytes, store: Store) -> None:
        self._address, self._key, self._store = address, key, store
        self._server: pairs.PairServer | None = None
        self._tasks: Mapping[str, Callable[..., Any]] = {
            "clock": self._clock,
            "names": resolved,
            "serve": self._serve,
            "ping": self._ping,
            "volley": self._volley,
            "mtu": self._mtu,
            "look": folders.look,
            "seen": folders.seen,
            "remove": folders.remove,
            "processes": _processes,
            "listener": listener,
        }

    def __call__(self, request: Request) -> Any:
        """Do it. A failure of the system is an answer, too: {FAILED: why}."""
        words = {name: value for name, value in request.items() if name != "do"}
        try:
            return self._tasks[request["do"]](**words)
        except (OSError, StoreError) as error:
            return {FAILED: getattr(error, "strerror", None) or str(error)}

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    def _clock(self) -> tuple[float, float]:
        """How many seconds this clock is ahead of that of rank 0, and the largest error."""
        found = measure(self._store, CLOCK_ROUNDS)
        return -found.offset_ns / 1e9, found.error_ns / 1e9

    def _serve(self, nonce: str) -> dict[str, int]:
        self._server = pairs.PairServer(self._address, self._key, bytes.fromhex(nonce))
        return self._server.ports

    def _ping(self, peers: Mapping[str, list[Any]]) -> dict[str, Any]:
        return pairs.with_each(_addresses(peers), partial(pairs.ping, key=self._key))

    def _volley(self, peer: list[Any], seconds: float) -> dict[str, Any]:
        return pairs.volley((peer[0], peer[1]), self._key, seconds)

    def _mtu(self, peers: Mapping[str, list[Any]], nonce: str, own_mtu: int) -> dict[str, Any]:
        return pairs.with_each(_addresses(peers), lambda to: path_mtu(to[0], to[1], bytes.fromhex(nonce), own_mtu))


def _addresses(peers: Mapping[str, list[Any]]) -> dict[str, tuple[str, int]]:
    return {rank: (str(address), int(port)) for rank, (address, port) in peers.items()}


def _processes(pids: list[int]) -> dict[str, Any]:
    return {"left": left_behind(pids, os.environ), "on_devices": on_devices(pids)}
