"""In: corpora, kinds of models, data.task or none. Out: the task that a run has, and what is said about it.
Does not test what the tasks do."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest
from forker import Forker
from questions import CONTEXT, question, squad, vocabulary
from questions import files as squad_files
from runs import called, make_project
from trajectories import towns

from codescent.base.errors import UserError
from codescent.build import task_request
from codescent.config.load import load
from codescent.config.sections import Data
from codescent.data.text.records import Reading
from codescent.data.text.sources import read_blocks
from codescent.preflight import notes
from codescent.tasks import refusals
from codescent.tasks.answers.squad import has_questions, read_questions
from codescent.tasks.conversations.conversations import PAIR, first_kind, read_conversations
from codescent.verbs.cli import run as cli

BERT = ("model.kind=bert", "data.tokenizer=bert:vocab.txt", "model.seq_len=48", "data.seq_len=40")
QUESTIONS = ("data.corpus=train.json", "data.validation=dev.json", "data.stride=8", "data.question_len=12")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice")
    make_project(folder)
    vocabulary(folder)
    (folder / "train.json").write_text(json.dumps(towns(0, 24)))
    (folder / "dev.json").write_text(json.dumps(towns(24, 6)))
    return folder


@pytest.mark.parametrize("name", ["dev-v1.1.json", "train-v1.1.part44.json"])
def test_squads_own_files_have_its_form(name: str, data_dir: Path) -> None:
    assert has_questions(data_dir / "squad" / name)


LONG = "The king was born. " * 40_000
TEXTS = {
    "written by hand": (json.dumps(squad((CONTEXT, [question("1", "Who?", "The king")])), indent=2), True),
    "the questions before their context": (
        '{"data": [{"paragraphs": [{"qas": [{"id": "1"}], "context": "a"}]}]}',
        True,
    ),
    "a long context": (json.dumps(squad((LONG, [question("1", "Who?", "The king", context=LONG)]))), True),
    "after a byte order mark": ("\ufeff" + json.dumps(towns(0, 1)), True),
    "a list": ("[" + json.dumps(towns(0, 1)) + "]", False),
    "another object": ('{"data": [{"title": "a", "paragraphs": 3, "qas": [{}]}]}', False),
    "text that quotes it": ("SQuAD is " + json.dumps(towns(0, 1)), False),
    "many data": ('{"data": [{' * 90_000, False),
    "nothing": ("", False),
    "white space": (" \n" * 9000, False),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_form_is_seen_in_the_text(name: str, tmp_path: Path) -> None:
    text, expected = TEXTS[name]
    path = tmp_path / "questions.json"
    path.write_text(text, encoding="utf-8")
    (tmp_path / "questions.json.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    assert has_questions(path) == has_questions(tmp_path / "questions.json.gz") == expected


@pytest.mark.timeout(20)
def test_only_the_beginning_is_read(tmp_path: Path) -> None:
    for name, text in (("questions", json.dumps(towns(0, 1))), ("object", '{"a": "'), ("bytes", "\udcff")):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        os.truncate(path, 10 << 30)  # a sparse file
        assert has_questions(path) == (name == "questions")
    assert not has_questions(tmp_path)
    assert not has_questions(tmp_path / "absent")


def test_a_bert_is_trained_on_questions(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for words in ((*BERT, *QUESTIONS), (*BERT, "data.corpus=train.json")):
        assert task_request(load("run.toml", words).config).data.task == "qa"
    assert task_request(load("run.toml", BERT).config).data.task == "mlm"
    Path("inner.toml").write_text('base = "bert_squad"\n[data]\ncorpus = "corpus.txt"\n')
    for name, words in (("bert_squad", ("data.corpus=train.json",)), ("inner.toml", ())):
        assert load(name, words).config.data.task == "qa"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "transformer"])
def test_other_models_are_not_trained_on_questions_unasked(
    kind: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    words = (f"model.kind={kind}", "data.corpus=train.json")
    with pytest.raises(UserError) as told:
        task_request(load("run.toml", words).config)
    assert str(told.value).startswith(
        'data.task = "qa", chosen for data.corpus = train.json (questions in SQuAD\'s form): model.kind = '
        f'"{kind}" is trained for lm or '
    )
    assert str(told.value).endswith('take model.kind = bert, or another corpus, or data.task = "lm" to read it as text')
    loaded = load("run.toml", (*words, "data.task=lm"))
    assert task_request(loaded.config).data.task == "lm"
    (note,) = notes(loaded)
    assert note.startswith(
        'data.task = "lm": data.corpus = train.json holds questions in SQuAD\'s form, and is read as'
    )


def test_questions_beside_a_text_are_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the validation file of a text, and in a folder of texts."""
    monkeypatch.chdir(project)
    text = next(path for path in project.iterdir() if path.suffix == ".txt")
    words = [f"data.corpus={text}", "data.validation=dev.json"]
    (refused,) = refusals(task_request(load("run.toml", words).config))
    assert refused.startswith(
        'data.task = "lm": data.validation = dev.json holds questions in SQuAD\'s form; data.task'
    )
    assert refused.endswith("to read it as plain text, give data.as_text = true (`codescent data`: --as-text)")
    (note,) = notes(load("run.toml", [*words, "data.as_text=true"]))
    assert note.startswith('data.task = "lm": data.validation = dev.json holds questions in SQuAD\'s form, and is read')
    folder = project / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(text.read_bytes())
    assert notes(load("run.toml", ["data.corpus=texts"])) == []
    (folder / "dev.json").write_bytes((project / "dev.json").read_bytes())
    (refused,) = refusals(task_request(load("run.toml", ["data.corpus=texts"]).config))
    assert "data.corpus = texts has a file texts/dev.json, which holds questions in SQuAD's form; " in refused
    (note,) = notes(load("run.toml", ["data.corpus=texts", "data.as_text=true"]))
    assert "data.corpus = texts has a file texts/dev.json, which holds questions in SQuAD's form, and is read" in note
    done = called(project, "data", "texts")
    assert (done.returncode, done.stderr.startswith("error: texts/dev.json: holds questions")) == (2, True)


