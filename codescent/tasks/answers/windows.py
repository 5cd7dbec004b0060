"""In: questions about contexts, a tokenizer. Out: windows [CLS] question [SEP] part of the context [SEP], and targets.
Does not read or write files (squad.py and source.py do)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal, each
from codescent.data.tokenizers.wordpiece import Pieces, WordPiece
from codescent.tasks.answers.squad import Question

Rows = npt.NDArray[Any]  # of the dtype of `WindowSizes.dtype`
QUESTIONS_AT_ONCE = 512
TOKENS_AT_ONCE = 1024
MOST_TOKENS = 1 << 27
CONTROLS = 3  # [CLS], [SEP], [SEP]
KEYS = {"max_length": "data.seq_len", "stride": "data.stride", "max_question": "data.question_len"}
"""The keys of the config that give the sizes."""


@dataclass(frozen=True)
class WindowSizes:
    """How contexts are cut; the defaults are those of BERT (Devlin et al. 2018, run_squad.py).

    Attributes:
        max_length: tokens of a window.
        stride: tokens from the start of a window to the start of the next window of the same context.
        max_question: a longer question is cut after this many tokens.
    """

    max_length: int = 384
    stride: int = 128
    max_question: int = 64

    def problems(self, positions: int | None = None) -> list[str]:
        """A message for each size that cannot be used. `positions`: of the model; None: unknown."""
        least = self.max_question + CONTROLS + 1
        found = [f"{KEYS[name]}: {size} is not a number of tokens" for name, size in asdict(self).items() if size < 1]
        if not found and self.max_length < least:
            longer = {"model.seq_len": least} if positions is not None and positions < least else {}
            found.append(
                Refusal(
                    f"data.seq_len: {self.max_length} leaves no room for a context next to a question of "
                    f"data.question_len = {self.max_question} tokens and {CONTROLS} control tokens",
                    [
                        Change({"data.seq_len": least, **longer}),
                        *each("data.question_len", [room] if (room := self.max_length - CONTROLS - 1) > 0 else []),
                    ],
                )
            )
        return found

    def checked_length(self, positions: int | None = None) -> int:
        """`max_length`. Raises UserError: every problem of the sizes."""
        if problems := self.problems(positions):
            raise UserError(*problems)
        return self.max_length

    def dtype(self, vocab_size: int, *, with_text: bool) -> np.dtype[Any]:
        """The structured dtype of a window.

        Fields:
            tokens [max_length]: ids, padded at the end.
            length: number of tokens that are not padding.
            context: position of the first token of the context.
            targets [2]: positions of the answer's first and last token; both 0 ([CLS]) if the window does not hold all
                of the answer.
            question: number of the question.
            characters [max_length, 2]: characters [begin, end) of the context for each token; only `with_text`.
            chosen [max_length]: the token is in its best window (`best_windows`); only `with_text`.
        """
        token = "<u2" if vocab_size <= 1 << 16 else "<u4"
        fields: list[tuple[Any, ...]] = [("tokens", token, (self.max_length,)), ("length", "<i4"), ("context", "<i4")]
        fields += [("targets", "<i4", (2,)), ("question", "<i4")]
        if with_text:
            fields += [("characters", "<i4", (self.max_length, 2)), ("chosen", "?", (self.max_length,))]
        return np.dtype(fields)


class Cut(NamedTuple):
    """The windows of some questions.

    Attributes:
        characters: number of characters of the contexts of all these questions, also of those left out.
        misplaced: ids of questions without a target, because the answer is not at its answer_start.
        without_tokens: ids of questions without a target, because the answer has no token.
    """

    rows: Rows
    characters: int
    misplaced: list[str]
    without_tokens: list[str]


def make_windows(
    questions: Sequence[Question], tokenizer: WordPiece, sizes: WindowSizes, *, training: bool
) -> Iterator[Cut]:
    """The windows of a file's questions, a few questions at a time; the windows of one question follow one another.

    In training a question is left out if its answer is not at its answer_start, or has no token. Without `training`
    every question has windows. Only these windows have the fields for decoding.

    Raises:
        UserError: sizes that leave no room, or more than MOST_TOKENS in the windows of one question.
    """
    sizes.checked_length()
    dtype = sizes.dtype(tokenizer.vocab_size, with_text=not training)
    numbered = enumerate(questions)
    contexts: dict[str, Pieces] = {}
    while batch := list(islice(numbered, QUESTIONS_AT_ONCE)):
        new = list({question.context: None for _, question in batch if question.context not in contexts})
        needed = {question.context for _, question in batch}
        contexts = {text: pieces for text, pieces in contexts.items() if text in needed}
        contexts |= dict(zip(new, tokenizer.pieces(new)))
        question_pieces = tokenizer.pieces([question.text for _, question in batch])
        cut = Cut(np.empty(0, dtype), sum(len(question.context) for _, question in batch), [], [])
        rows = [cut.rows]
        for (number, question), pieces in zip(batch, question_pieces):
            context, span = contexts[question.context], question.span()
            answer = answer_tokens(context, span) if span else None
            if answer is None:
                (cut.without_tokens if span else cut.misplaced).append(question.id)
                if training:
                    continue
            rows.append(_windows(pieces.ids[: sizes.max_question], context, answer, tokenizer, sizes, dtype))
            rows[-1]["question"] = number
        yield cut._replace(rows=np.concatenate(rows))


def answer_tokens(context: Pieces, span: tuple[int, int]) -> tuple[int, int] | None:
    """First and last token of the context that overlap the characters [begin, end) of `span`; None: no token does."""
    begins, ends = context.characters[:, 0], context.characters[:, 1]
    touching = np.flatnonzero((begins < span[1]) & (ends > span[0]))
    return (int(touching[0]), int(touching[-1])) if len(touching) else None


def context_spans(num_tokens: int, room: int, stride: int) -> npt.NDArray[np.int64]:
    """Tokens [begin, end) of the context that each window holds, int64 [windows, 2]; at least one window.
    As in BERT, a window begins `stride` tokens (at most `room`) after the one before; the last one holds the end.
    """
    step = min(stride, room)
    count = 1 + max(0, -(-(num_tokens - room) // step))
    begins = np.arange(count) * step
    return np.stack([begins, np.minimum(begins + room, num_tokens)], 1)


def best_windows(spans: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.int64]:
    """The number of the window with most text around each token of a context, int64 [num_tokens].
    A window's score for a token: tokens on the token's shorter side, plus 0.01 x tokens of the window. The window with
    the highest score is taken; among equal scores, the first (`_check_is_max_context` of BERT's run_squad.py).
    """
    best = np.empty(num_tokens, np.int64)
    for first in range(0, num_tokens, TOKENS_AT_ONCE):  # all tokens and all windows at once may be terabytes
        place = np.arange(first, min(first + TOKENS_AT_ONCE, num_tokens))
        near = np.flatnonzero((spans[:, 0] <= place[-1]) & (spans[:, 1] > first))
        begins, ends = spans[near, :1], spans[near, 1:]
        sides = np.minimum(place - begins, ends - 1 - place)
        score = np.where(sides >= 0, sides + 0.01 * (ends - begins), -1.0)
        best[place] = near[score.argmax(0)]
    return best


def segments_of(rows: Rows) -> npt.NDArray[np.int64]:
    """BERT's segments, int64 [n, max_length]: 1 for the context and the [SEP] after it, 0 elsewhere."""
    place = np.arange(rows["tokens"].shape[1])
    return ((place >= rows["context"][:, None]) & (place < rows["length"][:, None])).astype(np.int64)


def _windows(
    question: npt.NDArray[np.int64],
    context: Pieces,
    answer: tuple[int, int] | None,
    tokenizer: WordPiece,
    sizes: WindowSizes,
    dtype: np.dtype[Any],
) -> Rows:
    """The windows of one question."""
    first = len(question) + 2
    num_tokens = len(context.ids)
    spans = context_spans(num_tokens, sizes.max_length - first - 1, sizes.stride)
    if len(spans) * sizes.max_length > MOST_TOKENS:
        raise UserError(
            f"data.stride = {sizes.stride}: a context of {num_tokens:,} tokens would be cut into {len(spans):,} "
            f"windows of {sizes.max_length} tokens, more than {MOST_TOKENS:,} tokens; give a larger data.stride"
        )
    best = best_windows(spans, num_tokens) if num_tokens else np.empty(0, np.int64)
    rows = np.zeros(len(spans), dtype)
    rows["tokens"] = tokenizer.pad
    rows["tokens"][:, :first] = [tokenizer.begin, *question, tokenizer.end]
    rows["context"] = first
    for number, (begin, end) in enumerate(spans.tolist()):
        row, stop = rows[number], first + end - begin
        row["tokens"][first:stop] = context.ids[begin:end]
        row["tokens"][stop] = tokenizer.end
        row["length"] = stop + 1
        if answer and begin <= answer[0] and answer[1] < end:
            row["targets"] = first + answer[0] - begin, first + answer[1] - begin
        if "characters" in (dtype.names or ()):
            row["characters"][first:stop] = context.characters[begin:end]
            row["chosen"][first:stop] = best[begin:end] == number
    return rows
