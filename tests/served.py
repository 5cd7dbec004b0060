"""In: an engine, or one that obeys a script. Out: a server in a thread of this process, and requests to it.
Does not start the command (test_serve_command.py does)."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from codescent import models
from codescent.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from codescent.inference.engine import Engine
from codescent.inference.open import Opened
from codescent.inference.request import Finish, Output, Sampling
from codescent.inference.schedule import Capacity
from codescent.models.decoder import Decoder
from codescent.serving import http_server
from codescent.serving.engine_thread import EngineThread
from codescent.serving.service import ModelService
from codescent.serving.watch import Watch
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens
from codescent.tasks.task import Prompts

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 64}


def tiny(vocab_size: int = 257, seed: int = 0, **sizes: int) -> Decoder:
    """A GPT-2 with random weights, in evaluation mode."""
    shape = models.shape_of("gpt2", {**SIZES, **sizes, "vocab_size": vocab_size})
    module = models.construct(models.facts_of("gpt2", shape), "cpu")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    assert isinstance(module, Decoder)
    return module.eval()


class Scripted:
    """An engine that gives one letter for each prompt at a time, and waits where it is told to.

    `gate`: while it is clear, no step ends.
    """

    seq_len, pages_used, pages_total, cached_tokens, preemptions, running = 64, 0, 8, 0, 0, 0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.cancelled: list[int] = []
        self.fails: Exception | None = None
        self._left: dict[int, int] = {}
        self._ended = deque[int]()
        self._next = 0

    def add(self, prompt: Sequence[int], sampling: Sampling) -> int:
        self._next += 1
        self._left[self._next] = sampling.max_new_tokens
        return self._next

    def cancel(self, request: int) -> None:
        if request in self._left:
            self.cancelled.append(request)
            self._ended.append(request)

    @property
    def busy(self) -> bool:
        return bool(self._left)

    @property
    def waiting(self) -> int:
        return len(self._left)

    def step(self) -> list[Output]:
        self.gate.wait(60)
        if self.fails is not None:
            raise self.fails
        found = [Output(self._ended.popleft(), None, finished=Finish.CANCELLED) for _ in range(len(self._ended))]
        for output in found:
            self._left.pop(output.request, None)
        for request in self._left:
            self._left[request] -= 1
            found.append(Output(request, 97, "a", finished=None if self._left[request] else Finish.LENGTH))
        self._left = {request: left for request, left in self._left.items() if left}
        return found


def opened(engine: Any, tokenizer: Tokenizer | None = None, chat: Any = None) -> Opened:
    """An engine as `open_engine` returns it."""
    tokenizer = tokenizer or ByteTokenizer()
    return Opened(engine, tokenizer, Prompts(tokenizer), chat, "tiny", "step 1")


def engine(module: Decoder | None = None, rows: int = 4) -> Engine:
    """An engine of a tiny model."""
    return Engine(module or tiny(), ByteTokenizer(), Capacity(rows, 64, 4, 32), stops=[256], vocab_size=257)


class Served:
    """A server in a thread. `service`: what it serves; use it by `ask` alone while the server runs."""

    def __init__(self, service: ModelService, *, token: str | None = None, grace_s: float = 30.0) -> None:
        self.service = service
        self.socket = http_server.bound("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = http_server.url_of(self.socket)
        self.error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._main = http_server.run(service, self.socket, token=token, host="127.0.0.1", grace_s=grace_s)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main)
        except BaseException as error:
            self.error = error
        finally:
            self._loop.close()

    def stop(self) -> None:
        """What SIGTERM does."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.service.stop)

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers of the answer to a body, which is bytes or becomes JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, {"content-type": "application/json", **(headers or {})})

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (JSON is parsed) and headers of the answer to a request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            text, fields = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
            is_json = fields.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(text) if is_json else text, fields
        finally:
            connection.close()


@contextmanager
def served(engine: Any, *, rows: int = 4, waiting: int = 8, chat: Any = None, **options: Any) -> Iterator[Served]:
    """A server of an engine, to the end of the block."""
    watch = Watch()
    thread = EngineThread(engine, rows, waiting, watch)
    watch.add_engine(engine, lambda: thread.open)
    service = ModelService("tiny", "step 1", watch, opened(engine, chat=chat), thread, most_waiting=waiting)
    server = Served(service, **options)
    try:
        yield server
    finally:
        if isinstance(engine, Scripted):
            engine.gate.set()
        server.stop()
        server.join()


TALK = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template that is short enough for a tiny model."""


def chat_tokens(text: str = TALK) -> ChatTokens:
    """A chat template for bytes."""
    return ChatTokens(ChatTemplate(ChatFiles("talk.jinja", text, {})), ByteTokenizer())
