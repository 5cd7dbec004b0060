"""In: clients that break off, say nothing or nonsense; engines, disks and files that fail. Out: the server lives on.
Does not test right requests (test_serving.py does) or the command (test_serve_command.py does)."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from served import Scripted, Served, engine, opened, served

from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import ByteTokenizer
from codescent.inference.request import Finish, Output, Sampling
from codescent.serving import connection, http_server
from codescent.serving.engine_thread import EngineThread, RequestFlight
from codescent.serving.refused import RefusedRequest
from codescent.serving.request_log import Entry, RequestLog
from codescent.serving.service import ModelService
from codescent.serving.watch import Watch, quantile

GREEDY = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0}
COMPLETIONS = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def said_by(server: Served, data: bytes) -> tuple[int, bytes, str | None]:
    """Status, body and the header connection of the answer to bytes. Raises ConnectionError: there is none."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        raw.sendall(data)
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        return answer.status, answer.read(), answer.getheader("connection")


NOT_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a client that begins TLS
    b"GET / HTTP/1.1\r\n\r\n",  # HTTP/1.1 without a host
    b"GET /" + b"a" * 30_000,
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
)


def test_what_is_no_http_is_answered_in_the_form_of_openai(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a client of the API gets plain text, or nothing; or a traceback is printed."""
    with served(engine()) as server:
        for data in NOT_HTTP:
            status, body, closes = said_by(server, data)
            assert (status, closes) == (400, "close"), data[:40]
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert server.post(COMPLETIONS, GREEDY)[0] == 200
    assert capsys.readouterr().err == ""


def test_a_body_that_breaks_off_or_is_torn_ends_its_request_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a place is held for a client that is gone, a traceback is printed, or the next request is refused."""
    with served(engine()) as server:
        for data in (HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(1000):
                    pass
        while server.service.active:
            time.sleep(0.01)
        assert server.post(COMPLETIONS, GREEDY)[0] == 200
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGE"]
)
def test_a_connection_that_brings_no_request_is_closed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: clients that send nothing, or a header for ever, hold all descriptors of the process."""
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with served(engine()) as server, socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        raw.sendall(data)
        with suppress(ConnectionResetError):
            while raw.recv(1000):
                pass
        slow = {**GREEDY, "max_tokens": 40}
        assert server.post(COMPLETIONS, slow)[0] == 200


def test_an_old_client_that_names_no_host_is_answered() -> None:
    """Fault: a check of health by HTTP/1.0 is refused as if a page of the web had asked."""
    with served(engine()) as server:
        assert said_by(server, b"GET /health HTTP/1.0\r\n\r\n")[0] == 200
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        body = json.dumps({**GREEDY, "stream": True}).encode()
        status, text, _ = said_by(server, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert status == 200
        assert text.endswith(b"data: [DONE]\n\n")


def test_behind_a_token_any_name_of_the_host_is_right() -> None:
    """Fault: a proxy with TLS on the same machine cannot hand on the name that its clients use."""
    with served(engine(), token="right") as server:
        headers = {"Host": "models.example", "authorization": "Bearer right"}
        assert server.ask("GET", "/v1/models", headers=headers)[0] == 200


def test_a_method_that_is_refused_names_the_right_one() -> None:
    """Fault: a 405 without the header that HTTP demands."""
    with served(engine()) as server:
        assert server.ask("GET", COMPLETIONS)[2]["allow"] == "POST"
        assert "GET" in server.ask("DELETE", "/v1/models")[2]["allow"]


@pytest.mark.parametrize("size", [9 << 20, 100 << 20])
def test_a_client_that_sends_all_before_it_reads_sees_the_refusal(size: int) -> None:
    """Fault: the connection is reset while the client sends, and it never learns that its body is too long."""
    with served(engine()) as server:
        assert server.post(COMPLETIONS, b" " * size)[0] == 413
        assert server.post("/none", b" " * (1 << 20))[0] == 404


def requests_of(server: Served) -> dict[str, float]:
    """The figure of requests by status."""
    lines = server.ask("GET", "/metrics")[1].decode().splitlines()
    rows = [line.split() for line in lines if line.startswith(f'codescent_requests_total{{path="{COMPLETIONS}"')]
    return {row[0].rpartition("status=")[2].strip('"}'): float(row[1]) for row in rows}


class _Pauses(Scripted):
    """An engine that waits after each token."""

    pauses = True

    def step(self) -> list[Output]:
        found = super().step()
        if self.pauses:
            self.gate.clear()
        return found


def started(server: Served, body: Any) -> http.client.HTTPConnection:
    """A connection on which a request was sent, and no answer was read."""
    found = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    found.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    return found


def test_an_answer_that_was_cut_is_not_counted_as_answered() -> None:
    """Fault: a stream whose client hung up counts as a request with the status 200."""
    script = _Pauses()
    with served(script) as server:
        connected = started(server, {**GREEDY, "stream": True})
        answer = connected.getresponse()
        assert answer.read(10)
        answer.close()
        connected.close()
        while server.service.active:
            time.sleep(0.01)
        assert requests_of(server) == {}
        script.pauses = False
        script.gate.set()
        assert server.post(COMPLETIONS, GREEDY)[0] == 200
        assert requests_of(server) == {"200": 1.0}


def test_times_of_tokens_are_those_of_the_engine() -> None:
    """Fault: a client that reads slowly makes the model look slow, and what it does not read is not counted."""
    watch = Watch()
    flight = RequestFlight(SimpleNamespace(watch=watch, cancel=lambda _: None), [((1,), Sampling())], time.monotonic())  # type: ignore[arg-type]

    async def arrive() -> None:
        for _ in range(3):
            flight.put((0, Output(1, 97, "a")))

    asyncio.run(arrive())
    assert b"codescent_generated_tokens_total 3.0" in watch.text()
    assert b"codescent_time_to_first_token_seconds_count 1.0" in watch.text()


def test_a_quantile_is_a_value_that_enough_others_do_not_exceed() -> None:
    """Fault: the 95 % of few requests is a time that more of them exceed."""
    times = [3.0, 1.0, 2.0, 4.0, 5.0]
    assert [quantile(times, share) for share in (0.2, 0.5, 0.9, 0.95)] == [1.0, 3.0, 5.0, 5.0]
    assert quantile([7.0], 0.5) == 7.0
    assert math.isnan(quantile([], 0.5))


class _Panics(Scripted):
    """An engine that refuses some prompts by an error that no Exception is, as Rust's panics are."""

    def add(self, prompt: Sequence[int], sampling: Sampling) -> int:
        if prompt[0] == ord("x"):
            raise KeyboardInterrupt("panic")
        return super().add(prompt, sampling)


def test_a_prompt_that_breaks_a_library_ends_its_request_alone() -> None:
    """Fault: one request ends the engine of all; or its thread is gone, and all wait for ever."""
    script = _Panics()
    with served(script) as server:
        script.gate.clear()
        other = started(server, GREEDY)
        while not script.busy:
            time.sleep(0.01)
        script.gate.set()
        status, body, _ = server.post(COMPLETIONS, {**GREEDY, "prompt": "x"})
        assert (status, body["error"]["message"]) == (500, "it cannot be begun: KeyboardInterrupt: panic")
        assert other.getresponse().status == 200
        assert server.post(COMPLETIONS, GREEDY)[0] == 200
        script.fails = KeyboardInterrupt("panic")  # type: ignore[assignment]
        assert server.post(COMPLETIONS, GREEDY)[0] == 500
        server.join()


class _Panic(BaseException):
    """What tokenizers raise where their code in Rust is wrong."""


class _Tokenizer(ByteTokenizer):
    def encode(self, text: str) -> Any:
        if text == "x":
            raise _Panic("index out of bounds")
        return super().encode(text)


def test_a_fault_of_a_tokenizer_is_answered_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: an error in another form than OpenAI's, and not a word for who runs the server."""
    found = opened(Scripted(), _Tokenizer())
    thread = EngineThread(found.engine, 4, 8, Watch())
    server = Served(ModelService("tiny", "", thread.watch, found, thread))
    try:
        status, body, headers = server.post(COMPLETIONS, {**GREEDY, "prompt": "x"})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert headers["x-request-id"] in body["error"]["message"]
        assert server.post(COMPLETIONS, GREEDY)[0] == 200
    finally:
        server.stop()
        server.join()
    said = capsys.readouterr().err
    assert said.startswith(f"request {headers['x-request-id']}: POST {COMPLETIONS}: Traceback")
    assert "index out of bounds" in said


def entry(number: int) -> Entry:
    """An entry of a log."""
    return Entry(float(number), "step 1", COMPLETIONS, {}, ["x"], ["stop"], [[1]], [1], [1], 0.1)


class _Thread:
    """Gives a loss for each prompt."""

    async def call(self, _: Any) -> float:
        return 1.5


def test_a_log_goes_on_where_it_was_moved_deleted_or_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: after a rotation lines go into a file that nobody reads; after a full disk two lines become one."""
    path = tmp_path / "log.jsonl"
    log = RequestLog(path)

    def write(number: int) -> None:
        asyncio.run(log.write(entry(number), _Thread()))  # type: ignore[arg-type]

    write(1)
    path.rename(tmp_path / "log.1")
    write(2)
    assert json.loads((tmp_path / "log.1").read_text())["time_s"] == 1
    assert path.stat().st_mode & 0o777 == 0o600

    def tears(file: Any, data: bytes) -> None:
        file.write(data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("codescent.base.writing.write_all", tears)
        write(3)
    write(4)
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["time_s"], json.loads(last)["time_s"]) == (2, 4)
    assert len(torn) == 20
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    write(5)
    assert not (tmp_path / "elsewhere").exists()
    said = capsys.readouterr().err
    assert said.count("requests are not logged") == 2
    assert "symbolic link" in said
    log.close()


def test_an_engine_that_has_failed_leaves_lines_without_losses(tmp_path: Path) -> None:
    """Fault: the line of an answer that was sent is lost, or the fault is answered a second time."""

    class Failed:
        async def call(self, _: Any) -> float:
            raise RefusedRequest(503, "the engine has stopped")

    log = RequestLog(tmp_path / "log.jsonl")
    asyncio.run(log.write(entry(1), Failed()))  # type: ignore[arg-type]
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["prompt_losses"] == [None]


def test_a_host_that_is_no_name_is_refused() -> None:
    """Fault: a traceback of the codec of names of hosts."""
    for host in ("..", "a" * 300, "ü" * 70):
        with pytest.raises(UserError, match="give an address of this machine"):
            http_server.bound(host, 0)


def test_a_finished_flight_is_not_cancelled() -> None:
    """Fault: a row that has ended is cancelled in the engine, where its number may be another request's."""
    cancelled = list[Any]()
    thread = SimpleNamespace(watch=Watch(), cancel=cancelled.append)
    flight = RequestFlight(thread, [((1,), Sampling()), ((2,), Sampling())], time.monotonic())  # type: ignore[arg-type]

    async def arrive() -> None:
        flight.put((0, Output(1, 97, "a", finished=Finish.LENGTH)))
        await flight.next()

    asyncio.run(arrive())
    flight.cancel()
    assert [row.index for row in cancelled] == [1]


class _Talks(Scripted):
    """An engine whose tokens are longer than what the system holds for a client that reads nothing."""

    def step(self) -> list[Output]:
        return [replace(output, text="a" * 4_000_000) for output in super().step()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such limit")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_left(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a client that does not read its answer holds a connection, its memory, and a row, for ever."""
    monkeypatch.setattr(http_server, "STALL_S", 1.0)
    with served(_Talks()) as server:
        before = len(psutil.Process().net_connections())
        client = started(server, {**GREEDY, "stream": stream})
        while not any(one.status == "ESTABLISHED" and one.raddr for one in psutil.Process().net_connections()):
            time.sleep(0.01)
        # Our end of the connection stays open; the server's end goes.
        while len(psutil.Process().net_connections()) > before + 1 or server.service.active:
            time.sleep(0.1)
        assert server.ask("GET", "/health")[0] == 200
        client.close()
