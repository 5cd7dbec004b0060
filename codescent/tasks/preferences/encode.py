"""In: judged answers, a tokenizer, perhaps a chat template. Out: the documents of each sample, as tokens, in files.
Does not check lines (lines.py does) and does not cut documents to a length (samples.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from codescent.data.tokenizers.tokenizer import token_dtype
from codescent.tasks.conversations.chat_template import ChatTemplate, Spans
from codescent.tasks.conversations.conversations import Conversation
from codescent.tasks.conversations.dataset import (
    Encode,
    characters_of,
    counts_in_words,
    encoder_of,
    lines_of_splits,
    token_arrays,
)
from codescent.tasks.conversations.messages import quoted
from codescent.tasks.conversations.problems import Problems
from codescent.tasks.preferences.lines import Judged, Messages, read_judged

if TYPE_CHECKING:
    from codescent.config.sections import Data

ARRAYS = ("tokens", "begins", "wanted", "lines", "labels")
PAIRED = 2
"""Documents of a pair: the prompt with the chosen answer, and with the rejected one."""


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

    @property
    def conversation(self) -> Conversation:
        """Prompt and answer as messages."""
        return Conversation(self.judged.where, (*self.judged.prompt, *self.answer), self.judged.tools)


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
    read = partial(read_judged, data=data, with_template=template is not None, singles=answers > 0)
    parts = lines_of_splits(data, read, "line")
    unused: Counter[str] = Counter(quoted(key) for one in chain(*parts) for key in one.unused)
    encode = encoder_of(data, template, tokenizer, unused, path, progress)
    splits, problems, dtype = dict[str, Any](), Problems(), token_dtype(tokenizer.vocab_size)
    samples = [list(_groups(part, answers) if answers else _pairs(part)) for part in parts]
    characters = sum(characters_of(document.conversation) for document in chain(*chain(*samples)))
    with stage(f"tokenising {path.name}", characters, progress) as advance:
        for split, part, of_split in zip(SPLITS, parts, samples, strict=True):
            arrays = _arrays(list(chain(*of_split)), encode, dtype, problems, advance)
            for name, array in zip(ARRAYS, arrays, strict=True):
                write_array(folder / f"{split}_{name}.npy", array)
            found = sum(len(one.answers) for one in part)
            splits[split] = {"samples": len(of_split), "answers": found, "tokens": len(arrays[0])}
            if (left := found - len(of_split) * answers) and answers:
                warn(f"{path}: {split}: the last {counted(left, 'answer')} of {found} are left out: {answers} a sample")
    problems.refuse(path)
    if unused:
        warn(f"{path}: parts of lines that have no effect: {counts_in_words(unused)}")
    tokenizer.save(folder / TOKENIZER)
    tokenizer_fields = {"kind": data.tokenizer, "vocab_size": tokenizer.vocab_size}
    sources = {"source": str(path), **({"validation": data.validation} if data.validation else {})}
    return {**sources, "tokenizer": tokenizer_fields, "splits": splits, "unused": dict(unused)}


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


def _arrays(
    documents: Sequence[Document],
    encode: Encode,
    dtype: np.dtype[Any],
    problems: Problems,
    advance: Callable[[int], None],
) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of ARRAYS, see `samples.PreferenceSource`. Documents that fail are added to `problems`."""

    def checked(conversation: Conversation) -> tuple[list[int], Spans]:
        tokens, wanted = encode(conversation)
        if not wanted:
            raise UserError("the answer has no token with this tokenizer")
        return tokens, wanted

    examples = [one.conversation for one in documents]
    lines = np.array([one.judged.line for one in documents], np.int64)
    labels = np.array([one.wanted for one in documents], np.int8)
    return *token_arrays(examples, checked, dtype, problems, advance), lines, labels