def test_questions_are_not_prepared_as_text_unasked(project: Path) -> None:
    done = called(project, "data", "train.json")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: train.json: holds questions in SQuAD's form, and without a config this command prepares text; "
        'data.task = "qa" (model.kind = bert) reads them: `codescent data CONFIG` prepares them for the run of a config'
    )
    assert not (project / "datasets").exists()
    (project / "dev.json.gz").write_bytes(gzip.compress((project / "dev.json").read_bytes()))
    assert "holds questions in SQuAD's form" in called(project, "data", "dev.json.gz").stderr
    done = called(project, "data", "dev.json.gz", "--as-text", "--folder", "as_text")
    assert done.returncode == 0, done.stderr
    for number in ("9" * 5000, "9" * 400):
        done = called(project, "data", "--synthetic", number)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    done = called(project, "data", "--synthetic", "4", "--as-text")
    assert (done.returncode, done.stderr) == (2, "error: --as-text: for text only, not for tensors; leave it out\n")


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".GZ": gzip.compress}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_questions_and_conversations_are_read(suffix: str, tmp_path: Path) -> None:
    text = json.dumps(towns(0, 3)).encode()
    (tmp_path / "plain.json").write_bytes(text)
    packed = tmp_path / f"packed.json{suffix}"
    packed.write_bytes(PACKERS[suffix](text))
    assert has_questions(packed)
    found = read_questions(packed)
    assert found.questions == read_questions(tmp_path / "plain.json").questions
    assert found.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()
    pairs = tmp_path / f"pairs.jsonl{suffix}"
    pairs.write_bytes(PACKERS[suffix](b'{"prompt": "a", "response": "b"}\n' * 2))
    data = Data(corpus=str(pairs))
    assert first_kind(pairs, data, with_template=False) == PAIR
    assert [one.messages[1]["content"] for one in read_conversations(pairs, data, with_template=False)] == ["b", "b"]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(UserError, match="damaged or cut short"):
        read_questions(packed)
    assert not has_questions(packed)


def test_archives_and_other_compression_are_refused_with_what_to_do(tmp_path: Path) -> None:
    text = json.dumps(towns(0, 1)).encode()
    (tmp_path / "inner.json").write_bytes(text)
    with tarfile.open(tmp_path / "q.json.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "inner.json", "inner.json")
    (tmp_path / "q.json.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(200))
    (tmp_path / "q.json").write_bytes(gzip.compress(text))
    assert len(read_questions(tmp_path / "q.json").questions) > 0
    for name, told in (
        ("q.json.tar.gz", "q.json.tar.gz: an archive of files: unpack it, and give one of the files"),
        ("q.json.7z", "q.json.7z: is a 7-Zip archive: unpack it"),
    ):
        with pytest.raises(UserError) as found:
            read_questions(tmp_path / name)
        assert str(found.value).endswith(told)
    with pytest.raises(UserError, match=r"is a 7-Zip archive: unpack it$"):
        list(read_blocks(tmp_path / "q.json.7z", Reading("text")))


def test_a_plan_names_the_task(project: Path) -> None:
    done = called(project, "plan", "run.toml", *BERT, *QUESTIONS)
    assert done.returncode == 0, done.stderr
    rows = " ".join(done.stdout.split())
    assert (
        "task qa: find the answer to a question in its context; corpus train.json, validated on dev.json; model bert"
    ) in rows
    done = called(project, "plan", "run.toml", *BERT, "data.corpus=train.json", "data.task=mlm")
    assert "task mlm: predict masked tokens; corpus train.json; model bert" in " ".join(done.stdout.split())
    assert "and is read as text" in done.stderr
    done = called(project, "plan", "run.toml", "data.corpus=[bold]corpus[a-z].txt")
    assert "corpus [bold]corpus[a-z].txt; model gpt2" in " ".join(done.stdout.split())


def test_a_run_names_its_task_and_keeps_it(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    (project / "gone.json").write_bytes((project / "train.json").read_bytes())
    steps = ("train.num_steps=2", "train.eval_every=0", "run.name=kept")
    done = forker.run(project, 1, [*BERT, *QUESTIONS, "data.corpus=gone.json", *steps])
    assert done.codes == [0]
    assert done.said.splitlines()[0].startswith(
        "task    qa: find the answer to a question in its context; corpus gone.json"
    )
    (project / "gone.json").unlink()
    assert cli(["evaluate", "runs/kept", "--data", "dev.json"]) == 0
    assert "exact match" in capsys.readouterr().out


def test_windows_that_do_not_overlap_are_said(tmp_path: Path) -> None:
    """Of SQuAD's questions 5 % had no window with a right answer, at 128 tokens."""
    make_project(tmp_path)
    squad_files(tmp_path)
    vocabulary(tmp_path)
    words = ("model.kind=bert", "data.task=qa", "data.corpus=train.json", "data.validation=dev.json")
    words += ("data.tokenizer=bert:vocab.txt", "model.seq_len=64", "data.question_len=16")
    said = "a window has 45 tokens of a context beside the longest question"
    for stride, told in ((45, True), (44, False)):
        done = called(tmp_path, "plan", "run.toml", *words, f"data.stride={stride}")
        assert done.returncode == 0, done.stderr
        assert (said in done.stderr) == told
