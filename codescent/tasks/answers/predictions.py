"""In: files of predictions, of questions. Out: predictions, checked against the questions, scored, written.
Does not make predictions (evaluate.py does)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.tasks.answers.squad import Questions, load_json, read_questions, told
from codescent.tasks.answers.squad_metrics import Score, score

SHOWN_IDS = 3


def score_files(predictions: Path, data: Path) -> list[str]:
    """Score a file of predictions by a file of SQuAD's form, in lines.

    Raises:
        UserError: all that is wrong with either file.
    """
    problems: list[str] = []
    found: dict[str, str] = {}
    questions: Questions | None = None
    try:
        questions = read_questions(data)
    except UserError as error:
        problems += error.problems
    try:
        found = read_predictions(predictions, questions)
    except UserError as error:
        problems += error.problems
    if problems or questions is None:
        raise UserError(*problems)
    return lines(score(questions.questions, found), data)


def read_predictions(path: Path, questions: Questions | None) -> dict[str, str]:
    """A file {question id: text}.

    Args:
        path: the file.
        questions: a prediction for any other question is refused; None: they are not known.

    Raises:
        UserError: cannot be read, not JSON, or all (the first twenty) of its entries that cannot be used.
    """
    _, pairs = load_json(path, _Pairs)
    if not isinstance(pairs, _Pairs):
        raise UserError(f"{path}: a JSON object {{question id: text}} is needed, found {type(pairs).__name__}")
    known = {question.id for question in questions.questions} if questions else None
    problems = []
    predictions: dict[str, str] = {}
    for name, text in pairs:
        if not isinstance(text, str):
            kind = {_Pairs: "an object", list: "a list", type(None): "null"}.get(type(text), repr(text)[:40])
            problems.append(f"{name!r}: {kind}: text is needed")
        if name in predictions:
            problems.append(f"{name!r}: is there more than once")
        if known is not None and questions is not None and name not in known:
            problems.append(f"{name!r}: no such question in {questions.path}")
        predictions[name] = text
    if problems:
        raise UserError(*told(path, problems))
    return predictions


def write_predictions(path: Path, predictions: Mapping[str, str]) -> None:
    """Write {question id: text}, the form of SQuAD's own evaluation.

    Raises:
        UserError: it cannot be written there.
    """
    try:
        replace_file(path, json.dumps(predictions, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def lines(found: Score, data: Path) -> list[str]:
    """A score as lines."""
    told_of = f"{found.num_questions:,} questions of {data}"
    if missing := found.unanswered:
        shown = f"{', '.join(missing[:SHOWN_IDS])}{', …' * (len(missing) > SHOWN_IDS)}"
        told_of += f"; {len(missing):,} have no prediction and count as wrong: {shown}"
    return [f"exact match {found.exact_match:.2f} %, F1 {found.f1:.2f} %", told_of]


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, in which a name can occur twice."""
