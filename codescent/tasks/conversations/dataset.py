"""In: JSON lines of prompts and responses or of messages. Out: files of their tokens, and samples of these by number.
Does not check lines (conversations.py does) and does not order samples (data/loader.py does)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import warn
from codescent.data.file_array import FileArray
from codescent.data.prepared import DESCRIPTION, SPLITS, TOKENIZER, Description, Fields, Splits, write_array
from codescent.data.progress import stage
from codescent.data.samples import Numbers, Samples, in_range
from codescent.data.text.request import tokenizer_of
from codescent.data.tokenizers.tokenizer import Tokenizer, token_dtype
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens, Spans
from codescent.tasks.conversations.conversations import Conversation, Message, read_conversations, refuse
from codescent.tasks.folder import FolderDataset

if TYPE_CHECKING:
    from codescent.config.sections import Data

ARRAYS = ("tokens", "begins", "wanted")
NOTHING = -1  # where nothing is wanted
PLAIN = "{prompt}{response}"
Encode = Callable[[Sequence[Message]], tuple[list[int], Spans]]
"""Messages to their tokens, and the pieces of these that are wanted."""


def parse_template(text: str) -> tuple[str, str, str]:
    """Split "…{prompt}…{response}…" into its three texts. Raises UserError: it has not both, in this order, once."""
    before, prompt, rest = text.partition("{prompt}")
    between, response, after = rest.partition("{response}")
    if not prompt or not response or text.count("{prompt}") > 1 or text.count("{response}") > 1:
        raise UserError(
            f"data.template: {text!r} must hold {{prompt}} and, after it, {{response}}, each once; such as "
            '"Question: {prompt}\\nAnswer: {response}"'
        )
    return before, between, after


def write_examples(data: Data, template: ChatTemplate | None, folder: Path, progress: bool) -> dict[str, Any]:
    """Write the tokens of both splits: the last examples, data.validation_fraction of all, are for validation.

    Returns the description's fields. Raises UserError: everything that is wrong with the lines, or the tokenizer.
    """
    path, tokenizer = expanded(data.corpus), tokenizer_of(data.tokenizer)
    if template is None:
        encode = _pair_encoder(parse_template(data.template), tokenizer)
    else:
        chat = ChatTokens(template, tokenizer)
        encode = _chat_encoder(chat)
        if progress:
            _tell_endless(chat, tokenizer)
    examples = read_conversations(path, data, with_template=template is not None)
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
    tokenizer.save(folder / TOKENIZER)
    described = {"kind": data.tokenizer, "vocab_size": tokenizer.vocab_size}
    return {"source": str(path), "tokenizer": described, "splits": splits}


def _tell_endless(chat: ChatTokens, tokenizer: Tokenizer) -> None:
    """Warn where no control token ends a turn of the assistant: a model learns to end by one."""
    try:
        if chat.end() is None:
            stop = "go on to its longest" if tokenizer.separator is None else "end where a document does"
            warn(f"data.chat_template: no control token ends the assistant's turn: samples {stop}")
    except UserError:  # the template may still write the conversations of the file
        return


def _chat_encoder(chat: ChatTokens) -> Encode:
    def encode(messages: Sequence[Message]) -> tuple[list[int], Spans]:
        pieces, wanted = chat.encode(messages)
        return pieces.ids.tolist(), wanted

    return encode


def _pair_encoder(template: tuple[str, str, str], tokenizer: Tokenizer) -> Encode:
    """Tokens of a prompt and of its response, which is wanted.
    Each is encoded by itself: a model that is asked continues the tokens of the prompt alone.
    """
    end = [] if tokenizer.separator is None else [tokenizer.separator]
    before, between, after = template

    def encode(messages: Sequence[Message]) -> tuple[list[int], Spans]:
        prompt, response = (message["content"] for message in messages)
        asked = tokenizer.encode(f"{before}{prompt}{between}").tolist() or end
        told = [*tokenizer.encode(f"{response}{after}").tolist(), *end]
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


class _Split(Fields):
    examples: int
    tokens: int


class _Description(Description):
    format: Literal["codescent responses 2"]
    splits: Splits[_Split]


class ResponseSource:
    """The examples of a split. A sample is one example, cut after `seq_len` tokens or padded at its end.

    Targets are the wanted pieces of an example: a response and its end, or every turn of the assistant. Examples
    without a wanted token inside the sample are left out. Padding is token 0; it has no targets.

    Args:
        tokens: all examples, one after the other.
        begins: [examples + 1], where each example begins, and where the last one ends.
        wanted: [pieces, 2], where each piece begins and ends in `tokens`, in order; a piece is inside one example, is
            not empty, and does not have the example's first token.
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
        kept = losses > 0
        self._begins, self._lengths, self._losses = begins[:-1][kept], lengths[kept], losses[kept]
        self._pieces = pieces[:-1][kept], pieces[1:][kept]
        self.num_samples = len(self._begins)
        self.left_out = len(kept) - self.num_samples

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len], extras `lengths_B`: tokens of each that are not padding.
        Raises IndexError: no such sample; UserError: the file has changed.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets = np.full_like(inputs, NOTHING)
        first, stop = self._pieces
        for row, number in enumerate(numbers.tolist()):
            begin, length = int(self._begins[number]), int(self._lengths[number])
            tokens = self._tokens[begin : begin + length]
            inputs[row, : length - 1] = tokens[:-1]
            for start, end in (self._wanted[first[number] : stop[number]] - begin).tolist():
                targets[row, start - 1 : end - 1] = tokens[start:end]  # both slices end where the sample does
        return Samples(inputs, targets, {"lengths_B": self._lengths[numbers] - 1})

    def losses(self, numbers: Numbers) -> Numbers:
        """Wanted tokens inside each sample."""
        return np.asarray(self._losses[numbers], np.int64)


@dataclass(frozen=True)
class ResponseDataset(FolderDataset):
    """Prepared prompts and responses or conversations, open."""

    format = "codescent responses 2"
    form = _Description
    what = "prepared responses"

    @property
    def chat(self) -> ChatFiles | None:
        """The chat template by which it was prepared; None: by none."""
        return chat_of(self.path, self.description["request"])

    def source(self, split: str, seq_len: int, num_targets: int) -> ResponseSource:
        """The examples of a split: see `AnyDataset`. `num_targets` is not used."""
        tokens, begins, wanted = (self.arrays[f"{split}_{name}"] for name in ARRAYS)
        return ResponseSource(split, tokens, begins[:], wanted[:], seq_len)

    def summary(self) -> list[str]:
        """See `FolderDataset`."""
        tokenizer, splits = self.description["tokenizer"], self.description["splits"]
        return [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}",
            *(f"{name}: {splits[name]['examples']:,} examples, {splits[name]['tokens']:,} tokens" for name in SPLITS),
        ]


def chat_of(path: Path, request: Mapping[str, Any]) -> ChatFiles | None:
    """The chat template in the key of a request, as a folder's description has it; None: there is none."""
    fields = request.get("chat_template")
    return None if fields is None else ChatFiles.of_kept(str(path / DESCRIPTION), fields)
