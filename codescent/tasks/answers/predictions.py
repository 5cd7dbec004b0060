"""In: predicted answers, questions. Out: exact match and F1 by SQuAD's rules; files of predictions, written and read.
Does not compute predictions (evaluate.py does)."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.tasks.answers.squad import Question, load_json, problem_lines, read_questions
from codescent.tasks.scores import Scores

SHOWN_IDS = 3
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """Exact match and F1, in percent of all questions.

    Attributes:
        unanswered: ids of questions without a prediction; they count as wrong.
        ignored: ids of predictions without a question.
    """

    exact_match: float
    f1: float
    num_questions: int
    unanswered: tuple[str, ...]
    ignored: tuple[str, ...]


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> Score:
    """Score predictions by question id; of several right answers the most similar one counts (evaluate-v1.1.py)."""
    exact, overlap = 0, 0.0
    unanswered = []
    for question in questions:
        if question.id not in predictions:
            unanswered.append(question.id)
            continue
        prediction = normalise(predictions[question.id])
        answers = [normalise(answer.text) for answer in question.answers]
        exact += prediction in answers
        overlap += max(f1(prediction, answer) for answer in answers)
    count = len(questions)
    ignored = tuple(predictions.keys() - {question.id for question in questions})
    return Score(100.0 * exact / count, 100.0 * overlap / count, count, tuple(unanswered), tuple(sorted(ignored)))


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and the words a, an, the, and with one space between words."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words of two normalised texts; 0 if they share no word.
    By SQuAD's definition two texts without words have 0 too, although their exact match is 1.
    """
    predicted, right = prediction.split(), answer.split()
    common = (Counter(predicted) & Counter(right)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)


def score_files(predictions: Path, data: Path) -> Scores:
    """Score a file of predictions against a file in SQuAD's format.
    Predictions without a question are counted and ignored, as SQuAD's evaluate-v1.1.py ignores them.
    Raises UserError: every problem of either file, or predictions of which none has a question.
    """
    try:
        questions = read_questions(data).questions
    except UserError as error:
        try:
            read_predictions(predictions)
        except UserError as other:
            raise UserError(*error.problems, *other.problems) from error
        raise
    found = score(questions, given := read_predictions(predictions))
    if given and len(found.ignored) == len(given):
        raise UserError(f"{predictions}: none of its {len(given):,} predictions is for a question of {data}")
    return scores_of(found, data)


def read_predictions(path: Path) -> dict[str, str]:
    """Read a JSON file {question id: text}.
    Raises UserError: cannot be read, not JSON, or all (the first twenty) of its entries that cannot be used.
    """
    _, pairs = load_json(path, _Pairs)
    if not isinstance(pairs, _Pairs):
        raise UserError(f"{path}: a JSON object {{question id: text}} is needed, found {type(pairs).__name__}")
    problems = []
    predictions: dict[str, str] = {}
    for name, text in pairs:
        if not isinstance(text, str):
            kind = {_Pairs: "an object", list: "a list", type(None): "null"}.get(type(text), repr(text)[:40])
            problems.append(f"{name!r}: {kind}: text is needed")
        if name in predictions:
            problems.append(f"{name!r}: occurs more than once")
        predictions[name] = text
    if problems:
        raise UserError(*problem_lines(path, problems))
    return predictions


def write_predictions(path: Path, predictions: Mapping[str, str]) -> None:
    """Write {question id: text}, the format of SQuAD's own evaluation. Raises UserError: it cannot be written there."""
    try:
        replace_file(path, json.dumps(predictions, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def scores_of(found: Score, data: Path) -> Scores:
    """A score as lines to print, and as data: exact match and F1 as shares."""
    summary = f"{counted(found.num_questions, 'question')} of {data}"
    if found.unanswered:
        summary += f"; {len(found.unanswered):,} have no prediction and count as wrong: {_first(found.unanswered)}"
    said = [f"exact match {found.exact_match:.2f} %, F1 {found.f1:.2f} %", summary]
    if found.ignored:
        said.append(
            f"{len(found.ignored):,} predictions are ignored, their ids are not in {data}: {_first(found.ignored)}"
        )
    facts = {
        "data": data,
        "exact_match": found.exact_match / 100,
        "f1": found.f1 / 100,
        "questions": found.num_questions,
        "unanswered": found.unanswered,
        "ignored": found.ignored,
    }
    return Scores(said, facts)


def _first(ids: Sequence[str]) -> str:
    return f"{', '.join(ids[:SHOWN_IDS])}{', …' * (len(ids) > SHOWN_IDS)}"


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, in which a name can occur twice."""
