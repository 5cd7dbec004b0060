"""In: JSON lines of prompts and responses or of messages, a tokenizer. Out: the folder of their tokens, or nothing.
Does not open the folder (source.py does) and does not check lines (conversations.py does)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.errors import UserError
from codescent.data.prepared import (
    AGAIN,
    DESCRIPTION,
    SPLITS,
    TOKENIZER,
    describe,
    existing,
    folder_of,
    given_sha256,
    prepared,
    write_array,
)
from codescent.data.progress import stage
from codescent.data.text.request import tokenizer_of
from codescent.data.tokenizers import wordpiece
from codescent.data.tokenizers.tokenizer import Tokenizer, token_dtype
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.tasks.conversations.chat_template import ChatTemplate
from codescent.tasks.conversations.chat_tokens import ChatTokens
from codescent.tasks.conversations.conversations import Conversation, Keys, Message, read_conversations, refuse
from codescent.tasks.conversations.source import (
    ARRAYS,
    FORMAT,
    is_response_folder,
    open_description,
    prepared_chat,
)

PLAIN = "{prompt}{response}"
Spans = list[tuple[int, int]]
Encode = Callable[[tuple[Message, ...]], tuple[list[int], Spans]]
"""Messages to their tokens, and the pieces [begin, end) of these that are wanted."""


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
class ResponseRequest:
    """What is to be prepared.

    Attributes:
        corpus: a file of JSON lines, each an object with a prompt and a response, texts both, or with messages.
        tokenizer: byte, gpt2, bert, bert-cased, bert:FILE, or a tokenizer's JSON file.
        template: see `Template`.
        prompt_key, response_key, messages_key: their keys there.
        validation_fraction: share of the examples, the last ones, for the validation split.
        chat_template: writes messages as text; or its path; None: `template` writes prompts and responses.
    """

    corpus: str
    tokenizer: str
    template: str = PLAIN
    prompt_key: str = "prompt"
    response_key: str = "response"
    validation_fraction: float = 0.1
    messages_key: str = "messages"
    chat_template: Path | ChatFiles | None = None

    @property
    def path(self) -> Path:
        """The corpus."""
        return Path(self.corpus).expanduser()

    def key(self) -> dict[str, Any]:
        """What the tokens depend on. Raises UserError: all that is wrong with what was asked for."""
        problems: list[str] = []
        key: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        parts: dict[str, Callable[[], Any]] = {
            "template": self._checked_template,
            "chat_template": self._chat_identity,
            "tokenizer": self._tokenizer_identity,
            "corpus": self._corpus_sha256,
        }
        for name, part in parts.items():
            try:
                key[name] = part()
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*problems)
        return key

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The chat template, compiled. Raises UserError: it cannot be read or compiled."""
        given = self.chat_template
        return None if given is None else ChatTemplate.read(given) if isinstance(given, Path) else ChatTemplate(given)

    def _checked_template(self) -> str:
        Template.parse(self.template)
        if self.chat_template is not None and self.template != PLAIN:
            raise UserError("data.template, data.chat_template: both say how an example reads; leave one of them out")
        return self.template

    def _chat_identity(self) -> dict[str, Any] | None:
        return None if self.chat is None else self.chat.files.kept()

    def _corpus_sha256(self) -> str:
        if (self.path / DESCRIPTION).is_file():
            raise UserError(f"{self.path}: prepared, but not in the format {FORMAT!r}: {AGAIN}")
        return given_sha256(self.path, "a file of JSON lines with prompts and responses, or with messages")

    def _tokenizer_identity(self) -> str:
        if wordpiece.split_name(self.tokenizer):
            return wordpiece.identity(self.tokenizer)
        if self.tokenizer in ("byte", "gpt2"):
            return self.tokenizer
        if self.tokenizer == "char" or self.tokenizer.startswith("bpe:"):
            raise UserError(
                f'data.tokenizer = "{self.tokenizer}": it is made of a corpus of text, and prompts and responses are '
                "not; take byte, gpt2, or the tokenizer.json of the model that is tuned"
            )
        return f"file:{given_sha256(Path(self.tokenizer).expanduser(), 'a tokenizer, or byte, gpt2, bert')}"


def locate_responses(request: ResponseRequest, root: Path) -> Path | None:
    """The prepared examples of a request, if they are there. Raises UserError: all that is wrong with the request."""
    if is_response_folder(request.path):
        _refuse_other(request)
        return request.path
    return existing(folder_of(root, request.key(), request.corpus, request.tokenizer), open_description)


