"""In: the connection of a request, work for it. Out: the result of the work, unless the client hangs up before.
Does not know what the work is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from codescent.serving.refused import RefusedRequest

T = TypeVar("T")
BODY_S = 30.0
"""Seconds in which the body of a request must have come."""


class HungUp(Exception):
    """The client has closed the connection, or the kernel has: nobody waits for the answer."""


async def body_of(receive: Receive, length: str | None, most_bytes: int) -> bytes:
    """The body of a request. A longer one is refused without reading it, or after `most_bytes` if no length is given.

    `length`: the header content-length. Raises RefusedRequest 408 or 413; HungUp.
    """
    too_long = RefusedRequest(413, f"the body has more than {most_bytes:,} bytes, the most that is read here")
    if length is not None and int(length) > most_bytes:  # the HTTP library has refused what is no number
        raise too_long
    pieces, left, more = list[bytes](), most_bytes, True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HungUp
                pieces.append(message.get("body", b""))
                left -= len(pieces[-1])
                more = message.get("more_body", False)
                if left < 0:
                    raise too_long
    except TimeoutError as error:
        raise RefusedRequest(408, f"the body has not come within {BODY_S:.0f} s") from error
    return b"".join(pieces)


async def until_hang_up(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work; it is cancelled when the client hangs up. Raises HungUp, and what the work raises."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_closed(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
