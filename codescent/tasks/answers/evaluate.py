"""In: a model; windows (a question and a part of its context). Out: the predicted answers, their exact match and F1.
Does not load the model, and does not contain the formulas of exact match and F1 (predictions.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from codescent.base.errors import UserError
from codescent.data.loader import Batch
from codescent.data.prepared import TOKENIZER
from codescent.data.samples import Samples
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.tasks.answers.predictions import Score, score, scores_of, write_predictions
from codescent.tasks.answers.source import QuestionDataset, QuestionSource
from codescent.tasks.answers.squad import Questions, read_questions
from codescent.tasks.answers.windows import Rows, WindowSizes, make_windows
from codescent.tasks.score import fitting
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest

Logits = npt.NDArray[np.float64]
LogitsOf = Callable[[Samples], tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""A function from n samples to (start logits, end logits), each [n, max_length]."""


@dataclass(frozen=True)
class Decoding:
    """Number of spans that are compared for a question, and largest length of an answer in tokens (run_squad.py's)."""

    n_best: int = 20
    max_answer: int = 30


BERT_DECODING = Decoding()


@dataclass(frozen=True)
class AnswerSpan:
    """A possible answer: characters [begin, end) of the context, and the sum of its two logits."""

    score: float
    begin: int
    end: int


@dataclass(frozen=True)
class RankedAnswer(AnswerSpan):
    """One of the best answers to a question; the probabilities of a question's candidates add up to 1."""

    text: str
    probability: float


def best_spans(row: Rows, start_logits: Logits, end_logits: Logits, decoding: Decoding) -> list[AnswerSpan]:
    """The best spans of one window with text, best first. Equal ones are ordered by begin, then by end.

    A span has context tokens only, at most `max_answer`, and its first token is in its best window. All such spans are
    compared (BERT's script compares those of the 20 best begins and the 20 best ends). Logits are [max_length].
    """
    first, stop = int(row["context"]), int(row["length"]) - 1
    starts = np.flatnonzero(row["chosen"])
    if not len(starts):
        return []
    padded = np.full(stop - first + decoding.max_answer, -np.inf)
    padded[: stop - first] = end_logits[first:stop]
    ends = np.lib.stride_tricks.sliding_window_view(padded, decoding.max_answer)[starts - first]
    scores = start_logits[starts].astype(np.float64)[:, None] + ends
    count = min(decoding.n_best, int(np.isfinite(scores).sum()))
    least = np.partition(scores, scores.size - count, None)[scores.size - count]
    places, lengths = np.nonzero(scores >= least)  # in the order of begins, then of ends
    spans = []
    for best in np.argsort(-scores[places, lengths], kind="stable")[:count].tolist():
        start, length = int(starts[places[best]]), int(lengths[best])
        begin, end = int(row["characters"][start, 0]), int(row["characters"][start + length, 1])
        spans.append(AnswerSpan(float(scores[places[best], length]), begin, end))
    return spans


def candidates(
    context: str, spans_of_windows: Sequence[Sequence[AnswerSpan]], decoding: Decoding
) -> list[RankedAnswer]:
    """The best spans of all windows of a question as texts, best first, each text once.
    Among equal scores the earlier window comes first. Without any span the answer is the empty text.
    """
    spans = sorted((span for spans in spans_of_windows for span in spans), key=lambda span: -span.score)
    texts: dict[str, AnswerSpan] = {}
    for span in spans[: decoding.n_best]:
        texts.setdefault(context[span.begin : span.end], span)
    if not texts:
        return [RankedAnswer(0.0, 0, 0, "", 1.0)]
    scores = np.array([span.score for span in texts.values()])
    weights = np.exp(scores - scores.max())
    probabilities = (weights / weights.sum()).tolist()
    return [
        RankedAnswer(span.score, span.begin, span.end, text, probability)
        for (text, span), probability in zip(texts.items(), probabilities)
    ]


@dataclass(frozen=True)
class Evaluation:
    """A model's answers by question id: the best text; the `n_best` texts with probabilities. And their score."""

    predictions: dict[str, str]
    n_best: dict[str, list[RankedAnswer]]
    score: Score


def evaluate_questions(
    logits_of: LogitsOf,
    source: QuestionSource,
    questions: Questions,
    *,
    batch_size: int = 32,
    decoding: Decoding = BERT_DECODING,
) -> Evaluation:
    """Answer all questions of a validation split, `batch_size` windows at a time, and score the answers.
    Raises UserError: logits that are not finite.
    """
    n_best: dict[str, list[RankedAnswer]] = {}
    windows = _windows(logits_of, source, batch_size)
    for number, rows in groupby(windows, key=lambda window: int(window[0]["question"])):
        question = questions.questions[number]
        spans = [best_spans(row, starts, ends, decoding) for row, starts, ends in rows]
        n_best[question.id] = candidates(question.context, spans, decoding)
    predictions = {name: found[0].text for name, found in n_best.items()}
    return Evaluation(predictions, n_best, score(questions.questions, predictions))


def _windows(logits_of: LogitsOf, source: QuestionSource, batch_size: int) -> Iterator[tuple[Rows, Logits, Logits]]:
    """Every window of the split in its order, with its logits."""
    for first in range(0, source.num_samples, batch_size):
        numbers = np.arange(first, min(first + batch_size, source.num_samples))
        starts, ends = (np.asarray(logits, np.float64) for logits in logits_of(source.read(numbers)))
        if not (np.isfinite(starts).all() and np.isfinite(ends).all()):
            raise UserError(f"the model's logits of validation windows {first} to {numbers[-1]} are not finite")
        yield from zip(source.rows[numbers], starts, ends, strict=True)


def score_answers(request: ScoreRequest, out: Path) -> Scores:
    """Answers of a trained model, written to `out` and scored.
    Raises UserError: questions that cannot be read, logits that are not finite.
    """
    source, questions = _questions(request)
    module = request.make_module()
    batch_size = fitting(module, request.work.seq_len, request.device)
    found = evaluate_questions(_logits_of(module, request.device), source, questions, batch_size=batch_size)
    write_predictions(out, found.predictions)
    scored = scores_of(found.score, questions.path)
    return Scores([*scored.lines, f"predictions: {out}"], {**scored.facts, "predictions": out})


def _questions(request: ScoreRequest) -> tuple[QuestionSource, Questions]:
    """The run's validation questions, or the questions of a file, cut into windows of the run's sizes."""
    if request.data is None:
        dataset = request.open_dataset()
        assert isinstance(dataset, QuestionDataset)
        return dataset.validation, dataset.questions()
    questions, data = read_questions(request.data), request.task.data
    tokenizer = request.open_tokenizer()
    if not isinstance(tokenizer, WordPiece):
        raise UserError(f"{request.task.run / TOKENIZER}: not BERT's tokenizer")
    sizes = WindowSizes(request.work.seq_len, data.stride, data.question_len)
    rows = [cut.rows for cut in make_windows(questions.questions, tokenizer, sizes, training=False)]
    return QuestionSource("validation", np.concatenate(rows)), questions


def _logits_of(module: nn.Module, device: torch.device) -> LogitsOf:
    """The model as a function for `evaluate_questions`."""

    def logits_of(samples: Samples) -> tuple[Any, Any]:
        batch = Batch.of(samples).to(device, next(module.parameters()).dtype)
        with torch.no_grad():
            logits_BT2: Tensor = module(batch.inputs, **batch.extras)
        starts, ends = logits_BT2.cpu().double().unbind(-1)
        return starts.numpy(), ends.numpy()

    return logits_of
