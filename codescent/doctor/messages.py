"""In: JSON data, a connected socket. Out: the data, sent or received as a frame of a length and text.
Does not prove who the other side is (transport/authenticate.py does)."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from codescent.transport.authenticate import exactly

MOST_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


def send(peer: socket.socket, data: Any) -> None:
    """Send JSON data. Raises OSError: the other side has gone."""
    text = json.dumps(data).encode()
    peer.sendall(_LENGTH.pack(len(text)) + text)


def receive(peer: socket.socket, within_s: float) -> Any:
    """Receive JSON data. Raises OSError: the other side has gone, or says nothing within so many seconds."""
    end_s = time.monotonic() + within_s
    (length,) = _LENGTH.unpack(exactly(peer, _LENGTH.size, end_s))
    if length > MOST_BYTES:
        raise ConnectionError(f"a message of {length:,} bytes: this is no rank of codescent doctor")
    text = exactly(peer, length, end_s)
    peer.settimeout(None)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a message that is no JSON: this is no rank of codescent doctor") from error
