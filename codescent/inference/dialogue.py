"""In: what a user says, an opened model. Out: the model's answers, piece by piece; what was said so far.
Does not read from or write to a terminal (verbs/chat.py does)."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace

from codescent.base.errors import UserError
from codescent.inference.open import Opened
from codescent.inference.request import Finish, Sampling
from codescent.tasks.conversations.chat_template import ChatTokens
from codescent.tasks.conversations.messages import ASSISTANT, HALF, USER, Message, half_a_character

SHARE_OF_ANSWER = 4
"""Old messages are left out until an answer has at least a quarter of the context, or all the tokens it may have."""


class Dialogue:
    """A conversation with a model without a chat template: one text, which user and model continue in turn.

    Attributes:
        ended: why the last answer ended; None: it has not ended, or was interrupted.
        left_out: messages that the model did not read for the last answer, as its context has no room for them.
    """

    suffix = ".txt"

    def __init__(self, opened: Opened, sampling: Sampling) -> None:
        self._opened, self._sampling, self._number = opened, sampling, 0
        self._parts: list[str] = []
        self.ended: Finish | None = None
        self.left_out = 0

    def say(self, words: str) -> Generator[str, None, None]:
        """Say something, and yield the pieces of the answer. An answer that is not read to its end stays as it is;
        with one that has no words, nothing is said.

        Raises UserError: the words cannot be encoded, or have no room in the model's context; the model has diverged.
        Then nothing is said.
        """
        if half_a_character(words):
            raise UserError(f"the message {HALF}")
        self.ended, engine = None, self._opened.engine
        # Each answer has random numbers of its own; else the same message would get the same answer.
        sampling = replace(self._sampling, number=self._number)
        request = engine.add(*self._prompt(words, sampling))
        self._number += 1
        pieces = list[str]()
        try:
            while engine.busy:
                for output in engine.step():
                    if output.request != request:  # the rest of an answer that was interrupted
                        continue
                    if output.finished is Finish.ERROR:
                        raise UserError(output.error)
                    pieces.append(output.text)
                    self.ended = output.finished
                    yield output.text
        except GeneratorExit:  # the user has interrupted it
            self._stop(request, pieces)
            raise
        except UserError:
            pieces.clear()
            raise
        finally:
            if answer := "".join(pieces):  # an answer without words is no turn, and `saved` would have a wrong line
                self._keep(words, answer)

    def reset(self) -> None:
        """Forget what was said."""
        self._parts, self.left_out = [], 0

    def saved(self) -> str:
        """What was said, for a file."""
        return "".join(self._parts) + "\n" * bool(self._parts)

    def _stop(self, request: int, pieces: list[str]) -> None:
        """End a request, and take what it has left."""
        self._opened.engine.cancel(request)
        while self._opened.engine.busy:
            pieces += [output.text for output in self._opened.engine.step() if output.request == request]
        pieces.append("")

    def _prompt(self, words: str, sampling: Sampling) -> tuple[list[int], Sampling]:
        """The tokens of all that was said, and how they are continued. Raises UserError: they cannot be encoded.

        A text that is longer than the model's context slides: the model reads its end.
        """
        text, tokenizer = "".join([*self._parts, words]), self._opened.tokenizer
        if not text:
            return self._opened.prompts.encode(text)[1], replace(sampling, slides=True)
        return [*tokenizer.opening, *tokenizer.encode(text).tolist()], replace(sampling, slides=True)

    def _keep(self, words: str, answer: str) -> None:
        self._parts += [words, answer]


class ChatDialogue(Dialogue):
    """A conversation with a model that has a chat template.

    Attributes:
        system: what the model is told before the conversation; "": nothing.
    """

    suffix = ".jsonl"

    def __init__(self, opened: Opened, sampling: Sampling, chat: ChatTokens, system: str = "") -> None:
        super().__init__(opened, sampling)
        self.system, self._chat, self._messages = system, chat, list[Message]()

    def reset(self) -> None:
        """See `Dialogue`; the system prompt stays."""
        self._messages, self.left_out = [], 0

    def saved(self) -> str:
        """See `Dialogue`: a line of JSON, as `data.task = "sft"` reads it."""
        return json.dumps({"messages": [*self._first, *self._messages]}, ensure_ascii=False) + "\n"

    @property
    def _first(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _prompt(self, words: str, sampling: Sampling) -> tuple[list[int], Sampling]:
        """See `Dialogue`. The oldest messages are left out if there is no room for them."""
        message, seq_len = {"role": USER, "content": words}, self._opened.seq_len
        room = min(sampling.max_new_tokens, max(1, seq_len // SHARE_OF_ANSWER))
        for left_out in range(0, len(self._messages) + 1, 2):
            ids = self._chat.encode_turns([*self._first, *self._messages[left_out:], message])
            if len(ids) + room <= seq_len:
                self.left_out = left_out
                return ids, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, seq_len - len(ids)))
        raise UserError(f"the message has {len(ids):,} tokens, and the model reads {seq_len:,}, its answer included")

    def _keep(self, words: str, answer: str) -> None:
        self._messages += [{"role": USER, "content": words}, {"role": ASSISTANT, "content": answer}]


def dialogue(opened: Opened, sampling: Sampling, system: str = "") -> Dialogue:
    """A conversation with a model. Raises UserError: a system prompt for a model without a chat template."""
    if opened.chat is not None:
        return ChatDialogue(opened, sampling, opened.chat, system)
    if system:
        raise UserError(f"--system: {opened.name} has no chat template, which would write it; leave it out")
    return Dialogue(opened, sampling)
