"""In: a connected socket, and memory. Out: frames: a header, a little JSON, and bytes sent and received in place.
Does not know what a frame means, and trusts no length: whoever sends has proved the key (authenticate.py)."""

from __future__ import annotations

import json
import math
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MAGIC = b"cdst"
PROTOCOL = 1
"""Version of the frame format. Another one is refused."""
MOST_METADATA = 1 << 16
"""Largest metadata, in bytes of JSON."""
MOST_PAYLOADS = 1 << 16
"""Most payloads of a frame."""
MOST_BYTES = 1 << 36
"""Largest sum of a frame's payloads, in bytes, where the receiver sets no other."""
PIECE = 1 << 20
"""Bytes that are checked while they are in the cache. The kernel sends one piece while the next is checked."""

# header, payload lengths, JSON, CRC-32 of the lengths and the JSON; where there are payloads: payloads, their CRC-32.
# The last CRC comes last, so that it is computed while the network is busy, and not before.
_HEADER = struct.Struct("!4sHHiQqIIQI")  # magic, protocol, kind, sender, request, version, JSON, payloads, bytes, check
_LENGTH = struct.Struct("!Q")
_CHECK = struct.Struct("!I")


class FrameError(ConnectionError):
    """What arrived is not a frame, or not the expected one. The connection cannot be used any longer."""


class SizesDiffer(FrameError):
    """The payloads of a frame have other sizes than the memory for them."""


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    PUSH = 2
    PULL = 3
    EXCHANGE = 4
    ASK = 5
    ANSWER = 6
    REFUSED = 7


@dataclass(frozen=True)
class Frame:
    """The head of a frame.

    Attributes:
        kind: what it is for.
        sender: rank of the process that sends it.
        request: number of the request. The answer, and the same request sent again, have the same number.
        version: of the weights.
        metadata: an object of JSON, at most MOST_METADATA bytes.
        lengths: bytes of each payload.
    """

    kind: Kind
    sender: int
    request: int = 0
    version: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()


def send(peer: socket.socket, frame: Frame, payloads: Sequence[memoryview] = (), end_s: float = math.inf) -> None:
    """Send a frame. Its payloads are not copied: nobody may change them meanwhile.

    Args:
        peer: a connected socket.
        frame: the head; its `lengths` are ignored.
        payloads: contiguous memory, of any format.
        end_s: a time.monotonic(), until which everything must be sent.

    Raises:
        ValueError: metadata or payloads are too large.
        OSError: the peer has gone, or the deadline has passed.
    """
    parts = [part.cast("B") for part in payloads]
    check = 0
    waiting = [memoryview(_head(frame, [part.nbytes for part in parts]))]
    for piece in _pieces(parts):
        check = zlib.crc32(piece, check)
        waiting.append(piece)
        if sum(one.nbytes for one in waiting) >= PIECE:
            _send_all(peer, waiting, end_s)
            waiting = []
    if parts:
        waiting.append(memoryview(_CHECK.pack(check)))
    _send_all(peer, waiting, end_s)


def receive(peer: socket.socket, end_s: float = math.inf, most_bytes: int = MOST_BYTES) -> Frame | None:
    """Receive the head of a frame. The payloads, if there are any, have to be received next.

    Args:
        peer: a connected socket.
        end_s: a time.monotonic(), until which the head must be there.
        most_bytes: largest sum of the payloads.

    Returns:
        None if the peer has disconnected after a whole frame.

    Raises:
        FrameError: it is not a frame of this protocol, is larger than allowed, or its checksum is wrong.
        OSError: the peer has gone, or the deadline has passed.
    """
    header = bytearray(_HEADER.size)
    if not _receive_all(peer, memoryview(header), end_s, may_end=True):
        return None
    magic, protocol, kind, sender, request, version, size, count, total, check = _HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(f"no frame begins with {bytes(magic)!r}")
    if protocol != PROTOCOL:
        raise FrameError(f"protocol {protocol}, not {PROTOCOL}: the other side is another release of codescent")
    if size > MOST_METADATA or count > MOST_PAYLOADS or total > most_bytes:
        raise FrameError(f"too large: {size} bytes of metadata, {count} payloads, {total} bytes")
    if zlib.crc32(header[: -_CHECK.size]) != check:
        raise FrameError("the checksum of a header is wrong")
    rest = bytearray(count * _LENGTH.size + size + _CHECK.size)
    _receive_all(peer, memoryview(rest), end_s)
    if zlib.crc32(rest[: -_CHECK.size]) != _CHECK.unpack(rest[-_CHECK.size :])[0]:
        raise FrameError("the checksum of metadata is wrong")
    lengths = tuple(length for (length,) in _LENGTH.iter_unpack(rest[: count * _LENGTH.size]))
    if sum(lengths) != total:
        raise FrameError(f"payloads of {sum(lengths)} bytes, announced as {total}")
    return Frame(_kind(kind), sender, request, version, _metadata(rest[count * _LENGTH.size : -_CHECK.size]), lengths)


