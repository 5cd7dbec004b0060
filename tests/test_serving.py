"""In: requests by HTTP, right and wrong. Out: what OpenAI's API says, or an error in its form; no request is lost.
Does not start the command (test_serve_command.py does) or a browser (test_serve_page.py does)."""

from __future__ import annotations

import base64
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tokenizers as library
import torch
from prometheus_client.parser import text_string_to_metric_families
from served import Scripted, Served, chat_tokens, engine, served, tiny

from codescent import models
from codescent.base.errors import RunFailed
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.inference.prompt_logprobs import prompt_logprobs
from codescent.inference.request import Sampling
from codescent.models.bert.module import Bert
from codescent.serving.embedder import Embedder
from codescent.serving.service import ModelService
from codescent.serving.watch import Watch

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server of a tiny model."""
    with served(engine()) as found:
        yield found


def text_of(prompt: list[int], **options: Any) -> str:
    """What the engine alone says."""
    alone = engine()
    alone.add(prompt, Sampling(**options))
    text = ""
    while alone.busy:
        text += "".join(output.text for output in alone.step())
    return text


def error_of(answer: tuple[int, Any, dict[str, str]]) -> tuple[int, str, str | None]:
    """Status, message and param of an error, which has the form of OpenAI's."""
    status, body, _ = answer
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["message"], body["error"]["param"]


def test_a_completion_is_what_the_engine_says(server: Served) -> None:
    """Fault: the prompt is encoded otherwise, an option does not reach the engine, or tokens are counted wrongly."""
    status, body, _ = server.post(COMPLETIONS, GREEDY)
    assert status == 200
    (choice,) = body["choices"]
    assert choice["text"] == text_of([97, 98], temperature=0.0, max_new_tokens=8)
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    sampled = {**GREEDY, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7, "n": 2}
    _, body, _ = server.post(COMPLETIONS, {**sampled, "prompt": [[1, 2], [3]]})
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7, "max_new_tokens": 8}
    expected = [text_of(prompt, **options, number=number) for prompt in ([1, 2], [3]) for number in (0, 1)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]


def events(server: Served, path: str, body: Any) -> list[Any]:
    """The events of a stream; the last is [DONE]."""
    status, text, headers = server.post(path, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *found, last = [line.removeprefix("data: ") for line in text.decode().strip().split("\n\n")]
    assert last == "[DONE]"
    return [json.loads(line) for line in found]


def test_a_stream_has_the_text_of_the_whole_answer(server: Served) -> None:
    """Fault: a piece is lost or sent twice; texts of several choices are mixed; usage is missing."""
    wanted = {**GREEDY, "prompt": ["ab", "x"], "n": 2, "seed": 3, "temperature": 1, "logprobs": 2}
    _, whole, _ = server.post(COMPLETIONS, wanted)
    *pieces, last = events(server, COMPLETIONS, {**wanted, "stream_options": {"include_usage": True}})
    texts, tokens = ["", "", "", ""], [list[str]() for _ in range(4)]
    for piece in pieces:
        (choice,) = piece["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole["choices"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_an_echoed_prompt_has_the_logarithms_of_the_model(server: Served) -> None:
    """Fault: logarithms are of the token before or after, or of other numbers than the model's."""
    prompt = list(b"hello")
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    _, answer, _ = server.post(COMPLETIONS, body)
    found = answer["choices"][0]["logprobs"]
    logits_TV = tiny()(torch.tensor([prompt]))[0].detach().log_softmax(-1)
    expected = [float(logits_TV[at, token]) for at, token in enumerate(prompt[1:])]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:6] == pytest.approx([*expected, float(logits_TV[4].max())], abs=1e-4)
    assert found["tokens"][:5] == list("hello")
    assert found["text_offset"][:5] == [0, 1, 2, 3, 4]
    _, alone, _ = server.post(COMPLETIONS, {**body, "max_tokens": 0, "prompt": [prompt, prompt]})
    assert [choice["text"] for choice in alone["choices"]] == ["hello", "hello"]
    assert alone["choices"][1]["logprobs"]["token_logprobs"] == found["token_logprobs"][:5]
    tops = [max(one.values()) for one in found["top_logprobs"][1:5]]
    assert tops == pytest.approx(logits_TV[:4].max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 300])
