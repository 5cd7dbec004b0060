"""In: the address of another host. Out: the largest packet that reaches it whole. A server for the probes of others.
Does not trust what the kernel has learnt of the way before: each size is tried, and may not be fragmented."""

from __future__ import annotations

import socket
import struct
import sys
import time
from contextlib import suppress

SIZES = (576, 1280, 1400, 1420, 1450, 1480, 1492, 1500, 2044, 4092, 8951, 9000)
"""MTUs that occur. Between the largest that passes and the smallest that does not, the way ends."""
LEAST = 200
"""Bytes of a packet that passes everywhere, unless datagrams are blocked."""
MOST = 65_000
"""A datagram cannot be much larger. Interfaces may have more: 65,520 with InfiniBand, 65,536 is usual for loopback."""
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
TRIES, TRY_S = 3, 0.3
_PROBE = {  # linux/in.h, linux/in6.h: packets may not be fragmented, and what is known of the way is ignored
    socket.AF_INET: (socket.IPPROTO_IP, 10, 3),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3),
}
_SIZE = struct.Struct(">I")


def echo(server: socket.socket, nonce: bytes) -> None:
    """Answer each datagram that begins with the nonce by its size."""
    with suppress(OSError):  # closed
        while True:
            data, sender = server.recvfrom(1 << 16)
            if data.startswith(nonce):
                server.sendto(nonce + _SIZE.pack(len(data)), sender)


def path_mtu(address: str, port: int, nonce: bytes, own_mtu: int) -> int | None:
    """The largest size up to `own_mtu` and MOST that passes; None: no datagram passes, or this system cannot tell."""
    if not sys.platform.startswith("linux"):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own_mtu = min(own_mtu, MOST)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(*_PROBE[family])
        probe.connect((address, port))
        if _passes(probe, nonce, own_mtu, family):
            return own_mtu
        if not _passes(probe, nonce, LEAST, family):
            return None
        if _passes(probe, nonce, own_mtu, family):  # the machine was busy
            return own_mtu
        sizes = [LEAST, *(size for size in SIZES if size < own_mtu), own_mtu]
        low, high = 0, len(sizes) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _passes(probe, nonce, sizes[middle], family) else (low, middle)
        return sizes[low]


def _passes(probe: socket.socket, nonce: bytes, size: int, family: int) -> bool:
    """Whether a packet of this size, with its headers, is answered."""
    data = nonce + bytes(size - HEADERS[socket.AddressFamily(family)] - len(nonce))
    for _ in range(TRIES):
        end_s = time.monotonic() + TRY_S
        try:
            probe.send(data)
            while (left_s := end_s - time.monotonic()) > 0:
                probe.settimeout(left_s)
                if probe.recv(1 << 10) == nonce + _SIZE.pack(len(data)):
                    return True
        except OSError:  # too large for the own interface, refused, or no answer in time
            time.sleep(max(0.0, min(0.05, end_s - time.monotonic())))
    return False
