"""In: processes of a small parameter server that are killed or stopped, a silent machine. Out: all work is done once.
Does not train; the weights say which portions were applied."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transport_server import KEY, PARTS, Weights, serve, until, work

from codescent.transport import Client, Frame, Kind, Server, ServerLost, frames, listen
from codescent.transport.authenticate import prove

LOOPBACK = "127.0.0.1"
SO_ATTACH_FILTER = 26


class Service:
    """A server in this process."""

    def __init__(self, steps: int, staleness: int | None) -> None:
        self.weights = Weights(steps, staleness)
        listener = listen(LOOPBACK)
        self.address: tuple[str, int] = listener.getsockname()
        self.server: Server = serve(listener, self.weights)

    def left(self) -> list[int]:
        return [rank for rank, _ in self.weights.left_because]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for one in started:
        one.kill()
        one.communicate()


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("transport_server.py")), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


def pushes(file: Path) -> int:
    return json.loads(file.read_text())["ledger"]["pushes"] if file.exists() else 0


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all its threads


def applied_once(weights: Weights) -> None:
    assert list(weights.values) == [1.0] * len(weights.values)
    assert [version for _, _, version in weights.order] == [i // PARTS for i in range(len(weights.values))]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_killed_worker_is_noticed_and_its_portion_is_done_by_another(
    staleness: int, processes: list[subprocess.Popen[str]]
) -> None:
    service = Service(4, staleness)
    processes.append(start("work", service.address[1], 7, 0, 2))
    said(processes[0], "computing")
    held = service.weights.portions.held[7]
    processes[0].kill()
    until(lambda: service.left() == [7])
    assert service.weights.silent == []
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(work, service.address, rank) for rank in range(2)]:
            one.result(60)
    applied_once(service.weights)
    assert [rank for rank, number, _ in service.weights.order if rank == 7] == [7, 7]
    assert held.step * PARTS + held.part < len(service.weights.values)
    service.server.close()


def test_a_worker_that_dies_while_its_pull_waits_is_noticed(processes: list[subprocess.Popen[str]]) -> None:
    service = Service(2, 0)
    clients = [Client(service.address, KEY, rank, "server 0") for rank in range(PARTS)]
    for one in clients:  # all portions of version 0 are granted: whoever pulls now has to wait
        one.request(Kind.PULL, into=[memoryview(array("d", service.weights.values))])
    processes.append(start("work", service.address[1], 8, 0, 0))
    until(lambda: 8 in service.server.connected)
    time.sleep(0.3)  # it asks for the sizes, then pulls and waits
    processes[0].kill()
    until(lambda: service.left() == [8])
    assert service.server.connected == [0, 1, 2]
    service.server.close()


def test_a_stopped_worker_is_set_aside_and_its_late_push_is_refused(processes: list[subprocess.Popen[str]]) -> None:
    service = Service(4, 1)
    processes.append(start("work", service.address[1], 7, 0.3, -1))
    until(lambda: 7 in service.weights.portions.held)
    stop(processes[0])
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(work, service.address, rank) for rank in range(2)]
        until(lambda: len(service.weights.order) >= PARTS)  # the others go on up to the bound, then wait
        time.sleep(0.2)
        assert len(service.weights.order) <= 2 * PARTS
        service.weights.left(7, "its deadline has passed")  # what an owner does after Arrivals.wait_s
        service.server.changed()
        for one in others:
            one.result(60)
    applied_once(service.weights)
    processes[0].send_signal(signal.SIGCONT)
    output, _ = processes[0].communicate(timeout=60)
    assert json.loads(output) == [list(one) for one in service.weights.order]
    applied_once(service.weights)
    assert service.weights.ledger.refused == {7: 1}
    service.server.close()


def test_a_killed_server_goes_on_from_its_last_save(processes: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    with listen(LOOPBACK) as listener:
        port = listener.getsockname()[1]
    file, steps = tmp_path / "saved.json", 12
    processes.append(start("serve", port, steps, file))
    said(processes[0], "serving")
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, (LOOPBACK, port), rank, 0.03) for rank in range(2)]
        for kill in range(2):
            until(lambda least=PARTS * (3 * kill + 2): pushes(file) >= least)  # type: ignore[misc]
            processes[-1].kill()
            processes[-1].wait()
            processes.append(start("serve", port, steps, file))
            said(processes[-1], "serving")
        orders = [one.result(100) for one in workers]
    saved = json.loads(file.read_text())
    assert saved["values"] == [1.0] * (PARTS * steps)
    assert orders == [saved["order"]] * 2
    assert len({(rank, number) for rank, number, _ in saved["order"]}) == PARTS * steps


def test_a_stopped_server_ends_a_request_by_its_timeout(processes: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    with listen(LOOPBACK) as listener:
        port = listener.getsockname()[1]
    processes.append(start("serve", port, 1, tmp_path / "saved.json"))
    said(processes[0], "serving")
    client = Client((LOOPBACK, port), KEY, 4, "server 0 (rank 100)", timeout_s=0.5)
    client.request(Kind.ASK)
    stop(processes[0])
    with pytest.raises(
        ServerLost, match=rf"server 0 \(rank 100\) at {LOOPBACK}:{port} has not answered rank 4 for 0\.5 s"
    ):
        client.request(Kind.ASK)
    processes[0].send_signal(signal.SIGCONT)
    assert client.request(Kind.ASK).kind is Kind.ANSWER
    client.close()


def test_a_frame_that_is_cut_off_is_never_applied(processes: list[subprocess.Popen[str]]) -> None:
    service = Service(2, None)
    pulled = Client(service.address, KEY, 0, "server 0")
    facts = pulled.request(Kind.PULL, into=[memoryview(array("d", service.weights.values))]).metadata
    pulled.close()
    mine, other = socket.socketpair()
    with mine, other:
        frames.send(mine, Frame(Kind.PUSH, 0, 9, 0, {**facts, "number": 1}), [memoryview(array("d", [1.0] * 6))])
        push = other.recv(1 << 16)
    until(lambda: service.left() == [0])
    for cut in (3, 40, len(push) - 30, len(push) - 2):
        count = len(service.left())
        with socket.create_connection(service.address, timeout=30) as peer:
            prove(peer, KEY, serves=False)
            frames.send(peer, Frame(Kind.HELLO, 0))
            assert frames.receive(peer) is not None
            peer.sendall(push[:cut])
        until(lambda least=count + 1: len(service.left()) == least)  # type: ignore[misc]
    assert work(service.address, 0)
    applied_once(service.weights)
    service.server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux socket filter")
@pytest.mark.parametrize("waits", [False, True])
def test_a_silent_machine_is_noticed(waits: bool) -> None:
    """A filter drops whatever arrives at the worker's socket: not even its kernel answers, as after a power cut.

    The server notices it while it waits for a request, and while a request waits.
    """
    service = Service(2, None)
    with socket.create_connection(service.address, timeout=30) as peer:
        prove(peer, KEY, serves=False)
        frames.send(peer, Frame(Kind.HELLO, 6))
        assert frames.receive(peer) is not None
        if waits:
            frames.send(peer, Frame(Kind.ASK, 6, 1, metadata={"never": True}))
            time.sleep(0.5)
        drop = ctypes.create_string_buffer(b"\x06\x00\x00\x00\x00\x00\x00\x00")  # BPF_RET, 0 bytes are kept
        program = b"\x01\x00" + bytes(6) + ctypes.addressof(drop).to_bytes(8, sys.byteorder)  # struct sock_fprog
        peer.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        begun_s = time.monotonic()
        until(lambda: service.left() == [6])
        print(f"noticed after {time.monotonic() - begun_s:.1f} s: {service.weights.left_because[0][1]}")
        assert "timed out" in service.weights.left_because[0][1].lower()
        assert service.weights.silent == [6]
    service.server.close()