def test_logarithms_of_a_prompt_do_not_depend_on_pieces(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: at the edge of a piece a token is left out, or compared with the wrong row."""
    module, tokens = tiny(seq_len=512), [number * 7 % 257 for number in range(length)]
    whole = prompt_logprobs(module, tokens, 2)
    monkeypatch.setattr("codescent.inference.prompt_logprobs.LOGITS_BYTES", 7 * 4 * 257)
    pieces = prompt_logprobs(module, tokens, 2)
    assert len(whole) == length
    assert whole[0] is None
    for one, other in zip(whole[1:], pieces[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


DEEP = b"[" * 10_000
WRONG: dict[str, tuple[Any, int, str, str | None]] = {
    "no JSON": (b"{", 400, "the body is not JSON: cut short", None),
    "deep JSON": (DEEP + b"]" * 10_000, 400, "the body is not JSON: nested too deeply", None),
    "deep field": (b'{"model": "tiny", "prompt": ' + DEEP + b"]" * 10_000 + b"}", 400, "nested too deeply", None),
    "NaN": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "NaN is no number of JSON", None),
    "a list": ([], 400, "the body must be a JSON object", None),
    "half a character": (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "half of a surrogate pair", None),
    "no prompt": ({"model": "tiny"}, 400, "prompt: is missing", "prompt"),
    "another model": ({**GREEDY, "model": "gpt-9"}, 404, "there is no model 'gpt-9' here; there is 'tiny'", "model"),
    "an unknown field": ({**GREEDY, "temprature": 1}, 400, "did you mean temperature?", "temprature"),
    "a penalty": ({**GREEDY, "presence_penalty": 0.5}, 400, "is not supported here; leave it out", "presence_penalty"),
    "two problems": ({**GREEDY, "n": 0, "logprobs": True}, 400, "; logprobs: input should be a valid integer", "n"),
    "a range": ({**GREEDY, "top_p": 7}, 400, "top_p 7.0: must be in (0, 1]", "top_p"),
    "a bias": ({**GREEDY, "logit_bias": {"257": 1}}, 400, "token 257 is outside the vocabulary of 257", None),
    "a bias's name": ({**GREEDY, "logit_bias": {"x": 1}}, 400, "an id of a token and a number are", "logit_bias"),
    "a token": ({**GREEDY, "prompt": [257]}, 400, "ids are in [0, 257)", "prompt"),
    "nothing": ({**GREEDY, "prompt": []}, 400, "a text, a list of texts, or ids of tokens", "prompt"),
    "a long prompt": ({**GREEDY, "prompt": "a" * 60}, 400, "60 tokens and 8 new ones are more than the 64", "prompt"),
    "many texts": ({**GREEDY, "n": 13}, 400, "13 texts in one request: 12 may be asked for at a time", None),
    "a format": ({**GREEDY, "response_format": {"type": "xml"}}, 400, "response_format.type", "response_format"),
    "no schema": (
        {**GREEDY, "response_format": {"type": "json_schema"}},
        400,
        'response_format.json_schema: is needed with the type "json_schema"',
        "response_format",
    ),
    "a deep schema": (
        b'{"model":"tiny","prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":'
        + b'{"not":' * 90 + b"{}" + b"}" * 90 + b"}}}",
        400,
        "nested 91 levels deep; at most 64",
        "response_format",
    ),
    "a bias without a float": ({**GREEDY, "logit_bias": {"1": 10**400}}, 400, "a finite number is", "logit_bias"),
    "many biases": ({**GREEDY, "logit_bias": {str(n): 1 for n in range(1025)}}, 400, "1,025 of them", "logit_bias"),
    "options of no stream": (
        {**GREEDY, "stream_options": {"include_usage": True}}, 400, "has an effect with stream: true", "stream_options",
    ),
    "an empty stop": ({**GREEDY, "stop": ""}, 400, "an empty text would end every request", "stop"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_answered_in_the_form_of_openai(server: Served, what: str) -> None:
    """Fault: a traceback, a 500, an error that names no field, or a wrong field that is ignored."""
    body, status, said, param = WRONG[what]
    found = error_of(server.post(COMPLETIONS, body))
    assert (found[0], found[2]) == (status, param)
    assert said in found[1]
    assert server.post(COMPLETIONS, {**GREEDY, "max_tokens": 1})[0] == 200


def test_a_chat_without_a_template_says_what_the_model_does(server: Served) -> None:
    """Fault: messages are joined by a template that the model has never seen."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    status, said, param = error_of(server.post(CHATS, body))
    assert (status, said, param) == (
        400, "tiny has no chat template: it continues texts; use /v1/completions", "messages",
    )  # fmt: skip
    assert error_of(server.post("/v1/embeddings", {"model": "tiny", "input": "a"}))[:2] == (
        400,
        "tiny gives no embeddings: only models of the kind bert do",
    )


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_a_chat_is_written_by_the_template_and_answered() -> None:
    """Fault: the generation prompt or a message is missing; a stream names no role; wrong messages are a 500."""
    with served(engine(), chat=chat_tokens()) as server:
        body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 6}
        status, answer, _ = server.post(CHATS, {**body, "logprobs": True, "top_logprobs": 2})
        assert status == 200
        (choice,) = answer["choices"]
        expected = text_of(list(b"[system]be brief[user]hi[assistant]"), temperature=0.0, max_new_tokens=6)
        assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
        assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [2] * 6
        first, *rest = events(server, CHATS, body)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in rest) == expected
        _, whole, _ = server.post(CHATS, {**body, "max_completion_tokens": None})
        used = whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
        assert whole["choices"][0]["finish_reason"] == "stop" or used in (64, 65), "an answer may fill the context"
        for wrong, said in (
            ({"messages": []}, "messages: a list with at least one message"),
            ({"messages": [{"role": "user"}]}, 'message 1: the "content" of the role "user" is missing'),
            ({"messages": [{"role": "user", "content": ""}] * 4097}, "messages: 4,097 of them; at most 4,096"),
            ({"max_tokens": 3}, "both say how long the answer may be"),
            ({"top_logprobs": 3}, "needs logprobs: true"),
            ({"tools": [{"type": "function"}]}, "tools: is not supported here"),
            ({"messages": [{"role": "user", "content": "x" * 80}]}, "are more than the 64 that the model reads"),
        ):
            assert said in error_of(server.post(CHATS, {**body, **wrong}))[1]
        silent = [MESSAGES[1], {"role": "assistant", "content": ""}, MESSAGES[1]]
        assert server.post(CHATS, {**body, "messages": silent})[0] == 200, "the model may have said nothing"


