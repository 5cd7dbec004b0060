"""In: JSON lines of prompts and responses or of messages, a tokenizer. Out: files of their tokens.
Does not open the files (source.py does) and does not check lines (conversations.py does)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from codescent.base.errors import UserError
from codescent.data.prepared import SPLITS, write_array
from codescent.data.progress import stage
from codescent.data.text.request import tokenizer_of
from codescent.data.tokenizers.tokenizer import Tokenizer, token_dtype
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens, Spans
from codescent.tasks.conversations.conversations import Conversation, Keys, Message, read_conversations, refuse
from codescent.tasks.conversations.source import ARRAYS

if TYPE_CHECKING:
    from codescent.config.sections import Data

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


def write_examples(
    data: Data, template: ChatTemplate | None, folder: Path, progress: bool
) -> tuple[Tokenizer, dict[str, Any]]:
    """Write the arrays of both splits: the last examples, data.validation_fraction of all, are for validation.

    Returns:
        The tokenizer, and the part of the description about the splits.

    Raises:
        UserError: everything that is wrong with the lines of data.corpus, or its tokenizer.
    """
    path, tokenizer = Path(data.corpus).expanduser(), tokenizer_of(data.tokenizer)
    if template is None:
        encode = _pair_encoder(Template.parse(data.template), tokenizer)
    else:
        chat = ChatTokens(template, tokenizer)
        encode = _chat_encoder(chat)
        if progress:
            _tell_endless(chat, tokenizer)
    keys = Keys(data.prompt_key, data.response_key, data.messages_key)
    examples = read_conversations(path, keys, with_template=template is not None)
    num_train = len(examples) - max(1, round(data.validation_fraction * len(examples)))
    if num_train < 1:
        raise UserError(f"{path}: {len(examples)} examples are too few to split into train and validation")
    splits: dict[str, Any] = {}
    problems: list[str] = []
    dtype = token_dtype(tokenizer.vocab_size)
    with stage(f"tokenising {path.name}", len(examples), progress) as advance:
        for split, part in zip(SPLITS, (examples[:num_train], examples[num_train:]), strict=True):
            arrays = _tokens(part, encode, dtype, problems, advance)
            for name, array in zip(ARRAYS, arrays, strict=True):
                write_array(folder / f"{split}_{name}.npy", array)
            splits[split] = {"examples": len(part), "tokens": len(arrays[0])}
    refuse(path, problems)
    return tokenizer, splits


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
