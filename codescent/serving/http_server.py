"""In: a service, an address. Out: it is reached there until a signal comes, and its running requests have ended.
Does not answer requests (app.py does) or open a model (verbs/serve.py does)."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from codescent.base.counted import counted
from codescent.base.errors import RunFailed, UserError
from codescent.base.output import note, warn, warn_once
from codescent.serving.app import make_app
from codescent.serving.connection import HttpConnection
from codescent.serving.service import ModelService

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
BACKLOG = 512
"""Connections that wait to be accepted."""
STALL_S = 60.0
"""A client that takes nothing of its answer for so many seconds is left: the kernel closes the connection."""
FLUSH_S, CUT_S = 10, 1
"""Seconds in which clients must take the rest of their answers when the process ends: of whole ones; of others."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0: a free one. Raises UserError: it cannot, such as a port in use."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is no name of a host"
        raise UserError(f"--host {host}: {said}; give an address of this machine") from error
    family, kind, protocol, _, address = infos[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL_S))
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        if host and not _is_about_port(error):
            raise UserError(f"--host {host}: {error.strerror}; give an address of this machine") from error
        other = "give another --port; 0 takes a free one"
        raise UserError(f"--port {port}: cannot listen at {host}: {error.strerror}; {other}") from error
    return found


def _is_about_port(error: OSError) -> bool:
    return error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


def is_loopback(listening: socket.socket) -> bool:
    """Whether only processes of this machine reach a socket."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listening: socket.socket) -> str:
    """The address of a socket as a client gives it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn whose signals go to a function of ours: it would close the listening socket at once."""

    on_signal: Callable[[int], None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT has come, in the main thread, while the loop runs."""
        self.on_signal(sig)


def _say_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what has failed in the loop itself, such as a connection that cannot be accepted."""
    error = context.get("exception")
    if isinstance(error, OSError):
        warn_once(f"{context['message']}: {error.strerror}")
    else:
        loop.default_exception_handler(context)


async def run(service: ModelService, listening: socket.socket, *, token: str | None, host: str, grace_s: float) -> None:
    """Serve until SIGTERM or SIGINT, and then until the running requests have ended.

    They may take `grace_s` seconds. A second signal ends them at once. Raises RunFailed: the engine has failed.
    """
    # With a token a name of an attacker leads nowhere; and a proxy with TLS hands on the name that clients use.
    hosts = LOOPBACK_NAMES | {host.lower()} if is_loopback(listening) and token is None else None
    app = make_app(service, token=token, hosts=hosts)
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
    )
    server, loop = _Uvicorn(config), asyncio.get_running_loop()
    loop.set_exception_handler(_say_fault)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has gone
    signals = 0

    def end() -> None:
        if service.active:
            warn(f"{counted(service.active, 'request')} ended before the answer was complete")
        config.timeout_graceful_shutdown = CUT_S if service.active else FLUSH_S
        server.should_exit = True

    def stop(number: int) -> None:
        if service.active:
            running = counted(service.active, "request")
            note(f"{signal.Signals(number).name}: new requests are refused; {running} may go on for {grace_s:g} s")
        loop.call_later(grace_s, end)
        service.stop()

    def signalled(number: int) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            loop.call_soon_threadsafe(stop, number)
        else:
            loop.call_soon_threadsafe(end)

    server.on_signal = signalled
    service.on_idle = end
    if service.thread is not None:
        service.thread.on_failure = end
        service.thread.start()
    try:
        await server.serve(sockets=[listening])
    finally:
        if service.thread is not None:
            await service.thread.close()
        if service.log is not None:
            service.log.close()
    if service.thread is not None and service.thread.failure:
        raise RunFailed(f"the engine has stopped: {service.thread.failure}")
