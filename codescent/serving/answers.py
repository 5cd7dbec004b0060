"""In: what the engine gives of each text of a request. Out: the JSON of answers and of the events of a stream.
Does not send it (generate.py does)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from codescent.data.tokenizers.tokenizer import REPLACEMENT
from codescent.inference.request import Output, TokenLogprob

Json = dict[str, Any]
TextOf = Callable[[int], str]
"""The text of one token."""


@dataclass(eq=False)
class GivenText:
    """One text of an answer, as far as it is there."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Add what a step gives."""
        self.text += output.text
        self.finish = output.finished and str(output.finished)
        if output.token is not None:
            self.tokens += 1
            if output.logprob is not None:
                self.ids.append(output.token)
                self.logprobs.append(output.logprob)


class TextAnswer:
    """The answer to one request, whole or in pieces.

    Attributes:
        id: of the answer.
        texts: each text; text i of prompt p is at p * each + i.
    """

    prefix, whole_object, piece_object = "", "", ""

    def __init__(self, model: str, which: str, prompt_tokens: int, count: int, text_of: TextOf) -> None:
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self.texts = [GivenText() for _ in range(count)]
        self._text_of, self._prompt_tokens = text_of, prompt_tokens
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": which}

    def whole(self) -> Json:
        """The answer as one JSON object, when all texts have ended."""
        choices = [self._choice(index, text) for index, text in enumerate(self.texts)]
        return {"id": self.id, "object": self.whole_object, **self._head, "choices": choices, "usage": self.usage()}

    def piece(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """An event of a stream."""
        found = {"id": self.id, "object": self.piece_object, **self._head, "choices": list(choices)}
        return found if usage is None else {**found, "usage": usage}

    def usage(self) -> Json:
        """How many tokens the request has read and generated."""
        new = sum(text.tokens for text in self.texts)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self._prompt_tokens + new,
        }

    def begin(self) -> list[Json]:
        """The choices of the events before the first token."""
        return []

    def take(self, index: int, output: Output) -> Json | None:
        """Add what a step gives of a text. Returns the choice of its event; None: there is nothing to send yet."""
        before = len(self.texts[index].text)
        self.texts[index].add(output)
        if not (output.text or output.finished or output.logprob):
            return None
        return self._part(index, output, before)

    def _part(self, index: int, output: Output, offset: int) -> Json:
        raise NotImplementedError

    def _choice(self, index: int, text: GivenText) -> Json:
        raise NotImplementedError


class CompletionAnswer(TextAnswer):
    """Of `/v1/completions`."""

    prefix, whole_object, piece_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._echoed: Sequence[GivenText] = [GivenText() for _ in self.texts]

    def echo(self, prompts: Sequence[GivenText]) -> None:
        """From now on each text begins with its prompt."""
        self._echoed = prompts

    def begin(self) -> list[Json]:
        """See `TextAnswer`: the prompts, if they are echoed."""
        return [
            {"index": index, "text": one.text, "logprobs": self._logprobs(one, 0), "finish_reason": None}
            for index, one in enumerate(self._echoed)
            if one.text or one.logprobs
        ]

    def _part(self, index: int, output: Output, offset: int) -> Json:
        one = GivenText()
        one.add(output)
        at = len(self._echoed[index].text) + offset
        return {"index": index, "text": one.text, "logprobs": self._logprobs(one, at), "finish_reason": one.finish}

    def _choice(self, index: int, text: GivenText) -> Json:
        echoed = self._echoed[index]
        both = GivenText(logprobs=[*echoed.logprobs, *text.logprobs], ids=[*echoed.ids, *text.ids])
        finish = text.finish or "length"
        return {
            "index": index,
            "text": echoed.text + text.text,
            "logprobs": self._logprobs(both, 0),
            "finish_reason": finish,
        }

    def _logprobs(self, text: GivenText, offset: int) -> Json | None:
        """The tokens of a text and their logarithms, as OpenAI's completions have them. `offset`: its first character.

        Of two tokens with the same text, `top_logprobs` has the likelier one.
        """
        if not text.ids:
            return None
        tokens = [self._text_of(one) for one in text.ids]
        offsets, at = list[int](), offset
        for token in tokens:
            offsets.append(at)
            at += len(token)
        tops: list[Json | None] = []
        for one in text.logprobs:
            named: Json = {}
            for number, value in () if one is None else (*one.top, (one.token, one.logprob)):
                named.setdefault(self._text_of(number), value)
            tops.append(named if one is not None else None)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else one.logprob for one in text.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatAnswer(TextAnswer):
    """Of `/v1/chat/completions`."""

    prefix, whole_object, piece_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[Json]:
        """See `TextAnswer`: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index, _ in enumerate(self.texts)
        ]

    def _part(self, index: int, output: Output, offset: int) -> Json:
        delta = {"content": output.text} if output.text else {}
        one = GivenText()
        one.add(output)
        return {"index": index, "delta": delta, "logprobs": self._logprobs(one), "finish_reason": one.finish}

    def _choice(self, index: int, text: GivenText) -> Json:
        message = {"role": "assistant", "content": text.text, "refusal": None}
        logprobs, finish = self._logprobs(text), text.finish or "length"
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, text: GivenText) -> Json | None:
        found = [
            {**self._named(one.token, one.logprob), "top_logprobs": [self._named(*other) for other in one.top]}
            for one in text.logprobs
            if one is not None
        ]
        return {"content": found, "refusal": None} if found else None

    def _named(self, token: int, logprob: float) -> Json:
        """A token with its logarithm. Its bytes are null if they are not whole characters."""
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
