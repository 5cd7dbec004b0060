"""In: questions, masked text, plain text. Out: runs of each task on several layouts, and `codescent evaluate` of them.
Does not test how samples are made or models compute: the tests of those rooms do."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from forker import Forker
from questions import vocabulary
from runs import called, codescent, losses, make_project, refused
from trajectories import towns

from codescent.build import task_request
from codescent.config.load import load
from codescent.record import RunFolder
from codescent.tasks import prepare
from codescent.verbs.cli import run as cli

BERT = (
    "model.kind=bert",
    "model.num_layers=3",
    "model.num_heads=2",
    "model.hidden_dim=16",
    "model.dropout=0.1",
    "train.precision=fp64",
    "train.num_steps=12",
    "train.eval_every=6",
    "data.tokenizer=bert:vocab.txt",
)
MASKED = (*BERT, "model.seq_len=16")
ASKED = (
    *BERT,
    "data.task=qa",
    "data.corpus=train.json",
    "data.validation=dev.json",
    "model.seq_len=48",
    "data.seq_len=40",
    "data.stride=8",
    "data.question_len=12",
)
SIZES = ("model.num_layers=auto", "model.seq_len=auto", "model.num_encoder_layers=1", "model.num_decoder_layers=1")
SIZES += ("model.source_len=2", "model.target_len=3")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    make_project(folder)
    vocabulary(folder)
    (folder / "train.json").write_text(json.dumps(towns(0, 24)))
    (folder / "dev.json").write_text(json.dumps(towns(24, 6)))
    return folder


def test_answers_are_written_and_scored(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that knows 24 answers by heart: of the questions it was trained on, by --data; of others fewer."""
    monkeypatch.chdir(project)
    words = (*ASKED, "model.dropout=0", "model.hidden_dim=32", "train.num_steps=120", "train.eval_every=60")
    run = forker.train(project, "heart", 1, *words, "optimizer.learning_rate=5e-3", "train.precision=fp32")
    assert cli(["evaluate", "runs/heart", "--data", "train.json", "--out", "answers.json"]) == 0
    said = capsys.readouterr().out
    assert "runs/heart, step 120" in said
    assert float(re.search(r"exact match ([\d.]+) %", said)[1]) > 90
    answers = json.loads((project / "answers.json").read_text())
    assert sorted(answers) == sorted(f"q{number}" for number in range(24))
    assert cli(["evaluate", "--predictions", "answers.json", "--data", "train.json"]) == 0
    assert capsys.readouterr().out.splitlines() == said.splitlines()[1:3]
    assert cli(["evaluate", "runs/heart", "--best"]) == 0
    assert sorted(json.loads((run.path / "predictions.json").read_text())) == sorted(f"q{n}" for n in range(24, 30))


