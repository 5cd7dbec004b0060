"""In: the logits of a question's windows: where its answer begins and ends. Out: its best texts and their probability.
Does not run a model and does not score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codescent.tasks.answers.windows import Rows

Logits = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Decoding:
    """How answers are read off logits; the defaults are those of BERT's run_squad.py.

    Attributes:
        n_best: spans that are kept of each question.
        max_answer: the most tokens that an answer has.
    """

    n_best: int = 20
    max_answer: int = 30


@dataclass(frozen=True)
class Span:
    """A possible answer: characters [begin, end) of the context, and the sum of its two logits."""

    score: float
    begin: int
    end: int


@dataclass(frozen=True)
class Candidate:
    """One of the best answers to a question; the probabilities of a question's candidates add up to 1."""

    text: str
    probability: float
    score: float
    begin: int
    end: int


def best_spans(row: Rows, start_logits: Logits, end_logits: Logits, decoding: Decoding) -> list[Span]:
    """The best spans of one window, best first; among equal ones the earlier begin, then the earlier end.

    A span has context tokens only, at most `max_answer`, and its first token is in its best window. All such spans are
    compared (BERT's script compares those of the 20 best begins and the 20 best ends).

    Args:
        row: the window, with text.
        start_logits, end_logits: [max_length].
        decoding: how many.
    """
    first, behind = int(row["context"]), int(row["length"]) - 1
    starts = np.flatnonzero(row["chosen"])
    if not len(starts):
        return []
    padded = np.full(behind - first + decoding.max_answer, -np.inf)
    padded[: behind - first] = end_logits[first:behind]
    ends = np.lib.stride_tricks.sliding_window_view(padded, decoding.max_answer)[starts - first]
    scores = start_logits[starts].astype(np.float64)[:, None] + ends
    count = min(decoding.n_best, int(np.isfinite(scores).sum()))
    least = np.partition(scores, scores.size - count, None)[scores.size - count]
    places, lengths = np.nonzero(scores >= least)  # in the order of begins, then of ends
    spans = []
    for best in np.argsort(-scores[places, lengths], kind="stable")[:count].tolist():
        start, length = int(starts[places[best]]), int(lengths[best])
        begin, end = int(row["characters"][start, 0]), int(row["characters"][start + length, 1])
        spans.append(Span(float(scores[places[best], length]), begin, end))
    return spans


def candidates(context: str, spans_of_windows: Sequence[Sequence[Span]], decoding: Decoding) -> list[Candidate]:
    """The best spans of all windows of a question as texts, best first, each text once.

    Among equal scores the earlier window comes first. Without any span the answer is the empty text.
    """
    spans = sorted((span for spans in spans_of_windows for span in spans), key=lambda span: -span.score)
    texts: dict[str, Span] = {}
    for span in spans[: decoding.n_best]:
        texts.setdefault(context[span.begin : span.end], span)
    if not texts:
        return [Candidate("", 1.0, 0.0, 0, 0)]
    scores = np.array([span.score for span in texts.values()])
    weights = np.exp(scores - scores.max())
    probabilities = (weights / weights.sum()).tolist()
    return [
        Candidate(text, probability, span.score, span.begin, span.end)
        for (text, span), probability in zip(texts.items(), probabilities)
    ]
