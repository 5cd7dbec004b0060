"""In: files of SQuAD's form. Out: that their windows on disk are complete or absent, the same for all, and samples.
Does not check how windows are cut (test_data_windows.py does)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from asked import Asked, questions
from disks import small_disk
from questions import files, vocabulary

from codescent.base.errors import UserError
from codescent.data.prepared import DESCRIPTION
from codescent.data.text import download
from codescent.data.tokenizers.tokenizer import load
from codescent.data.tokenizers.wordpiece import WordPiece, bert
from codescent.tasks.answers.source import QuestionDataset
from codescent.tasks.answers.squad import read_questions

SIZES = {"seq_len": 64, "stride": 16, "question_len": 16}


@pytest.fixture
def request_(tmp_path: Path) -> Asked:
    train, dev = files(tmp_path)
    return questions(str(train), validation=str(dev), tokenizer=f"bert:{vocabulary(tmp_path)}", **SIZES)


def refusal(request: Asked, root: Path) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        request.prepare(root)
    assert not root.exists() or not [path for path in root.iterdir() if path.name.startswith(".")]
    return caught.value.problems


def test_samples_are_what_was_cut(tmp_path: Path, request_: Asked) -> None:
    dataset = QuestionDataset.open(request_.prepare(tmp_path / "datasets"))
    assert (dataset.seq_len, dataset.vocab_size) == (64, bert(str(request_.request.data.tokenizer)).vocab_size)
    assert (dataset.train.name, dataset.validation.name) == ("train", "validation")
    assert dataset.source("train", 64, 64) is dataset.train
    assert dataset.source("validation", 64, 64) is dataset.validation
    with pytest.raises(UserError, match=r"windows have 64 positions, data\.seq_len is 65"):
        dataset.source("train", 65, 65)
    assert dataset.train.num_samples == 3
    assert dataset.validation.num_samples > 5
    assert dataset.train.losses_per_sample == 1
    assert dataset.train.losses(np.arange(3)).tolist() == [1, 1, 1]
    samples = dataset.train.read(np.array([2, 0]))
    assert samples.inputs.shape == (2, 64)
    assert samples.targets.shape == (2, 2)
    assert {array.dtype for array in (samples.inputs, samples.targets, *samples.extras.values())} == {np.dtype("int64")}
    tokenizer = load(dataset.path / "tokenizer.json")
    for row, targets, length, segments in zip(
        samples.inputs, samples.targets, samples.extras["lengths_B"], samples.extras["segments_BT"]
    ):
        assert row[length - 1] == tokenizer.separator
        assert (row[length:] == 0).all()
        assert segments[targets[0]] == segments[length - 1] == 1
        assert segments[length:].sum() == 0
    start, end = samples.targets[1]
    assert tokenizer.decode(samples.inputs[1, start : end + 1].tolist()) == "the king"
    assert dataset.tokenizer_text == (dataset.path / "tokenizer.json").read_text()
    assert [question.id for question in dataset.questions().questions] == ["v1", "v2", "t1"]
    assert dataset.train.read(np.empty(0, np.int64)).inputs.shape == (0, 64)
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match=r"train split lie in \[0, 3\)"):
            dataset.train.read(np.array([wrong]))


def test_what_is_there_is_found_and_another_request_gets_another_folder(tmp_path: Path, request_: Asked) -> None:
    root = tmp_path / "datasets"
    assert request_.locate(root) is None
    made = request_.prepare(root)
    assert request_.locate(root) == request_.prepare(root) == made
    assert questions(str(made)).prepare(root) == questions(str(made)).locate(root) == made
    assert QuestionDataset.is_at(str(made))
    fingerprint = QuestionDataset.open(made).fingerprint
    others = [
        request_.changed(train_questions=2),
        request_.changed(validation_questions=1),
        request_.changed(stride=17),
        request_.changed(tokenizer=request_.request.data.tokenizer.replace("bert:", "bert-cased:")),
        request_.changed(tokenizer=str(made / "tokenizer.json")),
    ]
    folders = [other.prepare(root) for other in others]
    assert len({made, *folders}) == 6
    assert QuestionDataset.open(folders[-1]).fingerprint == fingerprint  # the same windows
    assert len({QuestionDataset.open(folder).fingerprint for folder in folders}) == 5
    few = QuestionDataset.open(folders[0])
    assert few.description["splits"]["train"]["questions"] == 2
    Path(request_.request.data.corpus).write_text(
        Path(request_.request.data.corpus).read_text().replace("Where?", "Where is it?")
    )
    assert request_.locate(root) is None
    assert request_.prepare(root) not in {made, *folders}


def test_nothing_of_the_folder_depends_on_where_it_was_made(tmp_path: Path, request_: Asked) -> None:
    made = [request_.prepare(tmp_path / name) for name in ("a", "b")]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in made]
    assert contents[0] == contents[1]
    assert {path.parent for path in made} == {tmp_path / "a", tmp_path / "b"}
    assert not list((tmp_path / "a").glob(".*"))


def test_two_processes_at_once_make_one_dataset(tmp_path: Path, request_: Asked) -> None:
    program = (
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(Path(__file__).parent)!r})\n"
        "from asked import questions\n"
        "train, dev, tokenizer, root = sys.argv[1:]\n"
        "sizes = {'seq_len': 64, 'stride': 16, 'question_len': 16}\n"
        "request = questions(train, validation=dev, tokenizer=tokenizer, **sizes)\n"
        "print(request.prepare(Path(root)))"
    )
    data = request_.request.data
    words = [data.corpus, str(data.validation), data.tokenizer, str(tmp_path / "datasets")]
    command = [sys.executable, "-c", program, *words]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(set(told)) == 1
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == [Path(told[0].strip()).name]
    QuestionDataset.open(Path(told[0].strip()))


def test_what_a_killed_preparation_leaves_is_made_anew(
    tmp_path: Path, request_: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "datasets"
    with monkeypatch.context() as patch:
        patch.setattr("codescent.data.prepared.write_sealed", lambda *_: os._exit(9))
        child = os.fork()
        if child == 0:
            request_.prepare(root)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.name[:9] for path in root.iterdir()] == [".partial-"]
    assert request_.locate(root) is None
    assert QuestionDataset.open(request_.prepare(root)).train.num_samples == 3
    assert not list(root.glob(".*"))


def test_damage_is_found_when_it_is_opened(tmp_path: Path, request_: Asked) -> None:
    made = request_.prepare(tmp_path / "datasets")
    data = (made / "train.npy").read_bytes()
    (made / "train.npy").write_bytes(data[:-1])
    (made / "validation.json").unlink()
    with pytest.raises(UserError) as caught:
        request_.prepare(tmp_path / "datasets")
    assert [problem.split(": ")[1] for problem in caught.value.problems] == [
        "changed",
        "cannot be read",
        "damaged",
    ]
    for content, told in (("{", "not JSON"), ('{"format": "codescent questions 1"}', "request: Field required")):
        (made / DESCRIPTION).write_text(content)
        with pytest.raises(UserError, match=told):
            QuestionDataset.open(made)
    with pytest.raises(UserError, match="cannot be read"):
        QuestionDataset.open(tmp_path)


def test_every_problem_of_a_request_is_told_at_once(tmp_path: Path, request_: Asked) -> None:
    wrong = questions("none.json", tokenizer="gpt2", seq_len=4, stride=1, question_len=1)
    assert refusal(wrong, tmp_path / "datasets") == (
        "data.seq_len: 4 leaves no room for a context next to a question of data.question_len = 1 tokens and 3 control "
        "tokens; nearest that would do: data.seq_len = 5",
        "none.json: cannot be read: No such file or directory: the train questions",
        "none.json: name a validation file too (data.validation), such as SQuAD's dev-v1.1.json",
        "tokenizer gpt2: questions need a WordPiece tokenizer: bert, bert-cased, bert:FILE, bert-cased:FILE, or a JSON "
        "file of a WordPiece tokenizer with [PAD], [UNK], [CLS], [SEP], [MASK]",
    )
    Path(request_.request.data.corpus).write_text('{"version": "1.1", "data": [')
    assert "not JSON" in refusal(request_, tmp_path / "datasets")[0]


def test_training_needs_an_answer_that_is_there(
    tmp_path: Path, request_: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(Path(request_.request.data.corpus).read_text())
    asked = value["data"][0]["paragraphs"][0]["qas"]
    asked[0]["answers"][0]["answer_start"] += 1
    Path(request_.request.data.corpus).write_text(json.dumps(value))
    dev = Path(str(request_.request.data.validation))
    dev.write_text(dev.read_text().replace('"text": "1807"', '"text": "1808"'))
    made = request_.prepare(tmp_path / "datasets")
    rest = f"; the whole list is in {made / DESCRIPTION}"
    assert capsys.readouterr().err.splitlines() == [
        f"train: 1 question with an answer not at its answer_start: left out: t1{rest}",
        f"validation: 1 question with an answer not at its answer_start: no target: v1{rest}",
    ]
    summary = QuestionDataset.open(made).summary()
    assert "train: 3 questions, 2 windows, 2 with the answer" in summary
    assert "train: 1 question with an answer not at its answer_start: left out: t1" in summary
    for question in asked:
        question["answers"][0]["answer_start"] = 0
        question["answers"][0]["text"] = "nowhere"
    Path(request_.request.data.corpus).write_text(json.dumps(value))
    assert "nothing to train on" in refusal(request_, tmp_path / "datasets")[0]


def test_a_full_disk_leaves_nothing(tmp_path: Path, request_: Asked) -> None:
    with small_disk(tmp_path / "disk", 16384) as disk:
        with pytest.raises(UserError, match="no space left on the disk"):
            request_.prepare(disk)
        assert list(disk.iterdir()) == []


def test_squad_is_the_published_one(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    key = questions().key()
    assert (key["train"], key["validation"]) == (download.SQUAD_TRAIN.sha256, download.SQUAD_DEV.sha256)
    assert key["tokenizer"] == "bert"
    if not (data_dir / "squad" / "train-v1.1.json").is_file():
        assert "$CODESCENT_DATA_DIR/squad/train-v1.1.json" in refusal(questions(), tmp_path / "datasets")[0]


def test_a_course_run_on_real_questions(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 training and 500 validation questions of the real files."""
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    train, dev = data_dir / "squad" / "train-v1.1.part44.json", data_dir / "squad" / "dev-v1.1.json"
    request = questions(str(train), validation=str(dev), train_questions=1000, validation_questions=500)
    dataset = QuestionDataset.open(request.prepare(tmp_path))
    assert dataset.description["splits"]["train"]["questions"] == 1000
    assert dataset.questions().questions == read_questions(dev, 500).questions
    tokenizer = load(dataset.path / "tokenizer.json")
    assert isinstance(tokenizer, WordPiece)
    source, numbers = dataset.train, np.arange(dataset.train.num_samples)
    samples = source.read(numbers)
    assert samples.inputs.shape[1] == 384
    assert (samples.inputs[:, 0] == tokenizer.begin).all()
    assert (samples.inputs == tokenizer.end).sum(1).tolist() == [2] * len(numbers)
    assert ((samples.inputs != tokenizer.pad).sum(1) == samples.extras["lengths_B"]).all()
