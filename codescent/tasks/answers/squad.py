"""In: a JSON file in the format of SQuAD v1.1. Out: its questions, or an error that lists what has a wrong format.
Does not tokenise (windows.py does) and does not score (predictions.py does)."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.data.text.compressed import read_unpacked
from codescent.data.text.lines import format_hint
from codescent.data.text.records import BLOCK_BYTES, Reading
from codescent.data.text.sources import read_blocks

VERSION = "1.1"
MAX_PROBLEMS = 20
HEAD_BYTES = 1 << 20
_HEAD = [re.compile(rf'"{key}"\s*:\s*\[\s*\{{') for key in ("data", "paragraphs", "qas")]
"""Beginnings of lists of objects, in the order of a file; other keys may be between them."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class GoldAnswer:
    """A right answer: its text, and the character of the context where it begins."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context; the first answer is the one that a model is trained on."""

    id: str
    text: str
    context: str
    title: str
    answers: tuple[GoldAnswer, ...]

    def span(self) -> tuple[int, int] | None:
        """Characters [begin, end) of the first answer, without white space around it; None: it is not in that place.
        White space may differ between the answer and the context, as in BERT's script.
        """
        answer = self.answers[0]
        found = self.context[answer.start : answer.start + len(answer.text)]
        if found.split() != answer.text.split():
            return None
        begin = answer.start + len(found) - len(found.lstrip())
        return begin, begin + len(found.strip())


@dataclass(frozen=True)
class Questions:
    """The questions of a file, in its order; sha256 is of its bytes."""

    path: Path
    sha256: str
    questions: tuple[Question, ...]


def has_questions(path: Path) -> bool:
    """Whether the beginning of a file (at most HEAD_BYTES of its text, also if it is compressed) has SQuAD's form."""
    head = ""
    try:
        with closing(read_blocks(path, Reading("", as_text=True))) as blocks:
            for block in islice(blocks, HEAD_BYTES // BLOCK_BYTES):
                head += block.text
                if not head.lstrip().startswith("{"):
                    return False
    except UserError:  # no text, or not there
        return False
    place = 0
    for pattern in _HEAD:
        found = pattern.search(head, place)
        if found is None:
            return False
        place = found.end()
    return True


def read_questions(path: Path, first: int | None = None) -> Questions:
    """Read the first questions, or all, of a file {"version": "1.1", "data": [{"title", "paragraphs": [{"context",
    "qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}. "version" and "title" are optional.
    Other keys are ignored.
    Raises UserError: cannot be read, not JSON, or all (the first twenty) places that are not of this format.
    """
    content, data = load_json(path)
    problems: list[str] = []
    found = tuple(_questions(data, problems))
    problems += [
        f"id {name!r}: more than one question has this id"
        for name, count in Counter(question.id for question in found).items()
        if count > 1
    ]
    if not found and not problems:
        problems.append("data: no questions")
    if problems:
        raise UserError(*problem_lines(path, problems))
    return Questions(path, hashlib.sha256(content).hexdigest(), found[:first])


def write_questions(questions: Iterable[Question]) -> str:
    """The text of a file in the format of `read_questions`. Consecutive questions about one context share it."""
    articles: list[dict[str, Any]] = []
    for question in questions:
        if not articles or articles[-1]["title"] != question.title:
            articles.append({"title": question.title, "paragraphs": []})
        paragraphs = articles[-1]["paragraphs"]
        if not paragraphs or paragraphs[-1]["context"] != question.context:
            paragraphs.append({"context": question.context, "qas": []})
        answers = [{"answer_start": answer.start, "text": answer.text} for answer in question.answers]
        paragraphs[-1]["qas"].append({"answers": answers, "question": question.text, "id": question.id})
    return json.dumps({"data": articles, "version": VERSION})


def load_json(path: Path, pairs: Any = None) -> tuple[bytes, Any]:
    """A file's bytes, and the JSON value of its content, decompressed; `pairs` is json's `object_pairs_hook`.
    Raises UserError: the file cannot be read, or is not JSON (at which place).
    """
    whole, content = read_unpacked(path)
    try:
        return whole, json.loads(content.decode("utf-8-sig"), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        byte = f"byte {content[error.start]:#x} at {error.start}"
        raise UserError(f"{path}: not UTF-8 text: {byte}{format_hint(content)}") from error
    except (ValueError, RecursionError) as error:  # for example thousands of digits or brackets
        raise UserError(f"{path}: not JSON: {json_problem(error)}") from error


def problem_lines(path: Path, problems: list[str]) -> list[str]:
    """The first MAX_PROBLEMS problems, each with the file's path, and the number of further problems."""
    more = [f"{len(problems) - MAX_PROBLEMS} more problems"] if len(problems) > MAX_PROBLEMS else []
    return [f"{path}: {problem}" for problem in problems[:MAX_PROBLEMS] + more]


def _questions(data: Any, problems: list[str]) -> Iterator[Question]:
    """The questions of the right format; every other place is added to `problems`."""
    if not isinstance(data, dict):
        problems.append(f'a JSON object with the keys "version" and "data" is needed, found {_kind(data)}')
        return
    version = data.get("version", VERSION)
    if str(version) != VERSION:
        problems.append(f'version: {version!r}: "{VERSION}" is needed (2.0 has questions without an answer)')
    for article, in_data in _objects(data, "data", "", problems):
        title = article.get("title", "")
        for paragraph, in_article in _objects(article, "paragraphs", in_data, problems):
            context = _string(paragraph, "context", in_article, problems)
            for question, where in _objects(paragraph, "qas", in_article, problems):
                name = _string(question, "id", where, problems)
                text = _string(question, "question", where, problems, may_be_empty=True)
                answers = tuple(_answers(question, where, problems))
                if context is not None and name is not None and text is not None and answers:
                    yield Question(name, text, context, str(title), answers)


def _answers(question: dict[str, Any], where: str, problems: list[str]) -> Iterator[GoldAnswer]:
    found = False
    for answer, place in _objects(question, "answers", where, problems):
        found = True
        text = _string(answer, "text", place, problems)
        start = answer.get("answer_start")
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            what = "missing" if "answer_start" not in answer else f"{start!r:.40}"
            problems.append(f"{place}.answer_start: {what}: the number of the answer's first character is needed")
        elif text is not None:
            yield GoldAnswer(text, start)
    if not found and question.get("answers") == []:
        problems.append(f"{where}.answers: empty: SQuAD {VERSION} has an answer to every question")


def _objects(parent: dict[str, Any], key: str, where: str, problems: list[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of the list under a key, each with its place in the file."""
    place = f"{where}.{key}" if where else key
    if key not in parent:
        problems.append(f"{place}: missing: a list is needed")
        return
    if not isinstance(parent[key], list):
        problems.append(f"{place}: {_kind(parent[key])}: a list is needed")
        return
    for number, child in enumerate(parent[key]):
        if isinstance(child, dict):
            yield child, f"{place}[{number}]"
        else:
            problems.append(f"{place}[{number}]: {_kind(child)}: an object is needed")


def _string(
    parent: dict[str, Any], key: str, where: str, problems: list[str], *, may_be_empty: bool = False
) -> str | None:
    value = parent.get(key)
    if isinstance(value, str) and (value.strip() or may_be_empty) and not _SURROGATE.search(value):
        return value
    if not isinstance(value, str):
        what = "missing" if key not in parent else _kind(value)
    else:
        what = "half of a surrogate pair, which is no character" if value.strip() else "empty"
    problems.append(f"{where}.{key}: {what}: text is needed")
    return None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