def test_paths_methods_and_kinds_that_are_not_there(server: Served) -> None:
    """Fault: an HTML page or plain text, which a client of the API cannot read."""
    assert error_of(server.ask("GET", "/v1/none"))[0] == 404
    assert error_of(server.ask("GET", COMPLETIONS))[0] == 405
    assert error_of(server.ask("POST", "/v1/models", b"{}", {"content-type": "application/json"}))[0] == 405
    assert error_of(server.ask("POST", COMPLETIONS, b"{}", {"content-type": "text/plain"}))[0] == 415
    assert server.ask("GET", "/v1/models/tiny")[1]["id"] == "tiny"
    assert error_of(server.ask("GET", "/v1/models/other"))[0] == 404


def test_fields_without_effect_are_said(server: Served) -> None:
    """Fault: a field is ignored in silence."""
    _, _, headers = server.post(COMPLETIONS, {**GREEDY, "user": "me", "metadata": {}})
    assert headers["x-codescent-not-used"] == "metadata, user"


def test_a_page_of_the_web_cannot_ask_by_a_name_of_its_own(server: Served) -> None:
    """Fault: a name of an attacker that leads to this machine is answered (DNS rebinding)."""
    assert error_of(server.ask("GET", "/v1/models", headers={"Host": "evil.example"}))[0] == 421
    for name in ("localhost", f"localhost:{server.port}", f"127.0.0.1:{server.port}", "[::1]:80"):
        assert server.ask("GET", "/v1/models", headers={"Host": name})[0] == 200


