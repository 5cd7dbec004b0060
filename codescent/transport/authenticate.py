"""In: a connected socket, and the key of the run. Out: nothing, if the other side has proved that it knows the key.
Does not send the key, and does not encrypt what follows."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time

from codescent.transport.sockets import limit

HANDSHAKE_S = 5.0
"""A peer is disconnected if it has not proved that it knows the key within this many seconds."""

_NUMBER, _PROOF = 32, hashlib.sha256().digest_size
TRANSPORT = b"codescent transport 1 "
"""The purpose of a proof. A proof for the store (meeting/store_server.py) is none for this transport."""


class NotProved(ConnectionError):
    """The other side does not know the key of this run."""


def prove(peer: socket.socket, key: bytes, *, serves: bool, purpose: bytes = TRANSPORT) -> None:
    """Prove to the other side that this process knows the key, and check that the other side knows it.

    Each side sends a random number. Then first the client, then the server, sends an HMAC, keyed with the key, of its
    role, both numbers and the server's address. The address prevents a relay: a false server cannot use the client's
    HMAC to connect to the true one. A server that has not seen a proof shows none.

    Args:
        peer: a connected socket.
        key: the secret of the run.
        serves: whether this side is the server.
        purpose: of the connection. Both sides have the same.

    Raises:
        NotProved: the other side does not know the key.
        OSError: the other side has disconnected, or has not finished within HANDSHAKE_S.
    """
    end_s = time.monotonic() + HANDSHAKE_S
    server = peer.getsockname() if serves else peer.getpeername()
    mine = secrets.token_bytes(_NUMBER)
    peer.settimeout(HANDSHAKE_S)
    peer.sendall(mine)
    other = exactly(peer, _NUMBER, end_s)
    numbers = (mine, other) if serves else (other, mine)

    def proof(role: bytes) -> bytes:
        said = b"".join((purpose, role, *numbers, json.dumps(server[:2]).encode()))
        return hmac.digest(key, said, hashlib.sha256)

    if not serves:
        peer.sendall(proof(b"client"))
    known = hmac.compare_digest(exactly(peer, _PROOF, end_s), proof(b"client" if serves else b"server"))
    if serves:
        peer.sendall(proof(b"server") if known else bytes(_PROOF))
    if not known:
        raise NotProved("the other side does not know the token of this run")
    peer.settimeout(None)


def exactly(peer: socket.socket, count: int, end_s: float) -> bytes:
    """Receive exactly `count` bytes. Raises OSError: they did not arrive before `end_s`, a time.monotonic()."""
    found, at = bytearray(count), 0
    while at < count:
        limit(peer, end_s)
        if not (more := peer.recv_into(memoryview(found)[at:])):
            raise ConnectionResetError("the other side has disconnected")
        at += more
    return bytes(found)
