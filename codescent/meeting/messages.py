"""In: an object of JSON, bytes, a connected socket. Out: both, sent or received as one frame of transport.
Does not prove who the other side is (transport/authenticate.py does)."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from codescent.transport import frames
from codescent.transport.frames import Frame, FrameError, Kind

Message = tuple[dict[str, Any], list[bytes]]


def send(peer: socket.socket, head: dict[str, Any], data: Sequence[bytes], end_s: float) -> None:
    """Send an object of JSON, and bytes.

    Args:
        peer: a connected socket.
        head: the object. It is the first payload of the frame: it may be larger than a frame's metadata.
        data: the other payloads.
        end_s: a time.monotonic(), until which everything must be sent.

    Raises OSError: the other side has gone, or the deadline has passed.
    """
    parts = [json.dumps(head).encode(), *data]
    frames.send(peer, Frame(Kind.ASK, 0), [memoryview(part) for part in parts], end_s)


def receive(peer: socket.socket, end_s: float, most_bytes: int = frames.MOST_BYTES) -> Message:
    """Receive what `send` has sent.

    Args:
        peer: a connected socket.
        end_s: a time.monotonic(), until which everything must be there.
        most_bytes: largest sum of the payloads.

    Raises:
        FrameError: it is not such a message.
        OSError: the other side has gone, or the deadline has passed.
    """
    frame = frames.receive(peer, end_s, most_bytes)
    if frame is None:
        raise ConnectionResetError("the other side has disconnected")
    parts = [bytearray(length) for length in frame.lengths]
    frames.receive_payloads(peer, frame, [memoryview(part) for part in parts], end_s)
    try:
        head = json.loads(parts[0])
    except (ValueError, LookupError, RecursionError) as error:
        raise FrameError("a message that does not begin with JSON") from error
    if not isinstance(head, dict):
        raise FrameError("a message that does not begin with an object of JSON")
    return head, [bytes(part) for part in parts[1:]]
