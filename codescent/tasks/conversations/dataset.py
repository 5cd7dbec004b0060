"""In: JSON lines of prompts and responses, or of messages. Out: files of their tokens; samples, read by number.
Does not check lines (conversations.py does) and does not order samples (data/loader.py does)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import warn
from codescent.data.file_array import FileArray
from codescent.data.prepared import DESCRIPTION, SPLITS, TOKENIZER, Description, Fields, Splits, write_array
from codescent.data.progress import stage
from codescent.data.samples import NO_TARGET, Numbers, Samples, in_range
from codescent.data.text.request import remark_on, tokenizer_of
from codescent.data.tokenizers.tokenizer import NO_END, Tokenizer, document_end, token_dtype
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens, Spans
from codescent.tasks.conversations.conversations import Conversation, read_conversations
from codescent.tasks.conversations.lost import lost_parts
from codescent.tasks.conversations.messages import quoted, texts_of
from codescent.tasks.conversations.packed import PackedSource
from codescent.tasks.conversations.problems import Problems
from codescent.tasks.folder import FolderDataset

if TYPE_CHECKING:
    from codescent.config.sections import Data

ARRAYS = ("tokens", "begins", "wanted")
PLAIN = "{prompt}{response}"
PLACES = ("prompt", "response")
"""The names in data.template that are replaced."""
MOST_NAMED = 12
Encode = Callable[[Conversation], tuple[list[int], Spans]]
Line = TypeVar("Line")
"""A function from a conversation to its tokens and to the ranges of tokens that are targets (responses)."""


def parse_template(text: str) -> tuple[str, str, str]:
    """Split "…{prompt}…{response}…" into its three texts. Raises UserError unless it has each once, in this order."""
    before, prompt, rest = text.partition("{prompt}")
    between, response, after = rest.partition("{response}")
    if not prompt or not response or text.count("{prompt}") > 1 or text.count("{response}") > 1:
        raise UserError(
            f"data.template: {text!r} must hold {{prompt}} and, after it, {{response}}, each once; such as "
            '"Question: {prompt}\\nAnswer: {response}"'
        )
    return before, between, after


def write_examples(data: Data, template: ChatTemplate | None, folder: Path, progress: bool) -> dict[str, Any]:
    """Write the tokens of both splits. The validation split is data.validation, or the last data.validation_fraction of
    the examples.

    Returns the description's fields. Raises UserError: every problem of the lines, or of the tokenizer.
    """
    path, tokenizer = expanded(data.corpus), tokenizer_of(data.tokenizer)
    if progress and (remark := remark_on(data.tokenizer)):
        warn(remark)
    read = partial(read_conversations, data=data, with_template=template is not None)
    parts = lines_of_splits(data, read, "example")
    unused = _unused(parts, data, template)
    encode = encoder_of(data, template, tokenizer, unused, path, progress)
    splits: dict[str, Any] = {}
    problems = Problems()
    dtype = token_dtype(tokenizer.vocab_size)
    with stage(f"tokenising {path.name}", sum(map(characters_of, chain(*parts))), progress) as advance:
        for split, part in zip(SPLITS, parts, strict=True):
            arrays = token_arrays(part, encode, dtype, problems, advance)
            for name, array in zip(ARRAYS, arrays, strict=True):
                write_array(folder / f"{split}_{name}.npy", array)
            splits[split] = {"examples": len(part), "tokens": len(arrays[0])}
    problems.refuse(path)
    if unused:
        warn(f"{path}: parts of lines that have no effect: {counts_in_words(unused)}")
    tokenizer.save(folder / TOKENIZER)
    tokenizer_fields = {"kind": data.tokenizer, "vocab_size": tokenizer.vocab_size}
    sources = {"source": str(path), **({"validation": data.validation} if data.validation else {})}
    return {**sources, "tokenizer": tokenizer_fields, "splits": splits, "unused": dict(unused)}


def _unused(parts: Iterable[list[Conversation]], data: Data, template: ChatTemplate | None) -> Counter[str]:
    """The parts of lines that have no effect, each with its number of lines. Raises UserError: data.template names a
    key of the lines that it does not get.
    """
    found: Counter[str] = Counter()
    for conversation in chain.from_iterable(parts):
        found.update(map(quoted, conversation.unused))
    named = {} if template is not None else dict.fromkeys(re.findall(r"\{(\w+)\}", data.template))
    for name in (name for name in named if name not in PLACES):
        if (key := quoted(name)) in found:
            raise UserError(
                f"data.template: {{{name}}} is not replaced, and {key} is a key of {counted(found[key], 'line')}: only "
                f"{{prompt}} and {{response}} are replaced; write {key} into the prompt of each line"
            )
        warn(f"data.template: {{{name}}} is written as it stands: only {{prompt}} and {{response}} are replaced")
    return found


def counts_in_words(unused: Counter[str]) -> str:
    """Such as '"id" (300 lines), "tools" (12 lines)', the most frequent first."""
    named = [f"{name} ({counted(count, 'line')})" for name, count in unused.most_common(MOST_NAMED)]
    more = len(unused) - len(named)
    return ", ".join(named) + (f", and {more} more" if more > 0 else "")


def lines_of_splits(data: Data, read: Callable[[Path], list[Line]], what: str) -> tuple[list[Line], list[Line]]:
    """The lines of each split: data.corpus and data.validation, or the last data.validation_fraction of the first.

    `what`: a line, for messages. Raises UserError: too few lines; see also `read`.
    """
    path = expanded(data.corpus)
    lines = read(path)
    if data.validation is not None:
        found = lines, read(expanded(data.validation))
        for name, part in zip((path, data.validation), found, strict=True):
            if not part:
                raise UserError(f"{name}: no {what}s")
        return found
    num_train = len(lines) - max(1, round(data.validation_fraction * len(lines)))
    if num_train < 1:
        raise UserError(f"{path}: {counted(len(lines), what)}: too few to split into train and validation")
    return lines[:num_train], lines[num_train:]


def characters_of(conversation: Conversation) -> int:
    """The characters of a conversation, about the bytes of its line: the progress is counted in them."""
    return sum(map(len, texts_of(list(conversation.messages))))


def encoder_of(
    data: Data, template: ChatTemplate | None, tokenizer: Tokenizer, unused: Counter[str], path: Path, progress: bool
) -> Encode:
    """The encoder of the conversations of a file. Parts that a chat template does not write are counted in `unused`."""
    if template is None:
        if progress and not document_end(tokenizer):
            warn(f"{path}: responses end without a token, so a model does not learn to stop: {NO_END}")
        return pair_encoder(parse_template(data.template), tokenizer)
    chat = ChatTokens(template, tokenizer)
    if progress:
        _warn_without_end(chat, tokenizer)

    def encode(conversation: Conversation) -> tuple[list[int], Spans]:
        unused.update(lost_parts(conversation, chat.template))
        pieces, wanted = chat.encode(conversation.messages, conversation.tools)
        return pieces.ids.tolist(), wanted

    return encode


def _warn_without_end(chat: ChatTokens, tokenizer: Tokenizer) -> None:
    """Warn if no control token ends a turn of the assistant: the model then does not learn to stop after a turn."""
    try:
        if chat.end() is None:
            stop = "their length limit" if tokenizer.separator is None else "the end of a document"
            warn(f"data.chat_template: no control token ends the assistant's turn: samples continue to {stop}")
    except UserError:  # the template may still render the conversations of the file
        return


def pair_encoder(template: tuple[str, str, str], tokenizer: Tokenizer) -> Encode:
    """An encoder of pairs: the tokens of a prompt and of its response, which are the targets.
    Prompt and response are encoded separately, because `sample` gives a model the tokens of the prompt only.
    """
    begin, end = list(tokenizer.opening), list(document_end(tokenizer))
    before, between, after = template

    def encode(conversation: Conversation) -> tuple[list[int], Spans]:
        prompt, response = (message["content"] for message in conversation.messages)
        prompt_ids = [*begin, *tokenizer.encode(f"{before}{prompt}{between}").tolist()] or end
        response_ids = [*tokenizer.encode(f"{response}{after}").tolist(), *end]
        if not prompt_ids:
            raise UserError(f"the prompt {prompt!r} has no tokens with this tokenizer: a response needs a prompt")
        ids = [*prompt_ids, *response_ids]
        return ids, [(len(prompt_ids), len(ids))] if response_ids else []

    return encode


def token_arrays(
    examples: Sequence[Conversation],
    encode: Encode,
    dtype: np.dtype[Any],
    problems: Problems,
    advance: Callable[[int], None],
) -> tuple[np.ndarray[Any, Any], ...]:
    """The arrays of ARRAYS for these examples, see `ResponseSource`. Examples that fail are added to `problems`."""
    parts, begins, wanted = [np.empty(0, dtype)], [0], []
    for example in examples:
        try:
            tokens, spans = encode(example)
        except UserError as error:
            for problem in error.problems:
                problems.add(example.where, problem)
            continue
        wanted += [(begins[-1] + begin, begins[-1] + end) for begin, end in spans]
        begins.append(begins[-1] + len(tokens))
        parts.append(np.array(tokens, dtype))
        advance(characters_of(example))
    return np.concatenate(parts), np.array(begins, np.int64), np.array(wanted, np.int64).reshape(-1, 2)


class _ResponseSplit(Fields):
    examples: int
    tokens: int


class _ResponsesDescription(Description):
    format: Literal["codescent responses 2", "codescent responses 3"]
    splits: Splits[_ResponseSplit]
    unused: dict[str, int] = Field(default_factory=dict)  # format 2 had none


class ResponseSource:
    """The examples of a split. A sample is one example, cut after `seq_len` tokens or padded at its end.

    The targets are pieces of the example: a response and its end, or every turn of the assistant. An example without
    a target inside the sample is left out. Padding is token 0; it has no targets.

    Args:
        tokens: the tokens of all examples, one example after the other.
        begins: [examples + 1], positions in `tokens` where each example begins, and where the last one ends.
        wanted: [pieces, 2], positions [begin, end) in `tokens` of the pieces that are targets, in order. A piece is
            inside one example, is not empty, and does not include the example's first token.
    """

    losses_per_sample: int | None = None

    def __init__(
        self, name: str, tokens: npt.NDArray[Any] | FileArray, begins: Numbers, wanted: Numbers, seq_len: int
    ) -> None:
        self.name, self._tokens, self._wanted, self._seq_len = name, tokens, wanted, seq_len
        lengths = np.minimum(begins[1:] - begins[:-1], seq_len + 1)
        pieces = np.searchsorted(wanted[:, 0], begins)  # number of the first piece of each example
        owners = np.repeat(np.arange(len(lengths)), np.diff(pieces))
        ends = np.minimum(wanted[:, 1], (begins[:-1] + lengths)[owners])
        losses = np.zeros(len(lengths), np.int64)
        np.add.at(losses, owners, np.maximum(ends - wanted[:, 0], 0))
        has_target = losses > 0
        self._begins, self._lengths, self._losses = begins[:-1][has_target], lengths[has_target], losses[has_target]
        self._pieces = pieces[:-1][has_target], pieces[1:][has_target]
        self.lengths = np.asarray(self._lengths - 1, np.int64)  # positions: the last token is a target only
        self.num_samples = len(self._begins)
        self.left_out = len(has_target) - self.num_samples

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len], extras `lengths_B`: number of tokens that are not padding.
        Raises IndexError: no such sample; UserError: the file has changed.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets = np.full_like(inputs, NO_TARGET)
        for row, (number, length) in enumerate(zip(numbers.tolist(), self.lengths[numbers].tolist())):
            self.write(number, inputs[row, :length], targets[row, :length])
        return Samples(inputs, targets, {"lengths_B": self.lengths[numbers]})

    def write(self, number: int, inputs_T: Numbers, targets_T: Numbers) -> None:
        """Write an example into arrays of its length; `targets_T` has no targets yet."""
        begin, length = int(self._begins[number]), int(self._lengths[number])
        tokens = self._tokens[begin : begin + length]
        inputs_T[:] = tokens[:-1]
        first, stop = (of_examples[number] for of_examples in self._pieces)
        for start, end in (self._wanted[first:stop] - begin).tolist():
            targets_T[start - 1 : end - 1] = tokens[start:end]  # both slices end where the example does

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of targets in each sample."""
        return np.asarray(self._losses[numbers], np.int64)

    def padding(self, numbers: Numbers) -> Numbers:
        """See `PaddedSource`."""
        return np.asarray(self._seq_len - self.lengths[numbers], np.int64)


