"""In: a request for texts, by HTTP. Out: the answer, whole or as a stream of events, sent.
Does not choose tokens (the engine does), encode prompts (prompts.py) or write JSON (answers.py)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from codescent.inference.open import Opened
from codescent.inference.prompt_logprobs import prompt_logprobs
from codescent.serving import prompts
from codescent.serving.answers import ChatAnswer, CompletionAnswer, GivenText, Json, TextAnswer
from codescent.serving.engine_thread import EngineThread, RequestFlight
from codescent.serving.hang_up import body_of, until_hang_up
from codescent.serving.prompts import Prepared
from codescent.serving.refused import RefusedRequest
from codescent.serving.request_log import Entry
from codescent.serving.schemas import UNUSED, ChatRequest, CompletionRequest, read_request
from codescent.serving.service import MOST_BODY_BYTES, ModelService

_DONE = b"data: [DONE]\n\n"
Form = TypeVar("Form", CompletionRequest, ChatRequest)


class Generate(Generic[Form]):
    """An endpoint, as an ASGI application: it holds places and rows of the engine until the last byte is sent."""

    def __init__(
        self,
        service: ModelService,
        path: str,
        form: type[Form],
        prepare: Callable[[Form, Opened], Prepared],
        answer: type[TextAnswer],
    ) -> None:
        self._service, self._path = service, path
        self._form: type[Form] = form
        self._prepare: Callable[[Form, Opened], Prepared] = prepare
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises RefusedRequest before anything is sent; HungUp."""
        begin_s, service = time.monotonic(), self._service
        opened, thread = service.generator()
        body = await body_of(receive, Headers(scope=scope).get("content-length"), MOST_BODY_BYTES)
        request, unused = await read_request(body, self._form)
        service.refuse_other(request.model)
        headers = {UNUSED: ", ".join(unused)} if unused else {}
        with thread.places(_count(request)):
            prepared = await until_hang_up(receive, asyncio.to_thread(self._prepare, request, opened))
            count = len(prepared.prompts) * prepared.each
            text_of = partial(_text_of, opened)
            answer = self._answer(service.name, service.which, prepared.num_tokens, count, text_of)
            if isinstance(answer, CompletionAnswer) and isinstance(request, CompletionRequest) and request.echo:
                answer.echo(await until_hang_up(receive, _echoed(request, prepared, opened, thread)))
            with thread.fly(prepared.wanted, begin_s) as flight:
                first = await until_hang_up(receive, flight.next())
                events = _events(flight, first, answer)
                if request.stream:
                    sending = _send_stream(send, events, answer, headers, with_usage=request.with_usage)
                    await until_hang_up(receive, sending)
                else:
                    await until_hang_up(receive, _drain(events))
                    await JSONResponse(answer.whole(), headers=headers)(scope, receive, send)
        seconds = time.monotonic() - begin_s
        service.watch.generated(seconds, prepared.num_tokens)
        if service.log is not None:
            entry = Entry.of(service.which, self._path, request, prepared.prompts, answer, seconds)
            await service.log.write(entry, thread)


def completions(service: ModelService) -> Generate[CompletionRequest]:
    """`/v1/completions`."""
    return Generate(service, "/v1/completions", CompletionRequest, prompts.completion, CompletionAnswer)


def chats(service: ModelService) -> Generate[ChatRequest]:
    """`/v1/chat/completions`."""
    return Generate(service, "/v1/chat/completions", ChatRequest, prompts.chat, ChatAnswer)


def _count(request: CompletionRequest | ChatRequest) -> int:
    return (len(request.prompt) if isinstance(request, CompletionRequest) else 1) * (request.n or 1)


def _text_of(opened: Opened, token: int) -> str:
    """The text of a token. A model may have more ids than its tokenizer: they have no text."""
    return opened.tokenizer.decode([token]) if token < opened.tokenizer.vocab_size else ""


async def _echoed(
    request: CompletionRequest, prepared: Prepared, opened: Opened, thread: EngineThread
) -> list[GivenText]:
    """For each text, the prompt that stands before it; with its logarithms if the request asks for them."""
    found = []
    for given, ids in zip(request.prompt, prepared.prompts, strict=True):
        text = given if isinstance(given, str) else opened.tokenizer.decode(ids)
        one = GivenText(text)
        if request.logprobs is not None:
            top = request.logprobs
            one.ids = list(ids)
            one.logprobs = await thread.call(partial(prompt_logprobs, thread.engine.module, ids, top))
        found += [one] * prepared.each
    return found


async def _events(flight: RequestFlight, first: tuple[int, Any] | None, answer: TextAnswer) -> AsyncIterator[Json]:
    """The choices of each event, as the engine gives them."""
    for choice in answer.begin():
        yield choice
    arrived = first
    while arrived is not None:
        if (part := answer.take(*arrived)) is not None:
            yield part
        arrived = await flight.next()


async def _drain(events: AsyncIterator[Json]) -> None:
    async for _ in events:
        pass


async def _send_stream(
    send: Send, events: AsyncIterator[Json], answer: TextAnswer, headers: dict[str, str], *, with_usage: bool
) -> None:
    """Send server-sent events: pieces of the answer, and [DONE]. After an error of the engine, the error instead."""
    fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", **headers}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    try:
        async for choice in events:
            await _send(send, _event(answer.piece([choice])))
        last = _event(answer.piece([], answer.usage())) if with_usage else b""
    except RefusedRequest as error:
        last = _event(error.body)
    await _send(send, last + _DONE)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