def receive_payloads(peer: socket.socket, frame: Frame, into: Sequence[memoryview], end_s: float = math.inf) -> None:
    """Receive the payloads of a frame into memory, without a copy. After an error the memory is undefined.

    Args:
        peer: the socket from which `frame` was received.
        frame: the head.
        into: contiguous, writable memory of exactly `frame.lengths` bytes.
        end_s: a time.monotonic(), until which everything must be there.

    Raises:
        SizesDiffer: other sizes are expected.
        FrameError: the checksum is wrong.
        OSError: the peer has gone, or the deadline has passed.
    """
    parts = [part.cast("B") for part in into]
    if tuple(part.nbytes for part in parts) != frame.lengths:
        raise SizesDiffer(f"payloads of {frame.lengths} bytes; expected {tuple(part.nbytes for part in parts)}")
    _received(peer, _pieces(parts), bool(parts), end_s)


def skip_payloads(peer: socket.socket, frame: Frame, end_s: float = math.inf) -> None:
    """Receive the payloads of a frame and drop them.

    Raises:
        FrameError: the checksum is wrong.
        OSError: the peer has gone, or the deadline has passed.
    """
    scrap, total = memoryview(bytearray(min(PIECE, sum(frame.lengths)))), sum(frame.lengths)
    pieces = (scrap[: min(PIECE, total - start)] for start in range(0, total, PIECE))
    _received(peer, pieces, bool(frame.lengths), end_s)


def _received(peer: socket.socket, pieces: Iterator[memoryview], checked: bool, end_s: float) -> None:
    check = 0
    for piece in pieces:
        _receive_all(peer, piece, end_s)
        check = zlib.crc32(piece, check)
    if checked:
        found = bytearray(_CHECK.size)
        _receive_all(peer, memoryview(found), end_s)
        if _CHECK.unpack(found)[0] != check:
            raise FrameError("the checksum of payloads is wrong")


def _head(frame: Frame, lengths: Sequence[int]) -> bytes:
    text = json.dumps(frame.metadata).encode()
    if len(text) > MOST_METADATA or len(lengths) > MOST_PAYLOADS:
        raise ValueError(f"too large: {len(text)} bytes of metadata, {len(lengths)} payloads")
    sizes = (len(text), len(lengths), sum(lengths))
    fields = (MAGIC, PROTOCOL, frame.kind, frame.sender, frame.request, frame.version, *sizes)
    header = _HEADER.pack(*fields, 0)[: -_CHECK.size]
    rest = b"".join((*map(_LENGTH.pack, lengths), text))
    return b"".join((header, _CHECK.pack(zlib.crc32(header)), rest, _CHECK.pack(zlib.crc32(rest))))


def _kind(value: int) -> Kind:
    try:
        return Kind(value)
    except ValueError as error:
        raise FrameError(f"frames of kind {value} are not known") from error


def _metadata(text: bytearray) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("metadata is not JSON") from error
    if not isinstance(found, dict):
        raise FrameError("metadata is not an object of JSON")
    return found


def _pieces(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    return (part[start : start + PIECE] for part in parts for start in range(0, part.nbytes, PIECE))


def _send_all(peer: socket.socket, waiting: list[memoryview], end_s: float) -> None:
    while waiting:
        peer.settimeout(_left(end_s))
        sent = peer.sendmsg(waiting[:512])  # IOV_MAX is 1024
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


def _receive_all(peer: socket.socket, into: memoryview, end_s: float, *, may_end: bool = False) -> bool:
    """Fill memory. False: the peer has disconnected before the first byte, and `may_end`."""
    start = 0
    while start < into.nbytes:
        peer.settimeout(_left(end_s))
        count = peer.recv_into(into[start:])
        if not count:
            if may_end and not start:
                return False
            raise FrameError("the other side has disconnected within a frame")
        start += count
    return True


def _left(end_s: float) -> float | None:
    if math.isinf(end_s):
        return None
    left = end_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
