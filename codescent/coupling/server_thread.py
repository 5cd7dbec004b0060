"""In: a server in the process of a worker. Out: a thread that serves beside the worker's computation.
Does not decide what a server does (parameter_server.py does)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from codescent.base.stopwatch import beside
from codescent.coupling.parameter_server import LOOK_S, WeightServer


def serve_beside(
    server: WeightServer,
    rate_of: Callable[[int], float],
    give_up: Callable[[BaseException], None],
    hang_up: Callable[[], None],
) -> None:
    """SERVE in a thread.

    Args:
        server: of this rank.
        rate_of: learning rate of a step.
        give_up: this process ends by an error.
        hang_up: ends the requests of the worker in this process. It would wait for its own server, or for another one.
    """

    def serve() -> None:
        beside()
        try:
            while not (server.closed or server.has_ended):
                with server.change:
                    server.change.wait_for(lambda: server.queue.done < server.allowed or server.closed, LOOK_S)
                    number = server.queue.done
                    waits = number >= server.allowed
                if not (waits or server.closed):
                    server.serve(number, rate_of(number))
        except BaseException as error:
            give_up(error)
            hang_up()

    server.thread = threading.Thread(target=serve, name="codescent serves", daemon=True)
    server.thread.start()
