"""In: SQuAD's real files and broken ones. Out: that the questions are those, and every problem is named with its place.
Does not tokenise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from questions import CONTEXT, question, squad

from codescent.base.errors import UserError
from codescent.tasks.answers.squad import MAX_PROBLEMS, Question, Questions, read_questions, write_questions


def refusal(path: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


def read(tmp_path: Path, value: Any) -> tuple[Question, ...]:
    (tmp_path / "q.json").write_text(json.dumps(value))
    return read_questions(tmp_path / "q.json").questions


def misplaced(found: Questions) -> list[str]:
    return [question.id for question in found.questions if question.span() is None]


def test_the_dev_set_is_read_whole_and_written_again(data_dir: Path) -> None:
    path = data_dir / "squad" / "dev-v1.1.json"
    found = read_questions(path)
    assert len(found.questions) == 10_570
    assert sum(len(question.answers) for question in found.questions) == 34_726
    assert len({question.context for question in found.questions}) == 2_067
    assert misplaced(found) == []
    assert found.sha256 == "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"
    assert write_questions(found.questions) == path.read_text(encoding="utf-8")
    for question_ in found.questions:
        for answer in question_.answers:
            assert question_.context[answer.start :].startswith(answer.text)


def test_the_training_part_is_read_whatever_the_order_of_its_keys(data_dir: Path) -> None:
    path = data_dir / "squad" / "train-v1.1.part44.json"
    found = read_questions(path)
    assert len(found.questions) == 11_877
    assert all(len(question.answers) == 1 for question in found.questions)
    assert misplaced(found) == []
    assert len(read_questions(path, 10_000).questions) == 10_000
    assert read_questions(path, 500).questions == found.questions[:500]
    assert read_questions(path, None) == found


def test_answers_that_are_not_where_the_file_says_are_told(tmp_path: Path) -> None:
    off = question("off", "Where?", "city")
    off["answers"][0]["answer_start"] += 1
    far = {"id": "far", "question": "?", "answers": [{"text": "city", "answer_start": 10**9}]}
    spaced = {"id": "spaced", "question": "?", "answers": [{"text": " king\u00a0was ", "answer_start": 3}]}
    (tmp_path / "q.json").write_text(json.dumps(squad((CONTEXT, [question("right", "?", "river"), off, far, spaced]))))
    found = read_questions(tmp_path / "q.json")
    assert misplaced(found) == ["off", "far"]
    span = found.questions[3].span()
    assert span is not None
    assert CONTEXT[slice(*span)] == "king was"  # white space may be spelt differently, and does not belong to it


def test_a_byte_order_mark_other_keys_and_no_version_are_fine(tmp_path: Path) -> None:
    value = squad((CONTEXT, [{**question("q", "", "king"), "is_hard": True}]))
    del value["version"]
    (tmp_path / "q.json").write_text("\ufeff" + json.dumps(value), encoding="utf-8")
    assert read_questions(tmp_path / "q.json").questions[0].text == ""
    assert read(tmp_path, {**value, "version": 1.1})


def test_every_place_that_is_not_of_the_form_is_named(tmp_path: Path) -> None:
    asked: list[Any] = [
        {"question": "?", "answers": [{"text": "king", "answer_start": 4}]},
        {"id": "b", "question": 5, "answers": [{"text": "", "answer_start": -1}]},
        {"id": "c", "question": "?", "answers": []},
        {"id": "d", "question": "?", "answers": [{"answer_start": "4"}, {"text": "king", "answer_start": True}, 7]},
        {"id": "e", "question": "?", "answers": {"text": "king"}},
        "f",
        {"id": "g", "question": "half \ud800", "answers": [{"text": "king"}]},
        question("h", "?", "king"),
        question("h", "?", "king"),
    ]
    value = squad((CONTEXT, asked), (" ", []))
    value["version"] = "v2.0"
    value["data"].append({"title": "no paragraphs"})
    (tmp_path / "q.json").write_text(json.dumps(value))
    where = "data[0].paragraphs[0].qas"
    number = "the number of the answer's first character is needed"
    assert refusal(tmp_path / "q.json") == [
        "version: 'v2.0': \"1.1\" is needed (2.0 has questions without an answer)",
        f"{where}[0].id: missing: text is needed",
        f"{where}[1].question: a number: text is needed",
        f"{where}[1].answers[0].text: empty: text is needed",
        f"{where}[1].answers[0].answer_start: -1: {number}",
        f"{where}[2].answers: empty: SQuAD 1.1 has an answer to every question",
        f"{where}[3].answers[0].text: missing: text is needed",
        f"{where}[3].answers[0].answer_start: '4': {number}",
        f"{where}[3].answers[1].answer_start: True: {number}",
        f"{where}[3].answers[2]: a number: an object is needed",
        f"{where}[4].answers: an object: a list is needed",
        f"{where}[5]: text: an object is needed",
        f"{where}[6].question: half of a surrogate pair, which is no character: text is needed",
        f"{where}[6].answers[0].answer_start: missing: {number}",
        "data[0].paragraphs[1].context: empty: text is needed",
        "data[1].paragraphs: missing: a list is needed",
        "id 'h': more than one question has this id",
    ]


def test_of_many_problems_the_first_are_told(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps(squad((CONTEXT, [{} for _ in range(100)]))))
    found = refusal(tmp_path / "q.json")
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == "280 more problems"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"version": "1.1", "data": [{"title": "x", "parag', "not JSON: cut short at column 44"),
        (b'{"version": "1.1", "data": [', "not JSON: cut short at column 29"),
        (b"", "not JSON: empty"),
        (b"\xff\xfe{\x00", "is UTF-16: save it as UTF-8"),
        (b"[" * 200_000, "not JSON: nested too deeply"),
        (b'{"data": ' + b"1" * 5000 + b"}", "not JSON: a number has too many digits"),
        (b"[]", 'a JSON object with the keys "version" and "data" is needed, found a list'),
        (b"{}", "data: missing: a list is needed"),
        (b'{"data": []}', "data: no questions"),
    ],
)
def test_what_is_no_file_of_questions(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "q.json").write_bytes(content)
    assert told in refusal(tmp_path / "q.json")[0]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json") == ["cannot be read: No such file or directory"]
    assert refusal(tmp_path) == ["cannot be read: Is a directory"]
