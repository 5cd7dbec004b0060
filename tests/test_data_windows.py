"""In: SQuAD's real questions and made ones. Out: that windows are those of BERT's script and of transformers.
Does not write them to disk (test_data_questions.py does)."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from questions import CONTEXT, vocabulary
from transformers import BertTokenizerFast

from codescent.base.errors import UserError
from codescent.data.tokenizers.wordpiece import WordPiece, bert
from codescent.tasks.answers import windows
from codescent.tasks.answers.predictions import normalise
from codescent.tasks.answers.squad import GoldAnswer, Question, read_questions
from codescent.tasks.answers.windows import (
    Rows,
    WindowSizes,
    answer_tokens,
    best_windows,
    context_spans,
    make_windows,
    segments_of,
)


def cut(questions: list[Question], tokenizer: WordPiece, sizes: WindowSizes, *, training: bool = False) -> Rows:
    return np.concatenate([cut.rows for cut in make_windows(questions, tokenizer, sizes, training=training)])


def ask(text: str, answer: str, context: str = CONTEXT) -> Question:
    return Question("q", text, context, "", (GoldAnswer(answer, context.index(answer)),))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> WordPiece:
    return bert(f"bert:{vocabulary(tmp_path_factory.mktemp('vocabulary'))}")


@pytest.fixture(scope="module")
def uncased(data_dir: Path) -> WordPiece:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODESCENT_DATA_DIR", str(data_dir))
        return bert("bert")


def spans_of_bert(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """run_squad.py's loop, straight from its description: (begin, length)."""
    spans, begin = [], 0
    while begin < num_tokens:
        length = min(num_tokens - begin, room)
        spans.append((begin, length))
        if begin + length == num_tokens:
            break
        begin += min(length, stride)
    return spans


@given(num_tokens=st.integers(1, 200), room=st.integers(1, 50), stride=st.integers(1, 60))
@example(num_tokens=330, room=320, stride=128)  # the last window is so much shorter that its length decides
def test_spans_and_best_windows_are_those_of_bert(num_tokens: int, room: int, stride: int) -> None:
    spans = context_spans(num_tokens, room, stride)
    expected = spans_of_bert(num_tokens, room, stride)
    assert [(begin, end - begin) for begin, end in spans.tolist()] == expected
    with patch.object(windows, "TOKENS_AT_ONCE", 7):
        best = best_windows(spans, num_tokens)
    for place in range(num_tokens):
        scores = {
            number: min(place - begin, begin + length - 1 - place) + 0.01 * length
            for number, (begin, length) in enumerate(expected)
            if begin <= place < begin + length
        }
        assert best[place] == max(scores, key=lambda number: scores[number])


def test_a_window_by_hand(small: WordPiece) -> None:
    sizes = WindowSizes(max_length=16, stride=4, max_question=3)
    rows = cut([ask("Who was the king?", "city", "The king was born in the city. He ran.")], small, sizes)
    text = [small.decode(row["tokens"][: row["length"]].tolist()) for row in rows]
    assert text == [
        "[CLS] who was the [SEP] the king was born in the city. he ran [SEP]",
        "[CLS] who was the [SEP] in the city. he ran. [SEP]",
    ]
    assert rows["length"].tolist() == [16, 13]
    assert rows["tokens"][1, 13:].tolist() == [small.pad] * 3
    assert rows["context"].tolist() == [5, 5]
    assert rows["targets"].tolist() == [[11, 11], [7, 7]]
    assert segments_of(rows)[1].tolist() == [0] * 5 + [1] * 8 + [0] * 3
    assert rows["chosen"].astype(int)[:, 5:15].tolist() == [[1] * 7 + [0] * 3, [0] * 3 + [1] * 4 + [0] * 3]
    assert rows["chosen"].sum() == 11


