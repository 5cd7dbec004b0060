"""In: JSON lines of prompts and responses or of messages, a tokenizer. Out: the folder of their tokens, or nothing.
Does not open the folder (source.py does) and does not check lines (conversations.py does)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.errors import UserError
from codescent.data.prepared import AGAIN, DESCRIPTION, SPLITS, TOKENIZER, given_sha256, write_array
from codescent.data.progress import stage
from codescent.data.text.request import tokenizer_of
from codescent.data.tokenizers.tokenizer import Tokenizer, token_dtype
from codescent.tasks.conversations.chat_files import ChatFiles, read_chat_files
from codescent.tasks.conversations.chat_template import ChatTemplate, Spans
from codescent.tasks.conversations.chat_tokens import ChatTokens
from codescent.tasks.conversations.conversations import Conversation, Keys, Message, read_conversations, refuse
from codescent.tasks.conversations.source import ARRAYS, ResponseDataset, chat_of
from codescent.tasks.folder import Request, tokenizer_identity

PLAIN = "{prompt}{response}"
Encode = Callable[[Sequence[Message]], tuple[list[int], Spans]]
"""Messages to their tokens, and the pieces of these that are wanted."""


@dataclass(frozen=True)
class Template:
    """How an example reads: text, "{prompt}", text, "{response}", text."""

    before: str
    between: str
    after: str

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises UserError where the text has not both, in this order, each once."""
        before, prompt, rest = text.partition("{prompt}")
        between, response, after = rest.partition("{response}")
        if not prompt or not response or text.count("{prompt}") > 1 or text.count("{response}") > 1:
            raise UserError(
                f"data.template: {text!r} must hold {{prompt}} and, after it, {{response}}, each once; such as "
                '"Question: {prompt}\\nAnswer: {response}"'
            )
        return cls(before, between, after)


@dataclass(frozen=True)
class ResponseRequest(Request):
    """What is to be prepared.

    Attributes:
        corpus: a file of JSON lines, each an object with a prompt and a response, texts both, or with messages.
        tokenizer: byte, gpt2, bert, bert-cased, bert:FILE, or a tokenizer's JSON file.
        template: see `Template`.
        prompt_key, response_key, messages_key: their keys there.
        validation_fraction: share of the examples, the last ones, for the validation split.
        chat_template: writes messages as text; or its path; None: `template` writes prompts and responses.
    """

    dataset = ResponseDataset

    corpus: str
    tokenizer: str
    template: str = PLAIN
    prompt_key: str = "prompt"
    response_key: str = "response"
    validation_fraction: float = 0.1
    messages_key: str = "messages"
    chat_template: Path | ChatFiles | None = None

    def fields(self) -> dict[str, Any]:
        """See `Request`."""
        return asdict(self)

    def parts(self) -> Mapping[str, Callable[[], Any]]:
        """See `Request`."""
        return {
            "template": self._checked_template,
            "chat_template": lambda: None if self.chat is None else self.chat.files.kept(),
            "tokenizer": self._tokenizer_identity,
            "corpus": self._corpus_sha256,
        }

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The chat template, compiled. Raises UserError: it cannot be read or compiled."""
        given = self.chat_template
        return None if given is None else ChatTemplate(read_chat_files(given) if isinstance(given, Path) else given)

    def refuse_prepared(self) -> None:
        """Raise UserError where a key that is not at its default differs from what the folder was prepared with."""
        before = self.dataset.described(self.path)["request"]
        problems = [
            f"data.{name} = {getattr(self, name)!r}: {self.path} was prepared with {before.get(name)!r}; leave it out"
            for name in ("template", "prompt_key", "response_key", "messages_key", "validation_fraction")
            if getattr(self, name) not in (getattr(ResponseRequest, name), before.get(name))
        ]
        chat = chat_of(self.path, before)
        if self.chat is not None and (chat is None or not chat.is_same(self.chat.files)):
            other = "none" if chat is None else "another one"
            problems.append(
                f"data.chat_template: {self.chat.name}: {self.path} was prepared with {other}; leave it out"
            )
        if problems:
            raise UserError(*problems)

    def write(self, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `Request`."""
        tokenizer = tokenizer_of(self.tokenizer)
        chat = None if self.chat is None else ChatTokens(self.chat, tokenizer)
        if chat is not None and progress:
            _tell_endless(chat, tokenizer)
        encode = _pair_encoder(Template.parse(self.template), tokenizer) if chat is None else _chat_encoder(chat)
        keys = Keys(self.prompt_key, self.response_key, self.messages_key)
        examples = read_conversations(self.path, keys, with_template=chat is not None)
        num_train = len(examples) - max(1, round(self.validation_fraction * len(examples)))
        if num_train < 1:
            raise UserError(f"{self.path}: {len(examples)} examples are too few to split into train and validation")
        splits: dict[str, Any] = {}
        problems: list[str] = []
        dtype = token_dtype(tokenizer.vocab_size)
        with stage(f"tokenising {self.path.name}", len(examples), progress) as advance:
            for split, part in zip(SPLITS, (examples[:num_train], examples[num_train:]), strict=True):
                arrays = _tokens(part, encode, dtype, problems, advance)
                for name, array in zip(ARRAYS, arrays, strict=True):
                    write_array(folder / f"{split}_{name}.npy", array)
                splits[split] = {"examples": len(part), "tokens": len(arrays[0])}
        refuse(self.path, problems)
        tokenizer.save(folder / TOKENIZER)
        return {
            "source": str(self.path),
            "tokenizer": {"kind": self.tokenizer, "vocab_size": tokenizer.vocab_size},
            "splits": splits,
        }

    def _checked_template(self) -> str:
        Template.parse(self.template)
        if self.chat_template is not None and self.template != PLAIN:
            raise UserError("data.template, data.chat_template: both say how an example reads; leave one of them out")
        return self.template

    def _corpus_sha256(self) -> str:
        if (self.path / DESCRIPTION).is_file():
            raise UserError(f"{self.path}: prepared, but not in the format {self.dataset.format!r}: {AGAIN}")
        return given_sha256(self.path, "a file of JSON lines with prompts and responses, or with messages")

    def _tokenizer_identity(self) -> str:
        if self.tokenizer == "char" or self.tokenizer.startswith("bpe:"):
            raise UserError(
                f'data.tokenizer = "{self.tokenizer}": it is made of a corpus of text, and prompts and responses are '
                "not; take byte, gpt2, or the tokenizer.json of the model that is tuned"
            )
        return tokenizer_identity(self.tokenizer, "a tokenizer, or byte, gpt2, bert")


