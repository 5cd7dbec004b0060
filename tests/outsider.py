"""In: addresses of listeners, and the key of their run. Out: a line of JSON for each attack on each: how it ended.
Runs as a process on another host. Does not judge: the test that starts it does."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from codescent.meeting.store_server import PURPOSE
from codescent.transport.authenticate import TRANSPORT, NotProved, prove
from codescent.transport.frames import MAGIC, MOST_BYTES, PROTOCOL, Kind

NUMBER = 32
"""Bytes that our listeners say first: a random number."""
PATIENCE_S = 8.0
"""Longer than a listener waits for a proof."""
EVERY_S = 0.2

_HEADER = struct.Struct("!4sHHiQqIIQ")


def header(total: int) -> bytes:
    """A greeting of rank 0 with one payload of so many bytes."""
    head = _HEADER.pack(MAGIC, PROTOCOL, Kind.HELLO, 0, 0, 0, 2, 1, total)
    rest = struct.pack("!Q", total) + b"{}"
    return b"".join((head, struct.pack("!I", zlib.crc32(head)), rest, struct.pack("!I", zlib.crc32(rest))))


def until_closed(peer: socket.socket) -> tuple[str, int]:
    """How the connection ended, and how many bytes other than zero came after the first number."""
    peer.settimeout(PATIENCE_S)
    said = b""
    try:
        while more := peer.recv(4096):
            said += more
    except TimeoutError:
        return "open", len(said[NUMBER:].strip(b"\0"))
    except OSError:  # it was reset: closed, too
        return "closed", len(said[NUMBER:].strip(b"\0"))
    return "closed", len(said[NUMBER:].strip(b"\0"))


def sends(data: bytes) -> Callable[[socket.socket], tuple[str, int]]:
    def attack(peer: socket.socket) -> tuple[str, int]:
        peer.sendall(data)
        return until_closed(peer)

    return attack


def slowly(peer: socket.socket) -> tuple[str, int]:
    end_s = time.monotonic() + PATIENCE_S
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while time.monotonic() < end_s:
            peer.sendall(b"x")
            time.sleep(EVERY_S)
    except OSError:
        return "closed", 0
    return "open", 0


def proves(key: bytes, purpose: bytes, then: bytes = b"") -> Callable[[socket.socket], tuple[str, int]]:
    def attack(peer: socket.socket) -> tuple[str, int]:
        peer.settimeout(PATIENCE_S)
        try:
            prove(peer, key, serves=False, purpose=purpose)
        except NotProved:
            return until_closed(peer)[0], 0
        except TimeoutError:
            return "open", 0
        except OSError:
            return "closed", 0
        peer.sendall(then)
        end, count = until_closed(peer)
        return f"proved, {end}", count

    return attack


def main() -> None:
    asked = json.loads(sys.argv[1])
    key = bytes.fromhex(asked["key"])
    attacks = {
        "no token": sends(b""),
        "garbage": sends(os.urandom(4096)),
        "frame of 9 MB": sends(header(9 << 20)),
        "frame beyond the largest": sends(header(MOST_BYTES + 1)),
        "slow": slowly,
    }
    for name, purpose in (("server", TRANSPORT), ("store", PURPOSE)):
        attacks[f"wrong token, {name}"] = proves(b"another key", purpose)
    # The holder of the token, too, may not announce more than the largest message.
    attacks["right token, server"] = proves(key, TRANSPORT, header(MOST_BYTES + 1))
    attacks["right token, store"] = proves(key, PURPOSE, struct.pack("!II", 1, 9 << 20))

    def one(address: tuple[str, int], name: str) -> str:
        with socket.create_connection(tuple(address), timeout=PATIENCE_S) as peer:
            end, count = attacks[name](peer)
        return json.dumps({"address": address, "attack": name, "end": end, "bytes": count})

    def first(address: tuple[str, int]) -> bool:
        with socket.create_connection(tuple(address), timeout=PATIENCE_S) as peer:
            peer.settimeout(2.0)
            try:
                return len(peer.recv(NUMBER)) == NUMBER
            except TimeoutError:
                return False

    with ThreadPoolExecutor(64) as pool:
        ours = list(pool.map(first, asked["ports"]))
        todo = [(address, name) for address in asked["ports"] for name in attacks]
        lines = list(pool.map(lambda words: one(*words), todo))
    print(json.dumps([address for address, mine in zip(asked["ports"], ours, strict=True) if mine]))
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