def test_an_answer_outside_the_window_or_cut_by_it_points_to_cls(small: WordPiece) -> None:
    sizes = WindowSizes(max_length=16, stride=4, max_question=3)
    context = "The king was born in the city. He ran."
    rows = cut([ask("Who was the king?", "The king was born in the city", context)], small, sizes, training=True)
    assert rows["targets"].tolist() == [[5, 11], [0, 0]]
    rows_of_the_end = cut([ask("Who was the king?", "ran.", context)], small, sizes, training=True)
    assert rows_of_the_end["targets"].tolist() == [[0, 0], [10, 11]]  # its last token is the first one outside
    assert rows.dtype.names == ("tokens", "length", "context", "targets", "question")


def test_an_answer_inside_a_word_takes_the_whole_token(small: WordPiece) -> None:
    rows = cut([ask("Who?", "ing", "The king walked.")], small, WindowSizes(32, 8, 8))
    [row] = rows
    start, end = row["targets"]
    assert "The king walked."[row["characters"][start, 0] : row["characters"][end, 1]] == "king"


def test_what_cannot_be_trained_on_is_left_out_and_told(small: WordPiece) -> None:
    misplaced = Question("misplaced", "?", CONTEXT, "", (GoldAnswer("city", 0),))
    nothing = Question("nothing", "?", "a \u200b b", "", (GoldAnswer("\u200b", 2),))
    empty = Question("empty", "?", "\u200b", "", (GoldAnswer("\u200b", 0),))
    questions = [misplaced, ask("Who?", "city"), nothing, empty]
    [found] = make_windows(questions, small, WindowSizes(128, 8, 8), training=True)
    assert (found.misplaced, found.without_tokens) == (["misplaced"], ["nothing", "empty"])
    assert found.rows["question"].tolist() == [1]
    [found] = make_windows(questions, small, WindowSizes(128, 8, 8), training=False)
    assert (found.misplaced, found.without_tokens) == (["misplaced"], ["nothing", "empty"])
    rows = found.rows
    assert rows["question"].tolist() == [0, 1, 2, 3]  # all of them are to be answered
    assert rows["targets"][[0, 2, 3]].tolist() == [[0, 0]] * 3
    assert rows["length"][3] == 4  # [CLS] ? [SEP] [SEP]


def test_sizes_that_leave_no_room(small: WordPiece) -> None:
    assert WindowSizes(68, 1, 64).problems() == []
    assert WindowSizes(67, 1, 64).problems() == [
        "data.seq_len: 67 leaves no room for a context next to a question of data.question_len = 64 tokens and 3 "
        "control tokens; nearest that would do: data.seq_len = 68, or data.question_len = 63"
    ]
    (problem,) = WindowSizes(67, 1, 64).problems(67)
    assert problem.endswith("do: data.seq_len = 68 and model.seq_len = 68, or data.question_len = 63")
    assert len(WindowSizes(0, -1, 0).problems()) == 3
    with pytest.raises(UserError, match="no room"):
        cut([ask("?", "city")], small, WindowSizes(67, 1, 64))
    long = "who " * 100
    rows = cut([ask(long, "city")], small, WindowSizes(68, 128, 64))
    assert rows["context"].tolist() == [66] * len(rows)
    assert len(rows) > 20  # a token of context each
    assert rows["chosen"].sum() == len(rows)


