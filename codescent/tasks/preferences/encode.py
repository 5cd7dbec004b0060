"""In: judged answers, a tokenizer, perhaps a chat template. Out: the documents of each sample, as tokens, in files.
Does not check lines (lines.py does) and does not cut documents to a length (samples.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import warn
from codescent.data.prepared import SPLITS, TOKENIZER, write_array
from codescent.data.progress import stage
from codescent.data.text.request import remark_on, tokenizer_of
from codescent.data.tokenizers.tokenizer import NO_END, Tokenizer, document_end, token_dtype
from codescent.tasks.conversations.chat_template import ChatTemplate, ChatTokens
from codescent.tasks.conversations.conversations import Conversation
from codescent.tasks.conversations.dataset import counts_in_words, pair_encoder, parse_template, warn_without_end
from codescent.tasks.conversations.lost import lost_parts
from codescent.tasks.conversations.messages import quoted, texts_of
from codescent.tasks.conversations.problems import Problems
from codescent.tasks.preferences.lines import Judged, Messages, read_judged

if TYPE_CHECKING:
    from codescent.config.sections import Data

ARRAYS = ("tokens", "begins", "wanted", "lines", "labels")
PAIRED = 2
"""Documents of a pair: the prompt with the chosen answer, and with the rejected one."""
Spans = list[tuple[int, int]]
Encode = Callable[[Conversation], tuple[list[int], Spans]]


class Document(NamedTuple):
    """A prompt with an answer to it.

    Attributes:
        judged: the line that has the prompt.
        answer: of this line, or of another one.
        wanted: whether the answer is wanted.
    """

    judged: Judged
    answer: Messages
    wanted: bool


def write_preferences(
    data: Data, template: ChatTemplate | None, folder: Path, progress: bool, *, answers: int
) -> dict[str, Any]:
    """Write the tokens of both splits. The validation split is data.validation, or the last data.validation_fraction of
    the lines.

    `answers`: of a sample, where each is judged by itself (KTO); 0: a sample is a pair. Returns the description's
    fields. Raises UserError: every problem of the lines, or of the tokenizer.
    """
    path, tokenizer = expanded(data.corpus), tokenizer_of(data.tokenizer)
    if progress and (remark := remark_on(data.tokenizer)):
        warn(remark)
    parts = _splits(path, data, with_template=template is not None, singles=answers > 0)
    unused: Counter[str] = Counter(quoted(key) for one in chain(*parts) for key in one.unused)
    encode = _encoder(data, template, tokenizer, unused, path, progress)
    splits, problems, dtype = dict[str, Any](), Problems(), token_dtype(tokenizer.vocab_size)
    characters = sum(len(text) for one in chain(*parts) for text in texts_of([*one.prompt, *chain(*one.answers)]))
    with stage(f"tokenising {path.name}", characters, progress) as advance:
        for split, part in zip(SPLITS, parts, strict=True):
            samples = list(_groups(part, answers) if answers else _pairs(part))
            arrays = _arrays(list(chain(*samples)), encode, dtype, problems, advance)
            for name, array in zip(ARRAYS, arrays, strict=True):
                write_array(folder / f"{split}_{name}.npy", array)
            found = sum(len(one.answers) for one in part)
            splits[split] = {"samples": len(samples), "answers": found, "tokens": len(arrays[0])}
            if (left := found - len(samples) * answers) and answers:
                warn(f"{path}: {split}: the last {counted(left, 'answer')} of {found} are left out: {answers} a sample")
    problems.refuse(path)
    if unused:
        warn(f"{path}: parts of lines that have no effect: {counts_in_words(unused)}")
    tokenizer.save(folder / TOKENIZER)
    tokenizer_fields = {"kind": data.tokenizer, "vocab_size": tokenizer.vocab_size}
    sources = {"source": str(path), **({"validation": data.validation} if data.validation else {})}
    return {**sources, "tokenizer": tokenizer_fields, "splits": splits, "unused": dict(unused)}


def _splits(path: Path, data: Data, *, with_template: bool, singles: bool) -> tuple[list[Judged], ...]:
    """The lines of each split. Raises UserError: lines that cannot be used, or too few of them."""
    lines = read_judged(path, data, with_template=with_template, singles=singles)
    if data.validation is not None:
        other = read_judged(expanded(data.validation), data, with_template=with_template, singles=singles)
        for name, part in ((path, lines), (data.validation, other)):
            if not part:
                raise UserError(f"{name}: no lines")
        return lines, other
    num_train = len(lines) - max(1, round(data.validation_fraction * len(lines)))
    if num_train < 1:
        raise UserError(f"{path}: {counted(len(lines), 'line')}: too few to split into train and validation")
    return lines[:num_train], lines[num_train:]


def _pairs(part: Sequence[Judged]) -> Iterator[list[Document]]:
    for one in part:
        yield [Document(one, answer, wanted) for answer, wanted in zip(one.answers, one.wanted, strict=True)]


def _groups(part: Sequence[Judged], answers: int) -> Iterator[list[Document]]:
    """The documents of each group of so many answers; after them each prompt with the answer before its own one.

    Ethayarajh et al. 2024, section 4.1. Of pairs the chosen answers of a group come first, so that no prompt gets the
    other answer of its own line.
    """
    size = answers // max((len(one.answers) for one in part), default=1)
    for first in range(0, len(part) - size + 1, size):
        lines = part[first : first + size]
        own = [
            Document(one, one.answers[number], one.wanted[number]) for number in range(answers // size) for one in lines
        ]
        yield [*own, *(Document(one.judged, own[at - 1].answer, one.wanted) for at, one in enumerate(own))]


def _encoder(
    data: Data, template: ChatTemplate | None, tokenizer: Tokenizer, unused: Counter[str], path: Path, progress: bool
) -> Encode:
    """A function from messages to their tokens, and to the ranges of tokens that are the answer."""
    if template is None:
        if progress and not document_end(tokenizer):
            warn(f"{path}: answers end without a token, so a model does not learn to stop: {NO_END}")
        return pair_encoder(parse_template(data.template), tokenizer)
    chat = ChatTokens(template, tokenizer)
    if progress:
        warn_without_end(chat, tokenizer)

    def encode(conversation: Conversation) -> tuple[list[int], Spans]:
        unused.update(lost_parts(conversation, chat.template))
        pieces, wanted = chat.encode(conversation.messages, conversation.tools)
        return pieces.ids.tolist(), wanted

    return encode


def _arrays(
    documents: Sequence[Document],
    encode: Encode,
    dtype: np.dtype[Any],
    problems: Problems,
    advance: Callable[[int], None],
) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of ARRAYS, see `samples.PreferenceSource`. Documents that fail are added to `problems`."""
    parts, begins, wanted = [np.empty(0, dtype)], [0], Spans()
    for one in documents:
        messages = (*one.judged.prompt, *one.answer)
        try:
            tokens, spans = encode(Conversation(one.judged.where, messages, one.judged.tools))
        except UserError as error:
            for problem in error.problems:
                problems.add(one.judged.where, problem)
            continue
        wanted += [(begins[-1] + begin, begins[-1] + end) for begin, end in spans]
        begins.append(begins[-1] + len(tokens))
        parts.append(np.array(tokens, dtype))
        advance(sum(map(len, texts_of(list(messages)))))
    lines = np.array([one.judged.line for one in documents], np.int64)
    labels = np.array([one.wanted for one in documents], np.int8)
    pieces = np.array(wanted, np.int64).reshape(-1, 2)
    return np.concatenate(parts), np.array(begins, np.int64), pieces, lines, labels