def test_text_is_scored_in_bits_per_byte(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    run = forker.train(project, "text", 1, "train.eval_every=20")
    assert cli(["evaluate", "runs/text"]) == 0
    said = capsys.readouterr().out
    loss, perplexity, bits = (
        float(re.search(f"{name} ([\\d.]+)", said)[1])
        if name != "bits"
        else float(re.search(r"([\d.]+) bits", said)[1])
        for name in ("loss", "perplexity", "bits")
    )
    # One token is one byte here; the validation of the run leaves out the last piece of a sample.
    assert loss == pytest.approx(run.read_metrics()[-1]["val_loss"], rel=0.02)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert bits == pytest.approx(loss / math.log(2), rel=1e-3)
    text = "many workers: one déscent 🌍\n"
    (project / "own.txt").write_text(text)
    assert cli(["evaluate", "runs/text", "--data", "own.txt"]) == 0
    size = len(text.encode())
    assert f"own.txt: {size} tokens, {size} bytes, in windows of 16" in capsys.readouterr().out


def test_masked_text_is_scored_as_it_was_validated(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    run = forker.train(project, "masks", 1, *MASKED)
    assert cli(["evaluate", "runs/masks"]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"loss ([\d.]+)", said)[1]) == pytest.approx(run.read_metrics()[-1]["val_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "give a RUN, or --predictions FILE with --data FILE"),
        (("runs/refused", "--predictions", "answers.json"), "give a RUN, or --predictions"),
        (("--predictions", "answers.json"), "--data dev-v1.1.json"),
        (("runs/nowhere",), "no such run folder"),
        (("runs/refused", "--step", "7"), "step 7"),
        (("runs/refused", "--out", "x.json"), 'data.task is "lm"'),
        (("runs/refused", "--data", "absent.txt"), "absent.txt"),
        (("runs/refused", "--device", "cuda"), "no CUDA device"),
        (("--predictions", "answers.json", "--data", "train.json", "--best"), "--best: needs a RUN"),
    ],
)
def test_what_evaluate_refuses(
    project: Path,
    forker: Forker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.chdir(project)
    if not (project / "runs" / "refused").is_dir():
        forker.train(project, "refused", 1, "train.num_steps=2")
    assert cli(["evaluate", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("data.task=qa",),
            'model.kind = "gpt2" is trained for lm or sft or dpo or grpo; take that, or model.kind = bert',
        ),
        ((*BERT, "data.task=lm", "model.seq_len=16"), 'model.kind = "bert" is trained for mlm or qa'),
        ((*MASKED, "data.tokenizer=byte"), "masked language modelling needs a tokenizer with"),
        ((*ASKED, "data.seq_len=10"), "leaves no room for a context"),
        ((*ASKED, "data.corpus=absent.json"), "absent.json"),
        ((*ASKED, "data.validation=auto"), "name a validation file"),
        ((*ASKED, "data.tokenizer=char"), "char"),
        (("model.kind=transformer", "data.corpus=synthetic:30", *SIZES), 'give model.embedding = "none"'),
        ((*MASKED, "parallel.cp=2", "parallel.ranks=2"), "parallel.cp = 2"),
    ],
)
def test_what_does_not_go_together(
    project: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    told = refused(project, capsys, *words)
    assert expected in told
    assert all(line.startswith("error: ") or " has no effect: " in line for line in told.splitlines())


@pytest.mark.parametrize("words", [MASKED, ASKED], ids=["mlm", "qa"])
def test_a_resumed_run_is_the_same_bitwise(project: Path, forker: Forker, words: tuple[str, ...]) -> None:
    name, words = f"resumed-{len(words)}", (*words, "optimizer.decay_steps=12")
    expected = forker.train(project, f"{name}-whole", 1, *words)
    forker.train(project, name, 1, *words, "train.num_steps=5")
    assert losses(forker.train(project, name, 1, *words, resume=True)) == losses(expected)


def test_other_windows_are_another_trajectory(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    forker.train(project, "windows", 1, *ASKED, "train.num_steps=2")
    others = ("data.stride=4", "data.question_len=10", "data.train_questions=20")
    assert cli(["train", "run.toml", "run.name=windows", *ASKED, *others, "--resume"]) == 2
    told = capsys.readouterr().err
    for key in others:
        assert f"{key.split('=')[0]}: the run in" in told


def test_prepared_questions_are_their_own_corpus(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    first = forker.train(project, "from-files", 1, *ASKED, "train.num_steps=2")
    folder = prepare(task_request(load(str(first.path / "config.toml")).config), progress=False)
    words = [word for word in ASKED if not word.startswith(("data.task", "data.corpus", "data.validation"))]
    again = forker.train(project, "from-folder", 1, *words, f"data.corpus={folder}", "train.num_steps=2")
    assert losses(again) == losses(first)
    assert cli(["data", str(folder), "--verify"]) == 0
    assert "24 questions" in capsys.readouterr().out


def test_nothing_to_validate_with_is_told(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    (project / "blank.txt").write_text("some words of a line\n" * 40 + "\n" * 300)
    words = ("model.kind=transformer", *SIZES, "data.task=seq2seq", "data.corpus=blank.txt", "train.eval_every=0")
    forker.train(project, "blank", 1, *words, "train.num_steps=2")
    assert cli(["evaluate", "runs/blank"]) == 2
    assert "the validation split has no sample" in capsys.readouterr().err


def test_vectors_are_scored_as_they_were_validated(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    words = ("model.kind=transformer", *SIZES, "model.embedding=none", "data.corpus=synthetic:30", "train.num_steps=4")
    run = forker.train(project, "vectors", 1, *words, "train.eval_every=4")
    assert cli(["evaluate", "runs/vectors"]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"loss ([\d.]+)", said)[1]) == pytest.approx(run.read_metrics()[-1]["val_loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_small_bert_learns_200_questions_by_heart(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real SQuAD: exact match above 90 % after some minutes on one core."""
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    make_project(tmp_path)
    rows = data_dir / "squad" / "train-v1.1.part44.json"
    words = (
        "model.kind=bert",
        "model.num_heads=4",
        "model.hidden_dim=128",
        "model.seq_len=256",
        f"data.corpus={rows}",
        f"data.validation={rows}",
        "data.task=qa",
        "data.tokenizer=bert",
        "data.train_questions=200",
        "data.validation_questions=200",
        "train.global_batch_size=16",
        "train.num_steps=500",
        "train.eval_every=0",
        "optimizer.learning_rate=1e-3",
        "optimizer.warmup_steps=50",
        "train.matmul=auto",
    )
    done = codescent(tmp_path, "train", "run.toml", "run.name=squad", *words)
    assert done.returncode == 0, done.stderr
    done = called(tmp_path, "evaluate", "runs/squad")
    assert float(re.search(r"exact match ([\d.]+) %", done.stdout)[1]) > 90, done.stdout + done.stderr
    assert RunFolder.open(tmp_path / "runs" / "squad").read_metrics()[-1]["step"] == 500
