"""In: a server that is not the first. Out: it is told which pushes the first server has applied, in order.
Does not apply them (parameter_server.py does)."""

from __future__ import annotations

import threading

from codescent.coupling.parameter_server import WeightServer
from codescent.transport import Client, Kind


def follow(server: WeightServer, first: Client) -> None:
    """Ask the first server for its decisions, in a thread, until `server` is closed.

    Args:
        server: of this process.
        first: a client of the first server, of this thread alone.
    """
    threading.Thread(target=_follow, args=(server, first), name="codescent follows", daemon=True).start()


def _follow(server: WeightServer, first: Client) -> None:
    after = server.queue.count
    try:
        while not server.closed:
            applied = first.request(Kind.ASK, metadata={"after": after}).metadata["pushes"]
            after += len(applied)
            with server.change:
                server.to_apply += [(worker, number) for worker, number in applied]
                server.change.notify_all()
    except BaseException as error:
        if not server.closed:
            with server.change:
                server.failure = error  # SERVE raises it
                server.change.notify_all()
    finally:
        first.close()
