"""In: a server that is not the first. Out: it is told which pushes the first server has applied, in order.
Does not apply them (serve.py does)."""

from __future__ import annotations

import threading

from codescent.train.serve import Serving
from codescent.transport import Client, Kind


def follow(serving: Serving, first: Client) -> None:
    """Ask the first server for its decisions, in a thread, until `serving` is closed.

    Args:
        serving: of this process.
        first: a client of the first server, of this thread alone.
    """
    threading.Thread(target=_follow, args=(serving, first), name="codescent follows", daemon=True).start()


def _follow(serving: Serving, first: Client) -> None:
    after = serving.pushes
    try:
        while not serving.closed:
            applied = first.request(Kind.ASK, metadata={"after": after}).metadata["pushes"]
            after += len(applied)
            with serving.change:
                serving.to_apply += [(worker, number) for worker, number in applied]
                serving.change.notify_all()
    except BaseException as error:
        if not serving.closed:
            with serving.change:
                serving.failure = error  # SERVE raises it
                serving.change.notify_all()
    finally:
        first.close()
