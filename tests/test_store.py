"""In: peers that know the run's token, and strangers. Out: what the store answers the first, and that it stays shut.
Does not train; the process groups over it are real ones."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import socket
import stat
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_ranks import until
from torch.distributed import DistStoreError, PrefixStore

from codescent.base import token
from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.meeting import clocks, compared, rendezvous, search, store_client, store_server
from codescent.meeting.store import LocalStore, Store, StoreError
from codescent.meeting.store_client import StoreClient
from codescent.meeting.store_server import StoreServer
from codescent.train.torch_store import TorchStore, open_agent
from codescent.transport import authenticate
from codescent.transport.authenticate import NotProved

KEY = b"the key of this run"
SECOND = timedelta(seconds=1)


class Served:
    """A server, and ways to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server((LOOPBACK, 0))
        self.address = self.listener.getsockname()
        self.server = StoreServer(self.listener, KEY)
        self.stores: list[StoreClient] = []

    def join(self, key: bytes = KEY, timeout: timedelta = SECOND) -> StoreClient:
        self.stores.append(StoreClient(lambda: socket.create_connection(self.address), key, timeout))
        return self.stores[-1]

    def close(self) -> None:
        for one in self.stores:
            one.close()
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def test_what_one_sets_the_others_get(served: Served) -> None:
    mine, other = served.join(), served.join()
    mine.set("a", "text")
    mine.set("b", b"\x00\n\xff")
    assert other.get("a") == b"text"
    assert other.multi_get(["b", "a"]) == [b"\x00\n\xff", b"text"]
    assert [other.add("n", 2), mine.add("n", -5)] == [2, -3]
    assert other.check(["a", "b"])
    assert not other.check(["a", "c"])
    assert other.there(["c", "a"]) == [False, True]
    assert mine.compare_set("c", "", "first") == b"first"
    assert other.compare_set("c", "", "second") == b"first"
    assert other.compare_set("c", "first", "second") == b"second"
    assert other.compare_set("d", "first", "second") == b"first"
    assert mine.delete_key("a")
    assert not other.delete_key("a")
    torchs = TorchStore(mine)
    prefixed = PrefixStore("p", torchs)  # as torch's process groups use it: by way of C++
    prefixed.set("e", "1")
    assert (prefixed.get("e"), other.get("p/e"), prefixed.add("n", 3)) == (b"1", b"1", 3)
    assert (prefixed.delete_key("e"), prefixed.check(["e"])) == (True, False)
    assert mine.clone().get("b") == b"\x00\n\xff"


def test_who_waits_is_answered_when_the_last_value_comes(served: Served) -> None:
    mine, other = served.join(timeout=timedelta(seconds=60)), served.join()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(mine.multi_get, ["x", "y"]) for _ in range(2)]  # two threads of one rank
        other.set("x", "1")
        time.sleep(0.05)
        assert not any(one.done() for one in both)
        other.set("y", "2")
        assert [one.result(timeout=30) for one in both] == [[b"1", b"2"]] * 2


def test_what_does_not_come_is_named_after_the_timeout(served: Served) -> None:
    mine = served.join()
    mine.set("there", "1")
    with pytest.raises(StoreError, match=r"not set after 0\.2 s: gone, missing"):
        mine.wait(["there", "missing", "gone"], timedelta(seconds=0.2))
    assert mine.get("there") == b"1"  # the connection is as good as before


def test_a_server_that_has_gone_or_is_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = served.join()
    monkeypatch.setattr(store_client, "SILENT_S", 0.2)
    monkeypatch.setitem(served.server._acts, "check", lambda *_: time.sleep(3))
    with pytest.raises(StoreError, match=r"does not answer .*no answer for 1\.2 s"):
        mine.check(["a"])
    served.server.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="rank 0, which serves the store of all ranks, does not answer"):
            mine.set("a", "1")


# strangers


