"""In: the bytes of a connection. Out: requests for the application; a connection that sends none is closed.
Does not read bodies or check requests (the application does). It extends uvicorn's protocol for HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from codescent.serving.refused import RefusedRequest

HEAD_S = 30.0
"""Seconds in which the headers of the first request must have come, or what is left of those of a next one."""
NOT_HTTP = "this is no request of HTTP/1.1, or its headers are too long"


class HttpConnection(H11Protocol):
    """A connection that is closed if no request comes, and answers what is no HTTP in OpenAI's form.

    uvicorn waits for ever for the headers of a request. So clients that send nothing could use up all descriptors.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._is_answering:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """An answer was sent: the connection may bring another request."""
        super().on_response_complete()
        if not self._is_answering and not self.transport.is_closing():
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. `msg`: uvicorn's words, which name nothing."""
        error = RefusedRequest(400, NOT_HTTP)
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (answer, h11.Data(data=json.dumps(error.body).encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
