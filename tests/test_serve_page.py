"""In: the page of a server, a headless Chromium. Out: a talk with the model, its errors, and nothing from elsewhere.
Does not judge beauty. Without Chromium or playwright these tests are skipped, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from served import TALK, Scripted, Served, chat_tokens, engine, served
from test_report_browser import NAMES, TOO_WIDE, WORDS

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        folder = tmp_path_factory.mktemp("profile")
        found = playwright.chromium.launch_persistent_context(str(folder), executable_path=program, args=list(WORDS))
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[tuple[Any, list[str]]]:
    """A page; and what the console has said."""
    said: list[str] = []
    found = browser.new_page()
    found.set_default_timeout(20_000)
    found.on("console", lambda message: said.append(message.text))
    found.on("pageerror", lambda error: said.append(str(error)))
    yield found, said
    found.close()


def until(page: Any, condition: str) -> None:
    """Wait until an expression of JavaScript is true. The page forbids `wait_for_function`, which evaluates text."""
    while not page.evaluate(condition):
        page.wait_for_timeout(10)


def ask(page: Any, words: str) -> str:
    """Send words, and return the answer when it is whole."""
    page.fill("#words", words)
    page.press("#words", "Enter")
    until(page, "document.querySelector('#stop').hidden && document.querySelector('#words').value === ''")
    return str(page.locator("article.assistant span").last.inner_text())


def posted(server: Served, messages: list[dict[str, str]], most: int) -> str:
    """What the server answers to the same messages without the page."""
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": most}
    return str(server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"])


def test_a_talk_in_the_page_has_a_history_and_a_system_prompt(page: tuple[Any, list[str]]) -> None:
    """Fault: the page sends no history, forgets the system prompt, or shows a text as HTML."""
    found, said = page
    with served(engine(), chat=chat_tokens(TALK.replace("[{{ message.role }}]", "{{ message.role[0] }}:"))) as server:
        found.goto(server.url)
        until(found, "document.title === 'tiny'")
        assert "a chat model, 64 tokens at most" in found.locator("#facts").inner_text()
        found.locator("summary").click()
        for field, value in (("#system", "x"), ("#temperature", "0"), ("#most", "4")):
            found.fill(field, value)
        first = ask(found, "<b>h</b>")
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "<b>h</b>"}]
        expected = posted(server, messages, 4)
        assert found.evaluate("messages[1].content") == expected
        assert found.locator("article.user span").inner_text() == "<b>h</b>"
        ask(found, "and")
        more = [*messages, {"role": "assistant", "content": expected}, {"role": "user", "content": "and"}]
        assert found.evaluate("messages[3].content") == posted(server, more, 4)
        assert found.locator("article").count() == 4
        found.click("#reset")
        assert found.locator("article").count() == 0
        assert ask(found, "<b>h</b>") == first
        for width in (1280, 390):
            found.set_viewport_size({"width": width, "height": 800})
            assert found.evaluate(TOO_WIDE) == []
        found.fill("#words", "y" * 70)
        found.press("#words", "Enter")
        found.wait_for_selector("#problem:not([hidden])")
        assert "more than the 64 that the model reads" in found.locator("#problem").inner_text()
        assert found.input_value("#words") == "y" * 70, "what was refused is not lost"
        assert [line for line in said if "400" not in line] == []


@pytest.mark.parametrize("chats", [True, False])
def test_a_talk_goes_on_where_the_context_is_full(page: tuple[Any, list[str]], chats: bool) -> None:
    """Fault: after some messages each one is refused, and all that a user can do is to begin anew."""
    found, _ = page
    with served(engine(), chat=chat_tokens() if chats else None) as server:
        found.goto(server.url)
        until(found, "document.title === 'tiny'")
        found.locator("summary").click()
        found.fill("#most", "4")
        for number in range(5):
            ask(found, f"{number} many words 😀")
            assert found.locator("#problem").is_hidden()
        assert found.locator("article").count() == 10
        assert found.evaluate("unread") > 0
        said = found.locator("#talk").inner_text()
        assert ("messages have no room in the context, and were not read" in said) == chats


def test_an_answer_can_be_stopped_in_the_page(page: tuple[Any, list[str]]) -> None:
    """Fault: the button hides the answer, but the engine goes on."""
    found, said = page
    script = Scripted()
    with served(script) as server:
        found.goto(server.url)
        until(found, "document.title === 'tiny'")
        assert "continues your text" in found.locator("#facts").inner_text()
        script.gate.clear()
        found.fill("#words", "go on")
        found.press("#words", "Enter")
        found.wait_for_selector("#stop:not([hidden])")
        until(found, "running !== null")
        while not script.busy:
            found.wait_for_timeout(10)
        found.click("#stop")
        found.wait_for_selector("#stop", state="hidden")
        while server.service.thread is not None and server.service.thread.open:
            found.wait_for_timeout(10)
        script.gate.set()
        assert said == []


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(page: tuple[Any, list[str]]) -> None:
    """Fault: where the server ends, half of an answer looks complete; an empty field is sent as 0."""
    found, _ = page
    found.add_init_script(CUTS)
    with served(engine(), chat=chat_tokens()) as server:
        found.goto(server.url)
        until(found, "document.title === 'tiny'")
        found.fill("#words", "hi")
        found.press("#words", "Enter")
        found.wait_for_selector("#problem:not([hidden])")
        assert "closed before the answer was complete" in found.locator("#problem").inner_text()
        assert found.evaluate("messages.map((one) => one.content)") == ["hi", "half"]
        found.click("#reset")
        found.locator("summary").click()
        found.fill("#temperature", "")
        found.fill("#words", "again")
        found.press("#words", "Enter")
        assert found.evaluate("running === null && messages.length === 0")
        assert found.input_value("#words") == "again"


CUTS = """
const real = fetch;
window.fetch = (path, options) => path.includes("completions")
  ? Promise.resolve(new Response('data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n'))
  : real(path, options);
"""
"""A server that ends within an answer."""


def test_a_server_with_a_token_asks_for_it_in_the_page(page: tuple[Any, list[str]]) -> None:
    """Fault: the page cannot be used where the address asks for a token."""
    found, said = page
    with served(engine(), chat=chat_tokens(), token="secret") as server:
        found.goto(server.url)
        found.wait_for_selector("#problem:not([hidden])")
        assert "asks for a token" in found.locator("#problem").inner_text()
        found.fill("#token", "secret")
        found.locator("#token").press("Tab")
        until(found, "document.title === 'tiny'")
        assert found.locator("#problem").is_hidden()
        found.fill("#most", "3")
        assert ask(found, "hi")
        found.reload()
        until(found, "document.title === 'tiny'")
        assert [line for line in said if "401" not in line] == []
