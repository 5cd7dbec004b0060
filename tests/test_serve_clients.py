"""In: programs that others wrote for OpenAI's API. Out: they work with our server as with OpenAI's.
Does not test each field (test_serving.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import Scripted, Served, chat_tokens, engine, served

openai = pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server of a tiny model with a chat template."""
    with served(engine(), chat=chat_tokens(), token="secret") as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    """The client of the package openai, which tries nothing again."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as found:
        yield found


MESSAGES = [{"role": "user", "content": "hi"}]


def test_the_openai_client_completes_chats_and_streams(client: Any) -> None:
    """Fault: a field that the client's classes need is missing, or an event has another form."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="ab", max_tokens=5, temperature=0, logprobs=1)
    assert (whole.usage.completion_tokens, len(whole.choices[0].logprobs.tokens)) == (5, 5)
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(**options, user="me", logprobs=True)
    pieces = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == chat.choices[0].message.content
    assert pieces[-1].usage == chat.usage


def test_the_openai_client_knows_our_errors(server: Served, client: Any) -> None:
    """Fault: the client raises an error of another class, or its message is empty."""
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match=r"top_p 3\.0: must be in") as found:
        client.completions.create(model="tiny", prompt="a", top_p=3)
    assert (found.value.param, found.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError, match="the header authorization must be"):
        client.with_options(api_key="other").models.list()


def test_the_openai_client_tries_again_where_others_wait() -> None:
    """Fault: without the header retry-after, or with another status, the client gives up or hammers."""
    script = Scripted()
    with served(script, rows=1, waiting=0) as server, server.service.thread.places(1):  # type: ignore[union-attr]
        once = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="1 texts run or wait"):
            once.completions.create(model="tiny", prompt="a")
