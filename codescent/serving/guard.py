"""In: every request by HTTP. Out: it reaches the application, or is answered by an error in OpenAI's form.
Does not know the endpoints (app.py does)."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import Collection
from contextlib import suppress
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codescent.base.output import warn
from codescent.base.visible import one_line
from codescent.serving.hang_up import HungUp
from codescent.serving.refused import RefusedRequest
from codescent.serving.service import ModelService

JSON = "application/json"
ALWAYS = ("/health", "/metrics")
"""Paths that are answered while the process stops, too."""
OPEN = ("/", "/health")
"""Paths that need no token: the page asks for it, and health is for those who only start the process again."""
OPEN_FOLDER = "/page/"
LINGER_S = 2.0
OTHER = "other"
"""Stands for all paths that are not there, in figures: a client must not make new ones."""


class Guard:
    """Refuses requests by their headers, counts them, and answers errors.

    A page of the web could send requests to this machine by its user's browser. So a request to the loopback address
    must name this machine as its host; else a name of the attacker's may lead here ("DNS rebinding"). A request that
    names no host comes from no browser. And a body must be JSON, which a browser sends elsewhere only if that place
    allows it.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: ModelService,
        paths: Collection[str],
        token: str | None,
        hosts: Collection[str] | None,
    ) -> None:
        """`token`: what the client must know; None: nothing. `hosts`: by which names it may ask; None: by any."""
        self._app, self._service, self._paths, self._token, self._hosts = app, service, paths, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["app"] = self  # so the router raises HTTPException, and answers nothing itself
        status, is_whole, is_read = 0, False, False
        identity = secrets.token_hex(8)

        async def watched(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", identity.encode())]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def reading() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def answer(error: RefusedRequest) -> None:
            await _answer(error, scope, reading, watched, is_read=is_read)

        try:
            await self._pass(scope, reading, watched)
        except HungUp:
            self._service.watch.hung_up()
        except RefusedRequest as error:
            await answer(error)
        except HTTPException as error:
            said = f"there is no {scope['method']} {scope['path'][:100]} here"
            await answer(RefusedRequest(error.status_code, said, allow=(error.headers or {}).get("Allow")))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # also what a library in Rust raises in a panic
            asked = one_line(f"{scope['method']} {scope['path'][:100]}")
            warn(f"request {identity}: {asked}: {traceback.format_exc()}")
            if not status:
                await answer(RefusedRequest(500, f"a fault of the program, in its log as request {identity}"))
        finally:
            if is_whole:
                path = scope["path"] if scope["path"] in self._paths else OTHER
                self._service.watch.answered(path, status)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        self._refuse_host(headers)
        self._refuse_unknown(headers, path)
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise RefusedRequest(415, f"the header content-type must be {JSON}")
        if path in ALWAYS:
            return await self._app(scope, receive, send)
        self._service.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.end()

    def _refuse_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        if host and self._hosts is not None and name.strip("[]").lower() not in self._hosts:
            said = f"the host {name[:100]!r} is not this machine; ask for {', '.join(sorted(self._hosts))}"
            raise RefusedRequest(HTTPStatus.MISDIRECTED_REQUEST, said)

    def _refuse_unknown(self, headers: Headers, path: str) -> None:
        if self._token is None or path in OPEN or path.startswith(OPEN_FOLDER):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token.encode()):
            said = "the header authorization must be: Bearer TOKEN, with the token that `codescent serve` has named"
            raise RefusedRequest(401, said, code="invalid_api_key")


async def _answer(error: RefusedRequest, scope: Scope, receive: Receive, send: Send, *, is_read: bool) -> None:
    """Send an error, and close the connection.

    What is left of the request is read for LINGER_S, and dropped. Else the kernel would reset the connection, and a
    client that is still sending would not see the answer.
    """

    async def lingering(message: Message) -> None:
        if message["type"] == "http.response.body" and not is_read:
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await receive()).get("more_body", False):
                        pass
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    headers = {**error.headers, "connection": "close"}
    await JSONResponse(error.body, error.status, headers)(scope, receive, lingering)
