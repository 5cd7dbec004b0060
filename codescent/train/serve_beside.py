"""In: a server in the process of a worker. Out: a thread that serves beside the worker's computation.
Does not decide what a server does (serve.py does)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from codescent.base.stopwatch import beside
from codescent.train.serve import LOOK_S, Serving


def serve_beside(
    serving: Serving,
    rate_of: Callable[[int], float],
    give_up: Callable[[BaseException], None],
    hang_up: Callable[[], None],
) -> None:
    """SERVE in a thread.

    Args:
        serving: the server.
        rate_of: learning rate of a step.
        give_up: this process ends by an error.
        hang_up: ends the requests of the worker in this process. It would wait for its own server, or for another one.
    """
    arguments = serving, rate_of, give_up, hang_up
    serving.thread = threading.Thread(target=_serve_all, args=arguments, name="codescent serves", daemon=True)
    serving.thread.start()


def _serve_all(
    serving: Serving,
    rate_of: Callable[[int], float],
    give_up: Callable[[BaseException], None],
    hang_up: Callable[[], None],
) -> None:
    beside()
    try:
        while not (serving.closed or serving.has_ended):
            with serving.change:
                serving.change.wait_for(lambda: serving.done < serving.allowed or serving.closed, LOOK_S)
                number = serving.done
                waits = number >= serving.allowed
            if not (waits or serving.closed):
                serving.serve(number, rate_of(number))
    except BaseException as error:
        give_up(error)
        hang_up()