def _tell_endless(chat: ChatTokens, tokenizer: Tokenizer) -> None:
    """Warn where no control token ends a turn of the assistant: a model learns to end by one."""
    try:
        if chat.end() is None:
            stop = "go on to its longest" if tokenizer.separator is None else "end where a document does"
            print(f"data.chat_template: no control token ends the assistant's turn: samples {stop}", file=sys.stderr)
    except UserError:  # the template may still write the conversations of the file
        return


def _chat_encoder(chat: ChatTokens) -> Encode:
    def encode(messages: Sequence[Message]) -> tuple[list[int], Spans]:
        pieces, wanted = chat.encode(messages)
        return pieces.ids.tolist(), wanted

    return encode


def _pair_encoder(template: Template, tokenizer: Tokenizer) -> Encode:
    """Tokens of a prompt and of its response, which is wanted.

    Each is encoded by itself: a model that is asked continues the tokens of the prompt alone.
    """
    end = [] if tokenizer.separator is None else [tokenizer.separator]

    def encode(messages: Sequence[Message]) -> tuple[list[int], Spans]:
        prompt, response = (message["content"] for message in messages)
        asked = tokenizer.encode(f"{template.before}{prompt}{template.between}").tolist() or end
        told = [*tokenizer.encode(f"{response}{template.after}").tolist(), *end]
        if not asked:
            raise UserError(f"the prompt {prompt!r} has no token for this tokenizer: there is nothing to answer to")
        return [*asked, *told], [(len(asked), len(asked) + len(told))] if told else []

    return encode


def _tokens(
    examples: list[Conversation],
    encode: Encode,
    dtype: np.dtype[Any],
    problems: list[str],
    advance: Callable[[int], None],
) -> tuple[np.ndarray[Any, Any], ...]:
    """Tokens of all examples, where each begins, which pieces are wanted; an example that fails goes to `problems`."""
    parts, begins, wanted = [np.empty(0, dtype)], [0], []
    for example in examples:
        try:
            tokens, spans = encode(example.messages)
        except UserError as error:
            problems += [f"{example.where}: {problem}" for problem in error.problems]
            continue
        wanted += [(begins[-1] + begin, begins[-1] + end) for begin, end in spans]
        begins.append(begins[-1] + len(tokens))
        parts.append(np.array(tokens, dtype))
        advance(1)
    return np.concatenate(parts), np.array(begins, np.int64), np.array(wanted, np.int64).reshape(-1, 2)
