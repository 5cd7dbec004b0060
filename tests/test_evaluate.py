"""In: predictions and logits, right and wrong. Out: SQuAD's exact match and F1, the best spans, and what is refused.
Does not run a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import questions
from hypothesis import given
from hypothesis import strategies as st
from questions import CONTEXT, files, question, squad, vocabulary

from codescent.base.errors import UserError
from codescent.data.samples import Samples
from codescent.data.tokenizers.wordpiece import bert
from codescent.tasks.answers.evaluate import Decoding, best_spans, candidates, evaluate_questions
from codescent.tasks.answers.predictions import f1, normalise, read_predictions, score, score_files, write_predictions
from codescent.tasks.answers.source import QuestionDataset, QuestionSource
from codescent.tasks.answers.squad import GoldAnswer, Question, read_questions
from codescent.tasks.answers.windows import Rows, WindowSizes, make_windows
from codescent.verbs import cli


def ask(name: str, *answers: str) -> Question:
    return Question(name, "?", " ".join(answers), "", tuple(GoldAnswer(answer, 0) for answer in answers))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, a\tdog!", "cat dog"),
        ("a an the", ""),
        ("theatre another banana", "theatre another banana"),
        ("the-cat", "thecat"),  # punctuation goes first, so no article is left
        ("a.b", "ab"),
        ("A's", "as"),
        ("don't U.S.A.", "dont usa"),
        ("$1,000.50", "100050"),
        ("“The” –cat—", "“ ” –cat—"),  # only ASCII punctuation is taken out, and articles go by word borders
        ("ÉCOLE Straße", "école straße"),
        ("x\u00a0y\u3000z", "x y z"),
        ("thé the", "thé"),
        ("", ""),
        ("...", ""),
    ],
)
def test_texts_are_normalised_as_squad_does(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("cat sat", "cat sat", 1.0),
        ("cat", "cat sat", 2 / 3),
        ("cat sat on mat", "cat", 2 / 5),
        ("cat cat", "cat", 2 / 3),
        ("cat cat dog", "cat cat", 4 / 5),
        ("dog", "cat", 0.0),
        ("", "", 0.0),  # SQuAD's own rule: no word in common
        ("", "cat", 0.0),
        ("b a", "a b", 1.0),  # the order of words does not count
    ],
)
def test_f1_by_hand(prediction: str, answer: str, expected: float) -> None:
    assert math.isclose(f1(prediction, answer), expected)


def test_scores_by_hand() -> None:
    questions = [ask("1", "The cat", "a black cat"), ask("2", "1990"), ask("3", "."), ask("4", "king of Spain")]
    found = score(questions, {"1": "black cat!", "2": "in 1990", "3": "the", "4": "queen"})
    assert found.exact_match == 50.0  # 1, and 3: both are nothing
    assert math.isclose(found.f1, 100 * (1 + 2 / 3 + 0 + 0) / 4)
    assert (found.num_questions, found.unanswered) == (4, ())
    partly = score(questions, {"1": "the CAT"})
    assert (partly.exact_match, partly.f1, partly.unanswered) == (25.0, 25.0, ("2", "3", "4"))
    assert score(questions, {"4": "king of the Spain"}).f1 == 25.0


def test_perfect_predictions_for_the_dev_set(data_dir: Path) -> None:
    questions = read_questions(data_dir / "squad" / "dev-v1.1.json").questions
    found = score(questions, {question.id: question.answers[0].text for question in questions})
    assert (found.exact_match, found.f1, found.unanswered) == (100.0, 100.0, ())
    # Three questions have a "." among their answers: two nothings match exactly, and have no word in common.
    last = score(questions, {question.id: question.answers[-1].text for question in questions})
    assert last.exact_match == 100.0
    assert math.isclose(last.f1, 100.0 * 10_569 / 10_570)


# Decoding


def window(characters: list[tuple[int, int]], chosen: list[bool], first: int = 3, length: int = 16) -> Rows:
    """A window whose context tokens have these characters."""
    row = np.zeros(1, WindowSizes(length, 8, 4).dtype(100, with_text=True))[0]
    row["context"], row["length"] = first, first + len(characters) + 1
    for place, (span, best) in enumerate(zip(characters, [*chosen, *[False] * len(characters)]), first):
        row["characters"][place], row["chosen"][place] = span, best
    return row


def brute_force(row: Rows, starts: Any, ends: Any, decoding: Decoding) -> list[tuple[float, int, int]]:
    found = []
    for start in range(row["context"], row["length"] - 1):
        for end in range(start, min(start + decoding.max_answer, row["length"] - 1)):
            if row["chosen"][start]:
                span = int(row["characters"][start, 0]), int(row["characters"][end, 1])
                found.append((-float(starts[start] + ends[end]), start, end, *span))
    return [(-score, begin, end) for score, _, _, begin, end in sorted(found)[: decoding.n_best]]


@given(data=st.data(), tokens=st.integers(0, 12), n_best=st.integers(1, 30), max_answer=st.integers(1, 20))
def test_the_best_spans_are_brute_forces(data: st.DataObject, tokens: int, n_best: int, max_answer: int) -> None:
    logit = st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30))  # ties are common
    starts, ends = (np.array(data.draw(st.lists(logit, min_size=16, max_size=16))) for _ in range(2))
    chosen = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    row = window([(3 * place, 3 * place + 2) for place in range(tokens)], chosen)
    decoding = Decoding(n_best, max_answer)
    found = [(span.score, span.begin, span.end) for span in best_spans(row, starts, ends, decoding)]
    assert found == brute_force(row, starts, ends, decoding)


def test_candidates_of_all_windows_by_hand() -> None:
    context = "the king the king"
    tokens = [(0, 3), (4, 8), (9, 12), (13, 17)]
    left = window(tokens[:3], [True, True, False])
    right = window(tokens[2:], [True, True])
    starts, ends = np.full((2, 16), -9.0), np.full((2, 16), -9.0)
    starts[0, 4], ends[0, 4] = 1.0, 1.0  # "king", the first
    starts[0, 5], ends[0, 5] = 99.0, 9.0  # in its worse window it does not begin an answer: but it may end one
    starts[1, 4], ends[1, 4] = 2.0, 2.0  # "king", the second
    starts[:, [0, 1, 2, 15]] = ends[:, [0, 1, 2, 15]] = 1000.0  # [CLS], question, padding
    decoding = Decoding(n_best=3, max_answer=2)
    spans = [best_spans(row, *logits, decoding) for row, logits in zip((left, right), zip(starts, ends))]
    found = candidates(context, spans, decoding)
    assert [(candidate.text, candidate.score) for candidate in found] == [("king the", 10.0), ("king", 4.0)]
    assert (found[1].begin, found[1].end) == (13, 17)  # of the two that read alike the better one
    assert math.isclose(found[0].probability, 1 / (1 + math.exp(-6)))
    assert math.isclose(sum(candidate.probability for candidate in found), 1.0)


def test_equal_scores_go_by_place_and_no_token_is_no_text() -> None:
    rows = [window([(0, 1), (2, 3)], [True, True]), window([(4, 5)], [True])]
    zeros = np.zeros(16)
    spans = [best_spans(row, zeros, zeros, Decoding()) for row in rows]
    assert [candidate.text for candidate in candidates("a b c", spans, Decoding())] == ["a", "a b", "b", "c"]
    [nothing] = candidates("\u200b", [best_spans(window([], []), zeros, zeros, Decoding())], Decoding())
    assert (nothing.text, nothing.probability) == ("", 1.0)


@pytest.fixture
def dataset(tmp_path: Path) -> QuestionDataset:
    train, dev = files(tmp_path)
    request = questions(
        str(train),
        validation=str(dev),
        tokenizer=f"bert:{vocabulary(tmp_path)}",
        seq_len=64,
        stride=16,
        question_len=16,
    )
    return QuestionDataset.open(request.prepare(tmp_path / "datasets"))


def oracle(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Logits that point at the targets; where there is no answer, hardly at anything."""
    rows, sure = np.arange(len(samples.inputs)), np.where(samples.targets[:, 0] > 0, 10.0, 1.0)
    logits = np.zeros((2, *samples.inputs.shape), np.float32)
    for half, target in zip(logits, samples.targets.T):
        half[rows, target] = sure
    return logits[0], logits[1]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_a_model_that_knows_answers_all_questions(dataset: QuestionDataset, batch_size: int) -> None:
    found = evaluate_questions(oracle, dataset.validation, dataset.questions(), batch_size=batch_size)
    assert found.predictions == {"v1": "1807", "v2": "The king", "t1": "The king"}
    assert (found.score.exact_match, found.score.f1, found.score.unanswered) == (100.0, 100.0, ())
    assert found.n_best["v1"][0].text == "1807"
    assert found.n_best["v1"][0].probability > 0.9
    assert len(found.n_best["v1"]) <= 20