@dataclass(frozen=True)
class ResponseDataset(FolderDataset):
    """Open prepared prompts and responses, or conversations. `packs`: a sample has as many examples as fit."""

    format = "codescent responses 3"
    read_formats: ClassVar[tuple[str, ...]] = ("codescent responses 2", "codescent responses 3")
    form: ClassVar[type[Description]] = _ResponsesDescription
    what = "prepared responses"

    packs: bool = False
    _sources: dict[tuple[str, int], ResponseSource | PackedSource] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def chat(self) -> ChatFiles | None:
        """The chat template that it was prepared with; None: without one."""
        return chat_of(self.path, self.description["request"])

    def source(self, split: str, seq_len: int, num_targets: int) -> ResponseSource | PackedSource:
        """See `AnyDataset`. A second call returns the same object. `num_targets` is not used."""
        if (split, seq_len) not in self._sources:
            tokens, begins, wanted = (self.arrays[f"{split}_{name}"] for name in ARRAYS)
            examples = ResponseSource(split, tokens, begins[:], wanted[:], seq_len)
            self._sources[split, seq_len] = PackedSource(examples, seq_len) if self.packs else examples
        return self._sources[split, seq_len]

    def summary(self) -> list[str]:
        """See `FolderDataset`."""
        tokenizer, splits = self.description["tokenizer"], self.description["splits"]
        unused = Counter(self.description.get("unused", {}))
        return [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}",
            *(
                f"{name}: {counted(splits[name]['examples'], 'example')}, {splits[name]['tokens']:,} tokens"
                for name in SPLITS
            ),
            *([f"parts of lines that have no effect: {counts_in_words(unused)}"] if unused else []),
        ]


def chat_of(path: Path, request: Mapping[str, Any]) -> ChatFiles | None:
    """The chat template in `request`, the key in the description of the folder `path`; None: there is none."""
    fields = request.get("chat_template")
    return None if fields is None else ChatFiles.from_json(str(path / DESCRIPTION), fields)
