"""In: processes of a run, and strangers, at a listening socket. Out: what the first get, and that nobody else gets in.
Does not kill processes (test_transport_faults.py does)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import struct
import subprocess
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_server import KEY, Weights, serve, until, work

from codescent.transport import (
    Client,
    Frame,
    FrameError,
    Kind,
    Refused,
    ServerLost,
    accept,
    authenticate,
    frames,
    listen,
    server,
)
from codescent.transport import client as connection
from codescent.transport.authenticate import NotProved, prove
from codescent.transport.sockets import watch
from codescent.transport.tensors import bytes_of

LOOPBACK = "127.0.0.1"


def connected() -> tuple[socket.socket, socket.socket]:
    with listen(LOOPBACK) as listener:
        mine = socket.create_connection(listener.getsockname(), timeout=30)
        return mine, listener.accept()[0]


def carried(frame: Frame, payloads: list[memoryview], into: list[memoryview]) -> Frame | None:
    mine, other = connected()
    with mine, other, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(frames.send, mine, frame, payloads)
        found = frames.receive(other, time.monotonic() + 30)
        assert found is not None
        frames.receive_payloads(other, found, into, time.monotonic() + 30)
        sent.result(30)
        return found


# frames


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(Kind),
    numbers=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)),
    metadata=st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=9), st.none()), max_size=4),
    sizes=st.lists(st.one_of(st.integers(0, 9), st.just(3 * frames.PIECE + 5)), max_size=5),
)
def test_what_is_sent_arrives(kind: Kind, numbers: Any, metadata: dict[str, Any], sizes: list[int]) -> None:
    sent = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    into = [bytearray(size) for size in sizes]
    found = carried(
        Frame(kind, *numbers, metadata), [memoryview(one) for one in sent], [memoryview(one) for one in into]
    )
    assert found == Frame(kind, *numbers, metadata, tuple(sizes))
    assert into == sent


def test_tensors_are_sent_and_received_in_place() -> None:
    sent = [
        torch.randn(3, 5),
        torch.randn(7).bfloat16(),
        torch.arange(9, dtype=torch.int8),
        torch.randn(()),
        torch.ones(0),
    ]
    into = [torch.zeros_like(one) for one in sent]
    carried(Frame(Kind.PUSH, 0), [bytes_of(one) for one in sent], [bytes_of(one) for one in into])
    assert all(torch.equal(one, other) for one, other in zip(sent, into))
    for wrong in (torch.ones(4, 4).t()[:, :2], torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="no contiguous memory"):
            bytes_of(wrong)


def raw(frame: Frame = Frame(Kind.PUSH, 1, 2, 3, {"a": 1}), payload: bytes = b"12345678") -> bytearray:  # noqa: B008
    mine, other = connected()
    with mine, other:
        frames.send(mine, frame, [memoryview(payload)])
        mine.shutdown(socket.SHUT_WR)
        found = bytearray()
        while more := other.recv(1 << 16):
            found += more
        return found


def read(sent: bytes, most_bytes: int = 1000) -> bytes:
    """What a receiver reads out of bytes on the wire; the sender then disconnects."""
    mine, other = connected()
    with other:
        with mine:
            mine.sendall(sent)
        frame = frames.receive(other, time.monotonic() + 30, most_bytes)
        if frame is None:
            return b""
        into = bytearray(sum(frame.lengths))
        frames.receive_payloads(other, frame, [memoryview(into)], time.monotonic() + 30)
        return bytes(into)


def header(**changes: int | bytes) -> bytes:
    """A whole frame with a right checksum and other fields."""
    names = ("magic", "protocol", "kind", "sender", "request", "version", "size", "count", "total")
    lengths, text = struct.pack("!Q", 8), b'{"a": 1}'
    fields: dict[str, Any] = dict(zip(names, (frames.MAGIC, frames.PROTOCOL, Kind.PUSH, 1, 2, 3, len(text), 1, 8)))
    text = changes.pop("text", text)  # type: ignore[assignment]
    fields |= {"size": len(text)} | changes
    first = struct.pack("!4sHHiQqIIQ", *fields.values())
    parts = (first, lengths + text, b"12345678")
    return b"".join(part + struct.pack("!I", zlib.crc32(part)) for part in parts)


def test_each_wrong_frame_is_one_kind_of_error() -> None:
    good = raw()
    assert bytes(good) == header()
    assert read(bytes(good)) == b"12345678"
    assert read(b"") == b""
    for wrong, says in (
        (header(magic=b"GET "), "no frame begins with b'GET '"),
        (header(protocol=2), "another release"),
        (header(kind=99), "kind 99"),
        (header(text=b"[1, 2, 3]"), "not an object"),
        (header(text=b"{a: 1}"), "not JSON"),
        (header(text=b"[" * 60_000), "not JSON"),
        (header(total=9), "announced as 9"),
        (header(total=1 << 40), "too large"),
        (header(size=1 << 20), "too large"),
        (header(count=1 << 20), "too large"),
    ):
        with pytest.raises(FrameError, match=says):
            read(wrong)
    with pytest.raises(FrameError, match="too large"):
        read(bytes(good), most_bytes=7)
    with pytest.raises(ValueError, match="too large"):
        raw(Frame(Kind.PUSH, 0, metadata={"a": "x" * frames.MOST_METADATA}))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_is_taken_for_a_frame(data: st.DataObject) -> None:
    """One bit flipped, or the end cut off: an error, or nothing at all."""
    good = raw()
    if data.draw(st.booleans()):
        good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(FrameError):
            read(bytes(good))
    else:
        cut = data.draw(st.integers(1, len(good) - 1))
        with pytest.raises((FrameError, ConnectionResetError)):
            read(bytes(good[:cut]))


def test_a_deadline_ends_a_frame_that_does_not_go_on() -> None:
    mine, other = connected()
    with mine, other:
        mine.sendall(raw()[:-3])
        frame = frames.receive(other, time.monotonic() + 30)
        assert frame is not None
        with pytest.raises(TimeoutError):
            frames.receive_payloads(other, frame, [memoryview(bytearray(8))], time.monotonic() + 0.1)
        with pytest.raises(TimeoutError):  # nobody reads: the buffers are full
            frames.send(other, frame, [memoryview(bytearray(64 << 20))], time.monotonic() + 0.2)


# a service and its workers


@pytest.fixture
def served() -> Iterator[tuple[Any, Weights]]:
    service = Weights(steps=4, staleness=1)
    made = serve(listen(LOOPBACK), service)
    yield made, service
    made.close()
    assert made.failure is None


def test_workers_apply_each_portion_once_and_nobody_is_ahead(served: tuple[Any, Weights]) -> None:
    made, service = served
    with ThreadPoolExecutor(4) as pool:
        orders = [one.result(60) for one in [pool.submit(work, made.address, rank, 0.003 * rank) for rank in range(4)]]
    assert list(service.values) == [1.0] * 12
    assert orders == [[list(one) for one in service.order]] * 4
    assert [version for _, _, version in service.order] == [i // 3 for i in range(12)]
    until(lambda: sorted(rank for rank, _ in service.left_because) == list(range(4)))
    assert made.connected == []


def test_a_waiting_request_is_answered_when_another_has_changed_something(served: tuple[Any, Weights]) -> None:
    made, service = served
    clients = [Client(made.address, KEY, rank, "server 0") for rank in range(7)]
    into = [memoryview(array("d", service.values))]
    pulls = [one.request(Kind.PULL, into=into).metadata for one in clients[:6]]  # 2 versions of 3 pushes
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(clients[6].request, Kind.PULL, into=into)
        time.sleep(0.1)
        assert not late.done()
        for rank in range(3):
            clients[rank].request(Kind.PUSH, 0, {**pulls[rank], "number": 1}, into)
        assert late.result(30).version == 1
    for one in clients:
        one.close()


def test_a_lost_connection_is_made_again_and_a_push_is_applied_once(served: tuple[Any, Weights]) -> None:
    made, service = served
    client = Client(made.address, KEY, 0, "server 0")
    gradient = array("d", [0.0]) * 12
    facts = client.request(Kind.PULL, into=[memoryview(array("d", gradient))]).metadata
    gradient[0] = 1.0
    push = (Kind.PUSH, 0, {**facts, "number": 1}, [memoryview(gradient)])
    assert client.request(*push, number=70).metadata == {"verdict": "apply"}
    assert client._peer is not None
    client._peer.shutdown(socket.SHUT_RDWR)  # as if the acknowledgement had been lost
    answer = client.request(*push, number=70)
    assert (answer.metadata, answer.request, service.values[0]) == ({"verdict": "known"}, 70, 1.0)
    assert client.met == {"number": 1}
    client.close()


def test_refusals_say_why_and_the_connection_goes_on(served: tuple[Any, Weights]) -> None:
    made, _ = served
    with pytest.raises(ServerLost, match=r"does not let rank 2 in: rank 2 sends int8, the server expects none"):
        Client(made.address, KEY, 2, "server 0", {"wire": "int8"}).request(Kind.ASK)
    client = Client(made.address, KEY, 1, "server 0", timeout_s=2)
    with pytest.raises(Refused, match=r"\(16,\) bytes, not 96"):
        client.request(Kind.PUSH, 0, {}, [memoryview(bytearray(16))])
    before = client._peer
    assert client.request(Kind.ASK, metadata={"a": 1}).metadata["echo"] == {"a": 1}
    assert client._peer is before
    with pytest.raises(ServerLost, match=r"server 0 at 127\.0\.0\.1:\d+ answers rank 1 with payloads of \(96,\) bytes"):
        client.request(Kind.PULL, into=[memoryview(bytearray(8))])
    with pytest.raises(ServerLost, match=r"has not answered rank 50 for 0\.3 s"):  # not one of those that may connect
        Client(made.address, KEY, 50, "server 0", timeout_s=0.3).request(Kind.ASK)
    client.close()


def test_a_newer_connection_of_a_rank_replaces_the_older(served: tuple[Any, Weights]) -> None:
    made, service = served
    older, newer = (Client(made.address, KEY, 3, "server 0") for _ in range(2))
    older.request(Kind.ASK)
    newer.request(Kind.ASK)
    assert made.connected == [3]
    assert service.left_because == []
    assert older._peer is not None
    assert older._peer.recv(1) == b""
    older._disconnect()
    newer.close()


def test_a_connection_that_is_kept_is_made_again_without_a_request(
    served: tuple[Any, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, service = served
    monkeypatch.setattr(connection, "KEEP_S", 0.05)
    kept = Client(made.address, KEY, 3, "server 0")
    kept.keep()
    time.sleep(0.2)
    assert made.connected == []  # the first request connects
    kept.request(Kind.ASK)
    for count in (1, 2):
        with kept._lock:  # the server knows the connection a moment before the client does
            peer = kept._peer
        assert peer is not None
        peer.shutdown(socket.SHUT_RDWR)
        until(lambda least=count: len(service.left_because) == least and made.connected == [3])  # type: ignore[misc]
    assert kept.request(Kind.ASK).kind is Kind.ANSWER
    kept.close()
    until(lambda: made.connected == [])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_closed_client_ends_its_request(served: tuple[Any, Weights], is_there: bool) -> None:
    """One that waits for an answer, and one that tries to connect."""
    made, _ = served
    with listen(LOOPBACK) as listener:
        nobody = listener.getsockname()
    client = Client(made.address if is_there else nobody, KEY, 0, "server 0", timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.request, Kind.ASK, metadata={"never": True} if is_there else {})
        time.sleep(0.3)
        client.close()
        with pytest.raises(ServerLost, match="rank 0 has closed its connection"):
            asked.result(10)


def test_a_server_that_is_late_is_waited_for() -> None:
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
    client = Client(address, KEY, 0, "server 0", timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.request, Kind.ASK)
        time.sleep(0.3)
        made = serve(listen(*address), Weights(1, None))
        assert asked.result(30).kind is Kind.ANSWER
    client.close()
    made.close()


# strangers


@contextlib.contextmanager
def stranger(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=30) as one:
        yield one


def until_closed(one: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := one.recv(1 << 16):
            found += more
    return found


def test_strangers_are_rejected_and_the_service_goes_on(
    served: tuple[Any, Weights], capfd: pytest.CaptureFixture[str]
) -> None:
    made, service = served
    hello = raw(Frame(Kind.HELLO, 1), b"")
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, made.address, 0, 0.02)
        for sent in (
            b"",
            bytes(hello) * 3,
            b"GET / HTTP/1.0\r\n\r\n" * 9,
            b"\xff" * 200,
            random.Random(1).randbytes(9 << 20),
            header(total=1 << 40),
        ):
            with stranger(made.address) as one:
                with contextlib.suppress(OSError):
                    one.sendall(sent)
                    one.shutdown(socket.SHUT_WR)
                found = until_closed(one)
                assert len(found) <= 64
                assert set(found[32:]) <= {0}  # a random number, then no proof
        with pytest.raises(ServerLost, match="does not know the token of this run"):
            Client(made.address, b"another key", 1, "server 0").request(Kind.ASK)
        working.result(60)
    assert list(service.values) == [1.0] * 12
    until(lambda: [rank for rank, _ in service.left_because] == [0])
    said = capfd.readouterr().err
    assert 1 <= said.count("was rejected") <= server.REPORTED
    assert KEY.decode() not in said


def test_the_key_itself_is_not_sent_and_a_proof_is_of_one_server_and_one_role(served: tuple[Any, Weights]) -> None:
    made, _ = served
    with listen(LOOPBACK) as false, ThreadPoolExecutor(1) as pool:  # relays what the true server says
        asked = pool.submit(Client(false.getsockname(), KEY, 1, "server 0").request, Kind.ASK)
        with false.accept()[0] as victim, stranger(made.address) as true:
            victim.sendall(true.recv(32))
            true.sendall(said := victim.recv(32))
            true.sendall(proof := victim.recv(32))
            assert KEY not in said + proof
            answer = true.recv(32)
            assert answer == bytes(32)
            victim.sendall(answer)
        with pytest.raises(ServerLost, match="does not know the token"):
            asked.result(30)
    with stranger(made.address) as one:  # what the server sends is no proof of a client
        one.sendall(one.recv(32))
        one.sendall(bytes(32))
        assert until_closed(one) in (bytes(32), b"")


def test_slow_ones_are_cut_off_and_too_many_of_them_are_not_let_in(
    served: tuple[Any, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = served
    monkeypatch.setattr(authenticate, "HANDSHAKE_S", 0.5)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(stranger(made.address)) for _ in range(accept.MOST_STRANGERS + 40)]
        time.sleep(0.2)
        assert threading.active_count() - threads <= accept.MOST_STRANGERS
        for i, one in enumerate(slow):
            with contextlib.suppress(ConnectionError):
                one.sendall(bytes([i % 256]))  # a byte now and then is no progress
        client = Client(made.address, KEY, 1, "server 0", timeout_s=30)
        assert client.request(Kind.ASK, metadata={"b": 2}).metadata["echo"] == {"b": 2}
        assert all(len(until_closed(one)) in (0, 32) for one in slow)
        client.close()


@pytest.mark.parametrize("act", [lambda one: one.sendall(b"x" * 64), lambda one: one.sendall(header(kind=Kind.HELLO))])
def test_who_knows_the_key_and_sends_nonsense_ends_only_its_own_connection(
    served: tuple[Any, Weights], act: Callable[[socket.socket], None]
) -> None:
    made, _ = served
    with stranger(made.address) as one:
        prove(one, KEY, serves=False)
        act(one)
        assert until_closed(one) == b""
    with stranger(made.address) as one:
        prove(one, KEY, serves=False)
        frames.send(one, Frame(Kind.HELLO, 4))
        assert frames.receive(one) is not None
        frames.send(one, Frame(Kind.ASK, 5))  # as another rank
        assert until_closed(one) == b""
    client = Client(made.address, KEY, 5, "server 0")
    assert client.request(Kind.ASK).kind is Kind.ANSWER
    client.close()


def test_the_server_accepts_on_after_a_connection_that_it_could_not_accept(served: tuple[Any, Weights]) -> None:
    """No file descriptor is left for a while, as when an outsider has opened many connections."""
    made, _ = served
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as one:
        one.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (one.fileno(), hard))  # no descriptor is free below this number
        filled = list(all_descriptors())
        try:
            one.connect(made.address)  # the kernel has accepted it, and the server cannot
            time.sleep(0.5)
        finally:
            for descriptor in filled:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        prove(one, KEY, serves=False)
        frames.send(one, Frame(Kind.HELLO, 4))
        assert frames.receive(one, time.monotonic() + 30) is not None


def all_descriptors() -> Iterator[int]:
    """Open descriptors until there are no more."""
    with contextlib.suppress(OSError):
        while True:
            yield os.dup(1)


def test_a_connection_for_which_no_thread_starts_is_ended_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gives its place among those that have not proved the key to the next one: here there is one place."""
    monkeypatch.setattr(accept, "MOST_STRANGERS", 1)
    whole, refused = threading.Thread.start, list[str]()

    def start(self: threading.Thread) -> None:
        if self.name == "codescent peer" and len(refused) < 3:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        whole(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    made = serve(listener := listen(LOOPBACK), Weights(1, None))
    asking = Client(listener.getsockname(), KEY, 4, "server 0", timeout_s=30)
    assert asking.request(Kind.ASK).kind is Kind.ANSWER
    assert len(refused) == 3
    asking.close()
    made.close()


def test_it_listens_on_the_given_address_alone(served: tuple[Any, Weights]) -> None:
    made, _ = served
    host, port = made.address
    assert host == LOOPBACK
    found = subprocess.run(
        ["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True
    ).stdout
    mine = [line.split()[1] for line in found.splitlines() if f":{port:04X} " in line and " 0A " in line]
    assert mine == [f"0100007F:{port:04X}"]
    with listen("127.0.0.2") as other:
        assert other.getsockname()[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, other.getsockname()[1]), timeout=5)
    for wrong in ("0.0.0.0", "::", "", "localhost"):
        with pytest.raises(ValueError, match=r"interface|address"):
            listen(wrong)


def test_a_defect_of_the_service_is_shown_to_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    service = Weights(1, None)
    made = serve(listen(LOOPBACK), service)
    monkeypatch.setattr(service, "_ask", lambda _: json.loads("{"))
    with pytest.raises(ServerLost, match="has not answered rank 0"):
        Client(made.address, KEY, 0, "server 0", timeout_s=0.3).request(Kind.ASK)
    made.close()
    assert isinstance(made.failure, json.JSONDecodeError)


def test_a_silent_machine_is_noticed_by_the_kernel() -> None:
    """The options that do it; test_transport_faults.py has a machine that is silent."""
    mine, other = connected()
    with mine, other:
        watch(mine, 3.0)
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_both_sides_of_a_proof_need_the_key() -> None:
    mine, other = connected()
    with mine, other, ThreadPoolExecutor(1) as pool:
        served = pool.submit(prove, other, KEY, serves=True)
        with pytest.raises(NotProved):
            prove(mine, b"another", serves=False)
        with pytest.raises(NotProved):
            served.result(30)