class Trap:
    """Makes a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_stranger_is_let_go_and_nothing_of_its_is_read(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served.join().set("secret", "1")
    request = b'{"do": "wait", "keys": ["secret"], "timeout_s": 1, "sizes": []}\n'
    frame = len(request).to_bytes(4, "big") + request
    trap = pickle.dumps(Trap(tmp_path / "trapped"))
    for sent in (b"", frame, b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", (1 << 30).to_bytes(4, "big"), trap):
        with socket.create_connection(served.address) as stranger:
            stranger.settimeout(30)
            assert len(stranger.recv(4096)) == 32  # the server's number
            assert set(_answer(stranger, sent)) <= {0}
    with pytest.raises((NotProved, ConnectionError)):
        served.join(b"another key")
    assert list(tmp_path.iterdir()) == []
    said: list[str] = []

    def reported() -> bool:
        said.append(capfd.readouterr().err)
        return "".join(said).count("127.0.0.1 did not prove this run's token") >= store_server.REPORTED

    until(lambda: served.server.rejected.total() == 4)  # it answers first; three others sent too little
    until(reported)
    assert "".join(said).count("rejected") == store_server.REPORTED
    assert served.join().get("secret") == b"1"


def _answer(stranger: socket.socket, sent: bytes) -> bytes:
    """What the server answers; nothing where it hung up first, which any of the three calls may be the one to see."""
    try:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        return stranger.recv(4096)
    except OSError as gone:
        if gone.errno not in (errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE):
            raise
        return b""


def test_a_server_that_has_ended_leaves_nothing_open() -> None:
    gc.collect()  # what earlier tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        one = StoreServer(socket.create_server(("127.0.0.1", 0)), b"key")
        one.close()
        one.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_strangers_that_say_nothing_keep_nobody_out(served: Served) -> None:
    silent = [socket.create_connection(served.address) for _ in range(100)]
    try:
        served.join().set("a", "1")
        assert served.join().get("a") == b"1"
    finally:
        for one in silent:
            one.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b'{"do": "launch"}'],
        [b'{"do": "set", "key": {}}', b"1"],
        [b'{"do": "set", "key": "a"}'],
        [b'{"do": "add", "key": "b", "amount": 1e999}'],
        [b'{"do": "wait", "keys": ["b"], "timeout_s": NaN}'],
        [b'{"do": "wait", "keys": ["b"], "timeout_s": 1e999}'],
        [b'{"do": "check", "keys": 7}'],
        [b'{"do": "set", "key": "a"}', b"", -1],
        [b"[" * 100_000],
        [b"7"],
        [b"\xff"],
        None,
    ],
)
def test_a_peer_that_breaks_the_protocol_is_let_go(
    served: Served, parts: list[Any] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = served.join(), served.join()
    (connection,) = bad._idle
    if parts is None:
        connection.sendall(b"\xff" * 100)
    else:
        text = b"[%s, %s]" % (
            parts[0],
            json.dumps([one if isinstance(one, int) else len(one) for one in parts[1:]]).encode(),
        )
        data = b"".join(one for one in parts[1:] if isinstance(one, bytes))
        connection.sendall(struct.pack("!II", len(text), len(text) + len(data)) + text + data)
    assert _end_of(connection) == b""
    assert f"codescent: a rank at {LOOPBACK} sent the store a request without sense" in capfd.readouterr().err
    good.set("a", "1")
    assert good.get("a") == b"1"


def _end_of(connection: socket.socket) -> bytes:
    """What arrives before the other side has disconnected."""
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_a_rank_that_stops_within_a_request_holds_nobody_up(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that has died is a loss and no request without sense."""
    monkeypatch.setattr(store_server, "WHOLE_S", 0.3)
    good, stopped, dead = served.join(), served.join(), served.join()
    for one in (stopped, dead):
        one._idle[-1].sendall(b"\0" * 5)
    dead.close()
    good.set("a", "1")
    assert _end_of(stopped._idle[-1]) == b""
    assert capfd.readouterr().err == ""


def test_one_rank_has_the_values_that_several_would_have() -> None:
    local: Store = LocalStore(timedelta(seconds=0.1))
    local.set("a", "text")
    assert (local.get("a"), local.add("n", 2), local.add("n", -5)) == (b"text", 2, -3)
    assert (local.compare_set("c", "", "first"), local.compare_set("c", "", "second")) == (b"first", b"first")
    assert (local.compare_set("c", "first", "second"), local.compare_set("d", "x", "y")) == (b"second", b"x")
    assert (local.check(["a", "c"]), local.check(["a", "d"]), local.there(["d", "a"])) == (True, False, [False, True])
    assert (local.delete_key("a"), local.delete_key("a")) == (True, False)
    with pytest.raises(StoreError, match=r"not set after 0\.1 s: a, d"):
        local.multi_get(["d", "a", "c"])
    with pytest.raises(DistStoreError, match=r"not set after 0\.1 s: a"):
        TorchStore(local).get("a")