def test_a_body_that_is_too_long_is_not_read(server: Served) -> None:
    """Fault: a gigabyte is read into memory before it is refused; or a body without a length is read to its end."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n{{".encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert (answer.status, answer.getheader("connection")) == (413, "close")
        assert json.loads(answer.read())["error"]["message"].startswith("the body has more than 8,388,608 bytes")
    with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with suppress(ConnectionError):
            for _ in range(200):
                raw.sendall(chunk)
        with suppress(ConnectionError):
            assert b"413" in raw.recv(64)


def test_clients_without_the_token_are_refused() -> None:
    """Fault: one endpoint forgets the token; health needs it; a token that begins like the right one is taken."""
    with served(engine(), token="right") as server:
        for path in (COMPLETIONS, "/v1/models", "/metrics", "/none"):
            method = "POST" if path == COMPLETIONS else "GET"
            for given in (None, "Bearer", "Bearer righ", "Bearer rightt", "Basic right", "Bearer rïght"):
                headers = {"authorization": given.encode()} if given else {}
                assert error_of(server.ask(method, path, b"{}", headers))[0] == 401, (path, given)  # type: ignore[arg-type]
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/")[0] == 200
        assert server.post(COMPLETIONS, GREEDY, {"authorization": "Bearer right"})[0] == 200


def started(server: Served, body: Any) -> http.client.HTTPConnection:
    """A connection on which a request was sent, and no answer was read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    return connection


def wait_for(condition: Any) -> None:
    """Wait until something is so; the test's own limit ends a wait that has no end."""
    while not condition():
        time.sleep(0.01)


def test_more_texts_than_may_wait_are_refused_and_later_ones_are_not() -> None:
    """Fault: waiting requests pile up without a bound; or a place is never given back."""
    script = Scripted()
    with served(script, rows=2, waiting=1) as server:
        script.gate.clear()
        running = [started(server, {**GREEDY, "max_tokens": 2}) for _ in range(3)]
        wait_for(lambda: server.service.thread.open == 3)
        status, body, headers = server.post(COMPLETIONS, GREEDY)
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        assert server.ask("GET", "/health")[1] == {"status": "ok", "model": "tiny"}
        script.gate.set()
        assert [connection.getresponse().status for connection in running] == [200] * 3
        wait_for(lambda: server.service.thread.open == 0)
        assert server.post(COMPLETIONS, GREEDY)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(stream: bool) -> None:
    """Fault: tokens are generated for nobody, and the row is not given back."""
    script = Scripted()
    with served(script) as server:
        script.gate.clear()
        connection = started(server, {**GREEDY, "max_tokens": 50, "stream": stream})
        wait_for(lambda: script.busy)
        connection.close()
        wait_for(lambda: server.service.thread.open == 0)
        script.gate.set()
        wait_for(lambda: not script.busy)
        assert script.cancelled == [1]
        assert b"codescent_hung_up_total 1.0" in server.ask("GET", "/metrics")[1]