def test_logits_that_are_not_finite(dataset: QuestionDataset) -> None:
    def broken(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        starts, ends = oracle(samples)
        return starts, ends * np.nan

    with pytest.raises(UserError, match="windows 0 to 3 are not finite"):
        evaluate_questions(broken, dataset.validation, dataset.questions(), batch_size=4)


def test_an_oracle_on_the_dev_set(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only answers that begin or end inside a token are missed: what the tokens bear."""
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    questions = read_questions(data_dir / "squad" / "dev-v1.1.json", 1000)
    cuts = make_windows(questions.questions, bert("bert"), WindowSizes(), training=False)
    source = QuestionSource("validation", np.concatenate([cut.rows for cut in cuts]))
    found = evaluate_questions(oracle, source, questions)
    missed = [one for one in questions.questions if not score([one], found.predictions).exact_match]
    assert 0 < len(missed) < 20
    assert all(one.answers[0].text in found.predictions[one.id] for one in missed)  # "gold" in "golden"


# Files


@pytest.fixture
def project(tmp_path: Path) -> Path:
    asked = [question("1", "Who?", "The king", "king"), question("2", "Where?", "the city"), question("3", "?", "sea")]
    (tmp_path / "dev.json").write_text(json.dumps(squad((CONTEXT, asked))))
    return tmp_path


def refusal(project: Path, predictions: str) -> list[str]:
    path = project / "p.json"
    path.write_text(predictions)
    with pytest.raises(UserError) as caught:
        score_files(path, project / "dev.json")
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_a_file_of_predictions_is_scored(project: Path) -> None:
    write_predictions(project / "p.json", {"1": "KING.", "3": "Ötzi's sea"})
    assert json.loads((project / "p.json").read_text(encoding="utf-8")) == {"1": "KING.", "3": "Ötzi's sea"}
    assert score_files(project / "p.json", project / "dev.json").lines == [
        "exact match 33.33 %, F1 55.56 %",
        f"3 questions of {project / 'dev.json'}; 1 have no prediction and count as wrong: 2",
    ]
    (project / "empty.json").write_text("{}")
    assert score_files(project / "empty.json", project / "dev.json").lines[0] == "exact match 0.00 %, F1 0.00 %"


def test_predictions_of_other_questions_are_ignored_and_counted(project: Path) -> None:
    dev, path = project / "dev.json", project / "p.json"
    write_predictions(path, {"1": "KING.", "2": "the city", "3": "sea", **{f"x{number}": "sea" for number in range(4)}})
    assert score_files(path, dev).lines == [
        "exact match 100.00 %, F1 100.00 %",
        f"3 questions of {dev}",
        f"4 predictions are ignored, their ids are not in {dev}: x0, x1, x2, …",
    ]
    assert refusal(project, '{"x": "sea", "y": "a"}') == [f"none of its 2 predictions is for a question of {dev}"]


def test_every_wrong_entry_is_named(project: Path) -> None:
    assert refusal(project, '{"1": 5, "2": null, "3": ["a"], "x": "b", "y": {"text": "c"}, "3": "d"}') == [
        "'1': 5: text is needed",
        "'2': null: text is needed",
        "'3': a list: text is needed",
        "'y': an object: text is needed",
        "'3': occurs more than once",
    ]
    assert refusal(project, "[]") == ["a JSON object {question id: text} is needed, found list"]
    assert refusal(project, '"x"') == ["a JSON object {question id: text} is needed, found str"]
    assert "not JSON" in refusal(project, '{"1": "ki')[0]
    many = refusal(project, json.dumps({f"x{number}": 0 for number in range(50)}))
    assert (len(many), many[-1]) == (21, "30 more problems")


def test_both_files_are_looked_at(project: Path) -> None:
    with pytest.raises(UserError) as caught:
        score_files(project / "none.json", project / "neither.json")
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        str(project / "neither.json"),
        str(project / "none.json"),
    ]
    assert read_predictions_without(project) == {"x": "y"}
    with pytest.raises(UserError, match="cannot be written"):
        write_predictions(project / "no" / "p.json", {})


def read_predictions_without(project: Path) -> dict[str, str]:
    (project / "p.json").write_text('{"x": "y"}')
    return read_predictions(project / "p.json")


def test_the_verb(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "p.json").write_text('{"1": "king", "2": "city", "3": "sea"}')
    words = ["evaluate", "--predictions", str(project / "p.json"), "--data", str(project / "dev.json")]
    assert cli.run(words) == 0
    assert capsys.readouterr().out.splitlines()[0] == "exact match 100.00 %, F1 100.00 %"
    assert cli.run([*words, "--json"]) == 0
    scores = {"exact_match": 1.0, "f1": 1.0, "questions": 3, "unanswered": [], "ignored": []}
    assert json.loads(capsys.readouterr().out) == {"data": str(project / "dev.json"), **scores}
    (project / "p.json").write_text('{"1": 1, "4": null}')
    assert cli.run(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(": ")[0] for line in told.err.splitlines()] == ["error", "error"]
    assert "Traceback" not in told.err