def _refuse_other(request: ResponseRequest) -> None:
    """Raise UserError where a key that is not at its default differs from what the folder was prepared with."""
    prepared = open_description(request.path)["request"]
    problems = [
        f"data.{name} = {getattr(request, name)!r}: {request.path} was prepared with {prepared.get(name)!r}; "
        "leave it out"
        for name in ("template", "prompt_key", "response_key", "messages_key", "validation_fraction")
        if getattr(request, name) not in (getattr(ResponseRequest, name), prepared.get(name))
    ]
    chat = prepared_chat(request.path, prepared)
    if request.chat is not None and (chat is None or not chat.is_same(request.chat.files)):
        other = "none" if chat is None else "another one"
        problems.append(
            f"data.chat_template: {request.chat.name}: {request.path} was prepared with {other}; leave it out"
        )
    if problems:
        raise UserError(*problems)


def prepare_responses(request: ResponseRequest, root: Path, *, progress: bool = False) -> Path:
    """Like `locate_responses`, but makes the examples where they are not there; `progress` shows bars or lines.

    Raises:
        UserError: anything wrong with the request, the file or the disk. Nothing half-made is left.
    """
    if is_response_folder(request.path):
        _refuse_other(request)
        return request.path
    key = request.key()
    target = folder_of(root, key, request.corpus, request.tokenizer)
    return prepared(target, lambda folder: _make(request, key, folder, progress), open_description)


def _make(request: ResponseRequest, key: dict[str, Any], folder: Path, progress: bool) -> None:
    """Write all files; the description, which makes the folder a dataset, last."""
    tokenizer = tokenizer_of(request.tokenizer)
    chat = None if request.chat is None else ChatTokens(request.chat, tokenizer)
    if chat is not None and progress:
        _tell_endless(chat, tokenizer)
    encode = _encoder(Template.parse(request.template), chat, tokenizer)
    keys = Keys(request.prompt_key, request.response_key, request.messages_key)
    examples = read_conversations(request.path, keys, with_template=request.chat_template is not None)
    num_train = len(examples) - max(1, round(request.validation_fraction * len(examples)))
    if num_train < 1:
        raise UserError(f"{request.path}: {len(examples)} examples are too few to split into train and validation")
    described: dict[str, Any] = {}
    problems: list[str] = []
    dtype = token_dtype(tokenizer.vocab_size)
    with stage(f"tokenising {request.path.name}", len(examples), progress) as advance:
        for split, part in zip(SPLITS, (examples[:num_train], examples[num_train:]), strict=True):
            arrays = _tokens(part, encode, dtype, problems, advance)
            for name, array in zip(ARRAYS, arrays, strict=True):
                write_array(folder / f"{split}_{name}.npy", array)
            described[split] = {"examples": len(part), "tokens": len(arrays[0])}
    refuse(request.path, problems)
    tokenizer.save(folder / TOKENIZER)
    fields = {
        "format": FORMAT,
        "request": key,
        "source": str(request.path),
        "tokenizer": {"kind": request.tokenizer, "vocab_size": tokenizer.vocab_size},
        "splits": described,
    }
    describe(folder, fields, [*(f"{split}_{array}.npy" for split in SPLITS for array in ARRAYS), TOKENIZER])


def _tell_endless(chat: ChatTokens, tokenizer: Tokenizer) -> None:
    """Warn where no control token ends a turn of the assistant: a model learns to end by one."""
    try:
        if chat.end() is None:
            stop = "go on to its longest" if tokenizer.separator is None else "end where a document does"
            print(f"data.chat_template: no control token ends the assistant's turn: samples {stop}", file=sys.stderr)
    except UserError:  # the template may still write the conversations of the file
        return


def _encoder(template: Template, chat: ChatTokens | None, tokenizer: Tokenizer) -> Encode:
    """The function from messages to tokens: by the chat template, or by the plain one."""
    if chat is None:
        return lambda messages: _encode_pair(messages, template, tokenizer)

    def encode(messages: tuple[Message, ...]) -> tuple[list[int], Spans]:
        pieces, wanted = chat.encode(messages)
        return pieces.ids.tolist(), wanted

    return encode


def _encode_pair(messages: tuple[Message, ...], template: Template, tokenizer: Tokenizer) -> tuple[list[int], Spans]:
    """Tokens of a prompt and of its response, which is wanted.

    Each is encoded by itself: a model that is asked continues the tokens of the prompt alone.
    """
    prompt, response = (message["content"] for message in messages)
    end = [] if tokenizer.separator is None else [tokenizer.separator]
    asked = tokenizer.encode(f"{template.before}{prompt}{template.between}").tolist() or end
    told = [*tokenizer.encode(f"{response}{template.after}").tolist(), *end]
    if not asked:
        raise UserError(f"the prompt {prompt!r} has no token for this tokenizer: there is nothing to answer to")
    return [*asked, *told], [(len(asked), len(asked) + len(told))] if told else []


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