def test_a_stop_lets_running_requests_end_and_refuses_new_ones() -> None:
    """Fault: a running answer is cut, a new request is taken, or the process never ends."""
    script = Scripted()
    with served(script) as server:
        script.gate.clear()
        connection = started(server, {**GREEDY, "max_tokens": 5})
        wait_for(lambda: script.busy)
        server.stop()
        wait_for(lambda: server.service.stopping)
        assert server.ask("GET", "/health")[0] == 503
        assert error_of(server.post(COMPLETIONS, GREEDY))[:1] == (503,)
        script.gate.set()
        answer = connection.getresponse()
        assert json.loads(answer.read())["choices"][0]["text"] == "aaaaa"
        server.join()
        assert server.error is None


def test_an_engine_that_fails_ends_its_requests_and_the_server() -> None:
    """Fault: clients wait for ever for an engine that is gone."""
    script = Scripted()
    with served(script) as server:
        script.fails = RuntimeError("out of memory")
        script.gate.clear()
        connections = [started(server, GREEDY) for _ in range(2)]
        wait_for(lambda: server.service.thread.open == 2)
        script.gate.set()
        for connection in connections:
            answer = connection.getresponse()
            found = error_of((answer.status, json.loads(answer.read()), {}))
            assert found[:2] in (
                (500, "the engine has stopped: RuntimeError: out of memory"),
                (503, "the engine has stopped: RuntimeError: out of memory"),
            )
        server.join()
        assert isinstance(server.error, RunFailed)


def test_figures_are_prometheus_text_and_count_what_happened() -> None:
    """Fault: a name or a label that Prometheus refuses; a request, token or time that is not counted."""
    with served(engine()) as server:
        server.post(COMPLETIONS, {**GREEDY, "n": 2})
        server.post(COMPLETIONS, b"{")
        server.ask("GET", "/v1/" + "x" * 50)
        _, text, headers = server.ask("GET", "/metrics")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        found = {
            (one.name, *sorted(one.labels.items())): one.value
            for family in text_string_to_metric_families(text.decode())
            for one in family.samples
        }
    assert found[("codescent_requests_total", ("path", COMPLETIONS), ("status", "200"))] == 1
    assert found[("codescent_requests_total", ("path", COMPLETIONS), ("status", "400"))] == 1
    assert found[("codescent_requests_total", ("path", "other"), ("status", "404"))] == 1
    assert found[("codescent_generated_tokens_total",)] == 16
    assert found[("codescent_prompt_tokens_total",)] == 2
    assert found[("codescent_time_to_first_token_seconds_count",)] == 2
    assert found[("codescent_time_per_token_seconds_count",)] == 14
    assert found[("codescent_request_seconds_count",)] == 1
    assert found[("codescent_tokens_per_second",)] == pytest.approx(1.6)
    assert found[("codescent_running",)] == found[("codescent_waiting",)] == 0
    assert found[("codescent_pages",)] == 64
    for share in ("0.5", "0.9", "0.95", "0.99"):
        assert 0 < found[("codescent_request_recent_seconds", ("quantile", share))] < math.inf