def test_a_stranger_that_dawdles_gives_its_place_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not buy more time."""
    monkeypatch.setattr(authenticate, "HANDSHAKE_S", 1.0)
    with socket.create_connection(served.address) as stranger:
        stranger.settimeout(30)
        assert len(stranger.recv(4096)) == 32
        refused = False
        for _ in range(60):
            try:
                stranger.sendall(b"x")
            except OSError:
                refused = True
                break
            time.sleep(0.5)
    assert refused


@pytest.mark.parametrize("forwards", [False, True])
def test_who_sits_between_is_shown_nothing_of_use(served: Served, forwards: bool) -> None:
    """In rank 0's place, without the key; it answers by itself, or hands everything on to rank 0 and back."""
    with socket.create_server((LOOPBACK, 0)) as between:

        def act() -> None:
            victim, _ = between.accept()
            with victim, socket.create_connection(served.address) as real:
                for size, source, sink in ((32, real, victim), (64, victim, real), (32, real, victim)):
                    data = source.recv(size, socket.MSG_WAITALL) if forwards or source is victim else os.urandom(size)
                    heard.append(data)
                    sink.sendall(data)

        heard: list[bytes] = []
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act)
            with pytest.raises((NotProved, ConnectionError)):
                StoreClient(lambda: socket.create_connection(between.getsockname()), KEY, SECOND)
            acting.exception(timeout=30)
    assert not any(KEY in one for one in heard)
    assert served.server._admitted == []
    assert len(served.server._selector.get_map()) == 1, "nobody was let in"


# the token


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(token.TOKEN, raising=False)
    return tmp_path


def test_ranks_of_one_user_find_one_token_which_nobody_else_can_read(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: token.key_of({}, "job 1"), range(32)))
    assert len(keys) == 1
    assert token.key_of({}, "job 2") not in keys
    path = home / ".codescent" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["token"]
    assert token.key_of({token.TOKEN: path.read_text()}, "job 1") in keys
    assert token.key_of({token.TOKEN: "other"}, "job 1") not in keys


def test_a_token_that_others_can_read_or_that_cannot_be_kept_is_refused(home: Path) -> None:
    token.key_of({}, "")
    path = home / ".codescent" / "token"
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"token: other users may read this secret: chmod 600"):
        token.key_of({}, "")
    path.unlink()
    path.touch(0o600)
    with pytest.raises(UserError, match="is empty: delete it"):
        token.key_of({}, "")
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be stored there .* export CODESCENT_TOKEN"):
        token.key_of({}, "")


def test_ranks_of_another_job_are_refused_in_words(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "STRANGER_S", 0.3)
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    wait = timedelta(seconds=20)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous.meet, Rank(0, 0, 2, 2, LOOPBACK, port, job="srun 1.0"), wait, open_agent)
        with pytest.raises(UserError, match=r"another token.*MASTER_PORT.*~/\.codescent/token.*set CODESCENT_TOKEN"):
            rendezvous.meet(Rank(1, 1, 2, 2, LOOPBACK, port, job="srun 2.0"), wait, open_agent)
        rendezvous.meet(Rank(1, 1, 2, 2, LOOPBACK, port, job="srun 1.0"), wait, open_agent).close()
        first.result().close()


def test_facts_that_differ_are_named_with_their_ranks() -> None:
    ranks = [{"host": "a", "facts": {"seed": 1, "lr": 0.1}}, {"host": "b", "facts": {"seed": 1, "lr": 0.2}}]
    assert compared.differences([ranks[0]] * 3) == []
    (problem,) = compared.differences([ranks[0]] * 9 + [ranks[1]])
    assert problem == (
        "the ranks have different runs: lr is 0.1 on ranks 0 (a), 1 (a), 2 (a), 3 (a), 4 (a), 5 (a), 6 (a), 7 (a) "
        "and 1 more; 0.2 on rank 9 (b): start every rank with the same value"
    )
    assert compared.differences([ranks[0], {"host": "b", "facts": {"seed": 1}}])[0].count("absent on rank 1 (b)") == 1


def test_the_offset_of_a_clock_is_found_within_its_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ahead_ns = served.join(), 7_000_000_000
    assert abs(mine.clock() - time.time_ns()) < 5e9
    found = clocks.measure(mine)
    assert abs(found.offset_ns) <= found.error_ns  # it is the same clock

    def answer(peer: Any, head: dict[str, Any], data: list[bytes]) -> None:
        store_server._send(peer, {"time_ns": time.time_ns() + ahead_ns}, [])

    monkeypatch.setitem(served.server._acts, "clock", answer)
    later = clocks.measure(mine)
    assert abs(later.offset_ns - ahead_ns) <= later.error_ns
    both = clocks.Offset(10.0, 4.0).mean(clocks.Offset(16.0, 5.0))
    assert both == clocks.Offset(13.0, 8.0)  # it has drifted by 6
    assert clocks.clock_of() == clocks.clock_of()


def test_the_clock_is_that_of_the_shortest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, there = iter([0, 100, 200, 210, 300, 400]), iter([1090, 1205, 1390])
    monkeypatch.setattr(clocks, "time", SimpleNamespace(time_ns=lambda: next(mine)))
    store: Any = SimpleNamespace(clock=lambda: next(there))
    assert clocks.measure(store, 3) == clocks.Offset(1000, 5.0)
