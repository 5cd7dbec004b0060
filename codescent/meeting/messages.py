"""In: an object of JSON, bytes, a connected socket. Out: both, sent or received as one message.
Does not prove who the other side is (transport/authenticate.py does), and carries no tensors (transport/frames.py)."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from codescent.transport.authenticate import exactly
from codescent.transport.sockets import limit

MOST_BYTES = 64 << 20
"""Largest message, where the receiver sets no other."""
_HEADER = struct.Struct("!II")  # bytes of the JSON; bytes of all that follows

Message = tuple[dict[str, Any], list[bytes]]


class BadMessage(ConnectionError):
    """What arrived is no message. The connection cannot be used any longer."""


def send(peer: socket.socket, head: dict[str, Any], data: Sequence[bytes], end_s: float) -> None:
    """Send an object of JSON, and bytes.

    Args:
        peer: a connected socket.
        head: the object.
        data: the bytes, as several values.
        end_s: a time.monotonic(), until which everything must be sent.

    Raises OSError: the other side has gone, the deadline has passed, or the message has 4 GiB or more.
    """
    text = json.dumps([head, [len(value) for value in data]]).encode()
    total = len(text) + sum(map(len, data))
    if total >= 1 << 32:
        raise BadMessage(f"a message of {total:,} bytes")
    limit(peer, end_s)
    peer.sendall(b"".join((_HEADER.pack(len(text), total), text, *data)))


def receive(peer: socket.socket, end_s: float, most_bytes: int = MOST_BYTES) -> Message:
    """Receive what `send` has sent.

    Args:
        peer: a connected socket.
        end_s: a time.monotonic(), until which everything must be there.
        most_bytes: largest message.

    Raises:
        BadMessage: it is no such message.
        OSError: the other side has gone, or the deadline has passed.
    """
    begin, total = _HEADER.unpack(exactly(peer, _HEADER.size, end_s))
    if begin > total or total > most_bytes:
        raise BadMessage(f"a message of {total:,} bytes, {begin:,} of them JSON")
    whole = exactly(peer, total, end_s)
    try:
        head, sizes = json.loads(whole[:begin])
        data, at = [], begin
        for size in sizes:
            if size < 0:
                raise ValueError(f"a value of {size} bytes")
            data.append(whole[at : at + size])
            at += size
    except (ValueError, TypeError, RecursionError) as error:
        raise BadMessage("a message that does not begin with JSON and the sizes of its values") from error
    if not isinstance(head, dict) or at != total:
        raise BadMessage("a message whose sizes do not fit")
    return head, data