@pytest.mark.parametrize(("max_length", "stride"), [(384, 128), (128, 64)])
def test_windows_are_those_of_transformers(uncased: WordPiece, data_dir: Path, max_length: int, stride: int) -> None:
    folder = data_dir / "bert-base-uncased"
    reference = BertTokenizerFast(str(folder / "vocab.txt"))
    questions = list(read_questions(data_dir / "squad" / "dev-v1.1.json").questions)
    chosen = [*questions[:300], *sorted(questions, key=lambda question: -len(question.context))[:100]]
    rows = cut(chosen, uncased, WindowSizes(max_length, stride, 64))
    position = 0
    for number, question in enumerate(chosen):
        asked = reference(question.text, add_special_tokens=False)["input_ids"]
        if len(asked) > 64:
            continue
        overlap = max_length - len(asked) - 3 - stride  # what transformers calls stride
        expected = reference(
            question.text,
            question.context,
            truncation="only_second",
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        found = rows[position : position + len(expected["input_ids"])]
        position += len(found)
        assert set(found["question"].tolist()) == {number}
        assert found["tokens"].tolist() == expected["input_ids"]
        assert segments_of(found).tolist() == expected["token_type_ids"]
        assert found["length"].tolist() == np.sum(expected["attention_mask"], 1).tolist()
        for row, offsets in zip(found, np.array(expected["offset_mapping"])):
            inside = slice(row["context"], row["length"] - 1)
            assert row["characters"][inside].tolist() == offsets[inside].tolist()
    assert position == len(rows)


@pytest.mark.slow
def test_the_whole_dev_set(uncased: WordPiece, data_dir: Path) -> None:
    """10,833 windows, as run_squad.py makes; every context token in its best window, once; no answer is cut off."""
    questions = read_questions(data_dir / "squad" / "dev-v1.1.json").questions
    windows = 0
    for found in make_windows(questions, uncased, WindowSizes(), training=False):
        windows += len(found.rows)
        for number in np.unique(found.rows["question"]).tolist():
            mine, question = found.rows[found.rows["question"] == number], questions[number]
            shown = [pair for row in mine for pair in row["characters"][row["chosen"]].tolist()]
            assert sorted(shown) == uncased.pieces([question.context])[0].characters.tolist()
            assert any(row["targets"][0] for row in mine)
    assert windows == 10_833


@pytest.mark.parametrize(
    ("file", "answers", "inside_a_token"), [("dev-v1.1.json", 34_726, 77), ("train-v1.1.part44.json", 11_877, 86)]
)
def test_every_answer_comes_back_from_its_tokens(
    uncased: WordPiece, data_dir: Path, file: str, answers: int, inside_a_token: int
) -> None:
    """But for those that begin or end inside a token ("Japan" in "Japanese", "5" in "50"): they get the whole token."""
    questions = read_questions(data_dir / "squad" / file).questions
    contexts = list({question.context for question in questions})
    pieces = dict(zip(contexts, uncased.pieces(contexts)))
    seen, differing = 0, 0
    for question in questions:
        context = pieces[question.context]
        for answer in question.answers:
            tokens = answer_tokens(context, (answer.start, answer.start + len(answer.text)))
            assert tokens is not None
            begin, end = int(context.characters[tokens[0], 0]), int(context.characters[tokens[1], 1])
            seen += 1
            if normalise(question.context[begin:end]) != normalise(answer.text):
                assert begin < answer.start or end > answer.start + len(answer.text)
                assert answer.text.strip() in question.context[begin:end]
                differing += 1
    assert (seen, differing) == (answers, inside_a_token)


@given(
    text=st.text("the king ran to sea.,é\u0301-9 ", min_size=1, max_size=80),
    begin=st.integers(0, 79),
    length=st.integers(1, 20),
)
def test_targets_cover_the_answer(small: WordPiece, text: str, begin: int, length: int) -> None:
    answer = text[begin : begin + length]
    if not answer.strip():
        return
    question = Question("q", "who?", text, "", (GoldAnswer(answer, begin),))
    [row] = cut([question], small, WindowSizes(256, 128, 64))
    begins, ends = row["characters"].T
    wanted = [
        place
        for place in range(row["context"], row["length"] - 1)
        if begins[place] < begin + len(answer.rstrip()) and ends[place] > begin + len(answer) - len(answer.lstrip())
    ]
    assert row["targets"].tolist() == ([wanted[0], wanted[-1]] if wanted else [0, 0])


def test_windows_that_nobody_can_hold_are_refused(small: WordPiece, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_TOKENS", 1 << 20)
    question = ask("who?", "king", "king " * 4000)
    with pytest.raises(UserError, match=r"data\.stride = 1: a context of 4,000 tokens .* give a larger data\.stride"):
        cut([question], small, WindowSizes(384, 1, 16))
    assert len(cut([question], small, WindowSizes(384, 128, 16))) == 30
