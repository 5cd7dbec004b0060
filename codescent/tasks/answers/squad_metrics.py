"""In: predicted texts by question, the right answers. Out: exact match and F1 as SQuAD defines them.
Does not read files and does not choose answers (predictions.py and decode.py do)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codescent.tasks.answers.squad import Question

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """Exact match and F1 in percent of all questions; a question without a prediction counts as wrong.

    Attributes:
        num_questions: how many there are.
        unanswered: ids of those without a prediction.
    """

    exact_match: float
    f1: float
    num_questions: int
    unanswered: tuple[str, ...]


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> Score:
    """Score predictions by question id; the right answer that fits best counts (evaluate-v1.1.py)."""
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
    return Score(100.0 * exact / count, 100.0 * overlap / count, count, tuple(unanswered))


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and the words a, an, the, and with one space between words."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words of two normalised texts; 0 where no word is in both.

    By SQuAD's definition it is 0 for two texts without words, whose exact match is 1.
    """
    predicted, right = prediction.split(), answer.split()
    common = (Counter(predicted) & Counter(right)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)
