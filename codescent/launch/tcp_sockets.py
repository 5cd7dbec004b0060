"""In: the ids of processes. Out: what the kernel counts of each TCP connection that they have to other machines.
Says nothing to the peers. Does not judge who is slow (slow_links.py does). Linux only: elsewhere nothing is known."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from codescent.base.proc import PROC

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h. Any user may ask; `ss -ti` shows the same. A rank
# could ask for its own sockets (getsockopt), but then each rank would work for it.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_ESTABLISHED, _WITH_INFO, _INFO = 1 << 1, 1 << 1, 2
_HEAD = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, any address
_SOCKET = struct.Struct("=BBBB4x16s16s4xQIIIII")  # family, -, -, -, source, target, cookie, -, queues, user, inode
_ATTRIBUTE = struct.Struct("=HH")
_AT_ACKED, _AT_BUSY = 120, 168
_COUNTED = struct.Struct("=QQQ")  # busy, of it limited by the receiver's window, limited by the send buffer
_READ_BYTES = 1 << 18
ANSWER_S = 1.0


@dataclass(frozen=True)
class Connection:
    """What the kernel has counted of a connection since it was opened.

    Attributes:
        source: address of this end.
        target: address of the other end.
        sent_bytes: that the other end has acknowledged.
        busy_s: seconds in which bytes were on their way, or waited for it.
        full_s: of these, those in which the receiver had no room: its process does not read.
    """

    source: str
    target: str
    sent_bytes: int
    busy_s: float
    full_s: float


def connections_of(pids: Iterable[int]) -> dict[int, Connection]:
    """The connections of processes to other machines, by a number that no other connection ever has."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    found: dict[int, Connection] = {}
    if sys.platform == "linux" and inodes:
        with suppress(OSError):  # a container may forbid the question, or the kernel has no answer
            for family in (socket.AF_INET, socket.AF_INET6):
                found |= {cookie: one for cookie, inode, one in _dumped(family) if inode in inodes}
    return {cookie: one for cookie, one in found.items() if one.source != one.target}


def _inodes(pid: int) -> Iterator[int]:
    """The sockets that a process has open."""
    folder = PROC / str(pid) / "fd"
    with suppress(OSError):  # it has ended, or belongs to another user
        for entry in folder.iterdir():
            with suppress(OSError):  # it is closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:["):
                    yield int(name[8:-1])


def _dumped(family: int) -> Iterator[tuple[int, int, Connection]]:
    """All connections of a family: cookie, inode, counts."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as peer:
        peer.settimeout(ANSWER_S)
        asked = _REQUEST.pack(family, socket.IPPROTO_TCP, _WITH_INFO, _ESTABLISHED)
        peer.send(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _DUMP, 0, 0) + asked)
        while True:
            data, at = peer.recv(_READ_BYTES), 0
            while at < len(data):
                size, kind, *_ = _HEAD.unpack_from(data, at)
                if kind != _BY_FAMILY:  # the end, or an error
                    return
                yield from _read(data[at + _HEAD.size : at + size])
                at += -(-size // 4) * 4


def _read(message: bytes) -> Iterator[tuple[int, int, Connection]]:
    family, _, _, _, source, target, cookie, _, _, _, _, inode = _SOCKET.unpack_from(message)
    at = _SOCKET.size
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO and size >= _ATTRIBUTE.size + _AT_BUSY + _COUNTED.size:  # an older kernel counts less
            info = at + _ATTRIBUTE.size
            (sent,) = struct.unpack_from("=Q", message, info + _AT_ACKED)
            busy_us, full_us, _ = _COUNTED.unpack_from(message, info + _AT_BUSY)
            ends = _address(family, source), _address(family, target)
            yield cookie, inode, Connection(*ends, sent, busy_us / 1e6, full_us / 1e6)
        at += max(4, -(-size // 4) * 4)


def _address(family: int, packed: bytes) -> str:
    return socket.inet_ntop(family, packed[:4] if family == socket.AF_INET else packed)
