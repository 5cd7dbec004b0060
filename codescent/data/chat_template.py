"""In: a chat template, a conversation. Out: its text as `transformers` writes it; which characters the assistant says.
Does not look for the template (chat_files.py does) and does not make tokens (chat_tokens.py does)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from codescent.data.chat_files import SPECIAL, TOKENIZER_CONFIG, ChatFiles, read_chat_files
from codescent.data.conversations import ASSISTANT, USER, Message
from codescent.errors import UserError

TAGS = "{% generation %} … {% endgeneration %}"
MARKED = "codescent_marks"  # a variable that is set while the marks of TAGS are wanted
BEGIN, END = "\ufdd0", "\ufdd1"  # such marks: code points that Unicode promises never to make characters


class Written(NamedTuple):
    """A conversation's text, and the characters [begin, end) of each turn that the assistant says."""

    text: str
    turns: list[tuple[int, int]]


class ChatTemplate:
    """A chat template, compiled.

    Rendered with the options, functions and variables of `transformers`' `apply_chat_template(tokenize=False)`. A
    template has the time of its making for "now", so that two renderings of a conversation do not differ by it.

    Args:
        files: the template and its special tokens.

    Attributes:
        name: the file, for messages.
        special: the special tokens that the template asks for, by name.
        identity: what its texts depend on, beside the time.

    Raises:
        UserError: it is no Jinja, or it asks for special tokens that no file tells.
    """

    def __init__(self, files: ChatFiles) -> None:
        self.name = files.name
        environment = _environment(datetime.now())
        try:
            parsed = environment.parse(files.text)
            asked = meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(files.text)
        except TemplateSyntaxError as error:
            raise UserError(
                f"data.chat_template: {files.name}: line {error.lineno} of the template: {error.message}"
            ) from error
        self._tagged = MARKED in asked
        if files.special is None and (unknown := [name for name in SPECIAL if name in asked]):
            raise UserError(
                f"data.chat_template: {files.name}: it asks for {', '.join(unknown)}, and there is no "
                f"{TOKENIZER_CONFIG} beside it that tells what they are; put it there, or write the tokens themselves"
            )
        self._variables = {"tools": None, "documents": None, **(files.special or {})}
        self.special = {name: text for name, text in (files.special or {}).items() if name in asked}
        self.identity = {"template": files.text, "special_tokens": self.special}

    @classmethod
    def read(cls, path: Path) -> ChatTemplate:
        """That of a folder or a file. Raises UserError as `read_chat_files` and the class do."""
        return cls(read_chat_files(path))

    def render(self, messages: Sequence[Message], *, ask: bool = False, marked: bool = False) -> str:
        """The text of messages.

        Args:
            messages: of a conversation, the first ones or all.
            ask: with the beginning of the assistant's next turn (`add_generation_prompt`).
            marked: with BEGIN and END around what the template tags as the assistant's.

        Raises:
            UserError: the template refuses them, in its own words.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        marks = {MARKED: True} if marked else {}
        try:
            return self._template.render(messages=plain, add_generation_prompt=ask, **self._variables, **marks)
        except TemplateError as error:
            raise UserError(f"{self.name}: {error.message}") from error
        except Exception as error:  # whatever an expression of the template raises
            raise UserError(f"{self.name}: {type(error).__name__}: {error}") from error

    def write(self, messages: Sequence[Message], controls: tuple[str, ...]) -> Written:
        """The text of a conversation, and what of it the assistant says: what the template tags so; without tags of
        each turn the words and what ends it, which is whatever stands behind the beginning that asks for the turn.

        Args:
            messages: all of them.
            controls: texts of the tokenizer's control tokens; white space behind one that ends a turn is not said.

        Raises:
            UserError: the template refuses the conversation, or the assistant's turns cannot be told from the rest.
        """
        text = self.render(messages)
        if self._tagged:
            return Written(text, _unmarked(self.render(messages, marked=True), text, self.name))
        turns = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                begin, end = self._turn(messages, number, text)
                said = text[begin:end].rstrip()
                turns.append((begin, begin + len(said) if said.endswith(controls) else end))
        return Written(text, turns)

    def ask(self, prompt: str) -> str:
        """The text with which a user asks, up to where the assistant begins to answer."""
        return self.render([{"role": USER, "content": prompt}], ask=True)

    def _turn(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """Which characters of a conversation's text belong to one turn of the assistant and follow its beginning."""
        turn = f"message {number + 1}, the assistant's"
        try:
            before, asked = self.render(messages[:number]), self.render(messages[:number], ask=True)
            told = text if number + 1 == len(messages) else self.render(messages[: number + 1])
        except UserError as error:
            raise UserError(
                f"{turn}: where it begins and ends is found by writing what stands before it alone: {error}: {_tag()}"
            ) from error
        if not told.startswith(asked) or not text.startswith(told):
            raise UserError(
                f"{turn}: {self.name} writes the messages up to it otherwise when others follow, so that it cannot be "
                f"told from the rest: {_tag()}"
            )
        if asked == before and not self._needs_no_asking(messages[: number + 1], told, told[len(asked) :]):
            raise UserError(
                f"{turn}: {self.name} does not heed add_generation_prompt, so that the turn's words cannot be told "
                f"from the beginning of one: {_tag()}"
            )
        return len(asked), len(told)

    def _needs_no_asking(self, messages: Sequence[Message], told: str, turn: str) -> bool:
        """Whether a template without add_generation_prompt begins the last turn of messages with its words, and does
        not end it with the beginning of the next: that would be gone where the user goes on."""
        goes_on = self.render([*messages, {"role": USER, "content": "?"}])
        return turn.lstrip().startswith(messages[-1]["content"].strip()) and goes_on.startswith(told)


class _Generation(Extension):
    """The tag by which templates say themselves what the assistant says, as `transformers` has it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block: its text, between marks where these are wanted."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_around", [nodes.Name(MARKED, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _around(self, marked: Any, caller: Macro) -> str:
        text: str = caller()
        return f"{BEGIN}{text}{END}" if marked else text


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` has it: nothing that a template says can reach beyond its text."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # Jinja's own is for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _unmarked(marked: str, text: str, name: str) -> list[tuple[int, int]]:
    """Where the parts between marks are in the text without them."""
    pieces = re.split(f"[{BEGIN}{END}]", marked)
    if "".join(pieces) != text:
        raise UserError(f"{name}: the conversation has {BEGIN!r} or {END!r} in it, which mark what is in {TAGS}")
    found = list(_between(re.findall(f"[{BEGIN}{END}]", marked), pieces))
    if not found:
        raise UserError(f"{name}: of this conversation it writes nothing in {TAGS}")
    return found


def _between(marks: list[str], pieces: list[str]) -> Iterator[tuple[int, int]]:
    at = 0
    for mark, before, piece in zip(["", *marks], ["", *pieces], pieces, strict=False):
        at += len(before)
        if mark == BEGIN and piece:
            yield at, at + len(piece)


def _tag() -> str:
    return f"put {TAGS} around the assistant's words in a copy of the template"