def test_many_requests_at_once_have_the_answers_that_each_has_alone(server: Served) -> None:
    """Fault: tokens of one request reach another."""
    prompts = ["a", "bc", "def", "ghij"] * 2
    found = [""] * len(prompts)

    def ask(number: int) -> None:
        body = {**GREEDY, "prompt": prompts[number], "stop": ["\x00never"]}
        found[number] = server.post(COMPLETIONS, body)[1]["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [text_of(list(prompt.encode()), temperature=0.0, max_new_tokens=8) for prompt in prompts]


def encoder(seq_len: int = 16) -> tuple[Bert, WordPiece]:
    """A BERT with random weights in fp64, and a tokenizer of few words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "many", "workers", "one", "descent"]
    inner = library.Tokenizer(library.models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": seq_len, "vocab_size": len(words)}
    module = models.construct(models.facts_of("bert", models.shape_of("bert", sizes)), "cpu").double().eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    assert isinstance(module, Bert)
    return module, WordPiece(inner)


def test_embeddings_are_the_means_of_the_states_whatever_else_is_in_the_batch() -> None:
    """Fault: padding is among the mean, or the order of the inputs is lost, or a form of numbers differs."""
    module, tokenizer = encoder()
    service = ModelService("tiny", "step 1", Watch(), embedder=Embedder(module, tokenizer))
    server = Served(service)
    try:
        texts = ["many workers one descent", "one", "descent many"]
        _, answer, _ = server.post("/v1/embeddings", {"model": "tiny", "input": texts})
        assert answer["usage"]["prompt_tokens"] == 6 + 3 + 4
        for entry, ids in zip(answer["data"], ([2, 5, 6, 7, 8, 3], [2, 7, 3], [2, 8, 5, 3]), strict=True):
            states_TD = module(torch.tensor([ids]))[0].detach()
            mean_D = states_TD.mean(0)
            assert entry["embedding"] == pytest.approx((mean_D / mean_D.norm()).tolist(), abs=1e-6)
        coded = {"model": "tiny", "input": [2, 7, 3], "encoding_format": "base64"}
        _, other, _ = server.post("/v1/embeddings", coded)
        numbers = np.frombuffer(base64.b64decode(other["data"][0]["embedding"]), "<f4")
        assert numbers.tolist() == pytest.approx(answer["data"][1]["embedding"], abs=1e-6)
        for wrong, said in (
            ({"input": "one " * 20}, "input: 22 tokens are more than the 16 that the model reads"),
            ({"input": ["one", [9]]}, "input 2: the token 9: ids are in [0, 9)"),
            ({"input": ""}, None),
            ({"dimensions": 8}, "dimensions: the vectors have 16 numbers; leave it out"),
        ):
            found = server.post("/v1/embeddings", {"model": "tiny", "input": "one", **wrong})
            assert found[0] == (200 if said is None else 400)
            assert said is None or said in error_of(found)[1]
        said_now = error_of(server.post(COMPLETIONS, GREEDY))[1]
        assert said_now == "tiny generates no text; it has /v1/embeddings"
    finally:
        server.stop()
        server.join()


PATTERNS = [{"type": "string", "pattern": f"a{{{number}}}"} for number in range(40)]
"""Whether all of them can match takes time that doubles with each."""


def test_a_grammar_decides_the_text_and_one_that_never_ends_is_ended_by_the_tokens() -> None:
    """Fault: a grammar does not reach the engine; a request without an end holds its row for ever."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(engine()) as server:
        only_a = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", **only_a}}}
        no_blanks = {str(token): -100 for token in b" \t\n\r"}  # a model that knows nothing would write them for ever
        body = {**GREEDY, "max_tokens": 40, "response_format": form, "logit_bias": no_blanks}
        _, answer, _ = server.post(COMPLETIONS, body)
        found = json.loads(answer["choices"][0]["text"])
        assert found in ({"a": 1}, {"a": 2})
        form = {"type": "regex", "pattern": "(ab)+c{1000}"}
        _, answer, _ = server.post(COMPLETIONS, {**GREEDY, "max_tokens": 9, "response_format": form})
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert set(choice["text"]) <= set("abc")


@pytest.mark.slow
def test_a_grammar_that_cannot_be_used_holds_nobody_up() -> None:
    """Fault: a grammar of a stranger is compiled for minutes between two steps, and all wait; or it is a 500."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(engine()) as server:
        for wrong, said in (
            ({"type": "regex", "pattern": "(((((a{1000}){1000}){1000}){1000}){1000})"}, None),
            ({"type": "regex", "pattern": "("}, "grammar: "),
            ({"type": "json_schema", "json_schema": {"schema": {"allOf": PATTERNS}}}, "takes more than 2 s or 2 GiB"),
            ({"type": "lark", "grammar": "start: start"}, None),  # None: refused, or ended by its tokens
        ):
            status, body, _ = server.post(COMPLETIONS, {**GREEDY, "max_tokens": 3, "response_format": wrong})
            assert status in ((400,) if said else (200, 400)), body
            assert said is None or said in body["error"]["message"]
        assert server.post(COMPLETIONS, GREEDY)[0] == 200
