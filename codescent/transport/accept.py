"""In: a listening socket. Out: its connections, each in a thread of its own, whatever strangers do at the port.
Does not prove who the other side is (authenticate.py does) and reads nothing."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

MOST_STRANGERS = 128
"""Most peers that have not proved the key yet. Further ones are disconnected; processes of the run try again."""
AGAIN_S = 0.2
"""Seconds before the next try to accept, where the system has given no connection."""

Known = Callable[[], None]
"""Is called once: the peer has proved the key, or was refused. It counts no more among the strangers."""


class Acceptor:
    """Accepts connections until it is closed.

    A process that opens connections and says nothing shuts nobody out for long. It takes at most `strangers` places,
    each for the seconds of a handshake. Where no descriptor or no thread is left, the loop goes on.

    Args:
        listener: is closed at the end.
        act: the life of a connection, in a thread of its own. It closes the connection, or hands it on.
        name: of the thread that accepts.
        strangers: most peers that have not proved the key yet.
    """

    def __init__(
        self,
        listener: socket.socket,
        act: Callable[[socket.socket, str, Known], None],
        name: str,
        strangers: int = MOST_STRANGERS,
    ) -> None:
        self._listener, self._act = listener, act
        self._strangers = threading.Semaphore(strangers)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. The connections stay."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(AGAIN_S)  # no descriptor is left: connections of strangers end after a handshake
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            act = functools.partial(self._act, connection, address[0], _once(self._strangers.release))
            try:
                threading.Thread(target=act, name="codescent peer", daemon=True).start()
            except RuntimeError:  # no thread can be started now: the process of the run tries again
                self._strangers.release()
                connection.close()


def _once(act: Callable[[], None]) -> Known:
    """The function, which does nothing when it is called again."""
    todo = [act]

    def call() -> None:
        if todo:
            todo.pop()()

    return call
