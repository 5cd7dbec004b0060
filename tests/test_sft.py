"""In: prompts and responses. Out: their tokens and samples, runs on several layouts, and what is refused.
Does not test how models compute."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from asked import responses
from forker import Forker
from runs import assert_same, losses, make_project, refused

from codescent.base.errors import UserError
from codescent.data.samples import Numbers
from codescent.record import RunFolder
from codescent.tasks.conversations.dataset import ResponseDataset, ResponseSource, parse_template
from codescent.verbs.cli import run as cli

WORDS = ("red", "green", "blue", "black", "white", "pink")
SFT = (
    "data.task=sft",
    "data.corpus=pairs.jsonl",
    "data.template=Say {prompt}: {response}",
    "model.seq_len=24",
    "train.precision=fp64",
    "train.num_steps=12",
    "train.eval_every=6",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_project(folder)
    lines = [{"prompt": word * (1 + n % 2), "response": word[::-1], "id": n} for n, word in enumerate(WORDS * 8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_only_the_response_is_wanted(tmp_path: Path) -> None:
    corpus = write(tmp_path / "a.jsonl", {"q": "ab", "a": "cd"}, {"q": "", "a": "é"}, {"q": "x" * 30, "a": "y"})
    request = responses(
        corpus,
        "byte",
        template="<{prompt}|{response}>",
        prompt_key="q",
        response_key="a",
        validation_fraction=0.3,
    )
    dataset = ResponseDataset.open(request.prepare(tmp_path / "datasets"))
    assert request.prepare(tmp_path / "datasets") == dataset.path
    source = dataset.source("train", 8, 8)
    assert (source.num_samples, source.left_out) == (2, 0)
    samples = source.read(np.array([0, 1]))
    text = [bytes(row[: int(length)].tolist()) for row, length in zip(samples.inputs, samples.extras["lengths_B"])]
    assert text == [b"<ab|cd>", "<|é>".encode()]
    end = 256
    assert samples.targets.tolist() == [
        [-1, -1, -1, *b"cd>", end, -1],
        [-1, *"é>".encode(), end, -1, -1, -1],
    ]
    assert source.losses(np.array([0, 1])).tolist() == [(row >= 0).sum() for row in samples.targets]
    validation = dataset.source("validation", 8, 8)
    assert (validation.num_samples, validation.left_out) == (0, 1)  # its prompt fills the sample
    assert dataset.source("validation", 40, 40).num_samples == 1


def test_a_long_response_is_cut_where_the_sample_ends() -> None:
    tokens = np.arange(20)
    source = ResponseSource("train", tokens, np.array([0, 20]), np.array([[3, 20]]), 5)
    numbers: Numbers = np.array([0])
    samples = source.read(numbers)
    assert samples.inputs.tolist() == [[0, 1, 2, 3, 4]]
    assert samples.targets.tolist() == [[-1, -1, 3, 4, 5]]
    assert source.losses(numbers).tolist() == [3]
    with pytest.raises(IndexError):
        source.read(np.array([1]))


def test_the_loss_is_the_mean_of_the_steps_response_tokens(project: Path, forker: Forker) -> None:
    """Micro-batches of one sample have other numbers of them, and the same losses come out."""
    alone = forker.train(project, "whole", 1, *SFT)
    assert_same(forker.train(project, "one-by-one", 1, *SFT, "train.microbatch_size=1"), alone, 1e-9)
    resumed = (*SFT, "optimizer.decay_steps=12")
    forker.train(project, "resumed", 1, *resumed, "train.num_steps=5")
    assert losses(forker.train(project, "resumed", 1, *resumed, resume=True)) == losses(alone)


def test_it_learns_to_answer(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    words = [*SFT, "train.precision=fp32", "train.num_steps=150", "model.hidden_dim=32", "optimizer.learning_rate=2e-2"]
    run = forker.train(project, "learned", 1, *words, "train.eval_every=150")
    assert cli(["evaluate", "runs/learned"]) == 0
    said = capsys.readouterr().out
    assert float(re.search(r"loss ([\d.]+)", said)[1]) == pytest.approx(run.read_metrics()[-1]["val_loss"], abs=1e-3)
    assert cli(["sample", "runs/learned", "--prompt", "Say blue: ", "--tokens", "6", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip().startswith("Say blue: eulb")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data.template=no places",), "data.template: 'no places' must hold {prompt}"),
        (("data.template={response}{prompt}",), "must hold {prompt}"),
        (("data.tokenizer=char",), 'data.tokenizer = "char": it is built from a corpus of text'),
        (("data.tokenizer=bpe:300",), 'data.tokenizer = "bpe:300"'),
        (("data.corpus=absent.jsonl",), "absent.jsonl: cannot be read"),
        (("data.corpus=bad.jsonl",), "bad.jsonl:2: not JSON"),
        (("data.corpus=bad.jsonl",), 'bad.jsonl:3: no text under "prompt" (it has: response)'),
        (("data.corpus=bad.jsonl",), "bad.jsonl:4: the response is empty"),
        (("data.corpus=bad.jsonl",), "bad.jsonl:5: a JSON object is needed, found list"),
        (("data.corpus=bad.jsonl",), 'bad.jsonl:6: "prompt" is list, not text (it has: prompt)'),
        (("data.prompt_key=question",), 'no text under "question"'),
        (("model.kind=bert",), "is trained for mlm or qa"),
        (("train.compile=model",), 'take train.compile = "blocks"'),
        (("train.global_batch_size=64",), "fewer than train.global_batch_size = 64"),
    ],
)
def test_what_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    lines = (
        {"prompt": "a", "response": "b"},
        "{",
        {"response": "b"},
        {"prompt": "", "response": ""},
        [1],
        {"prompt": []},
    )
    write(project / "bad.jsonl", *lines)
    assert expected in refused(project, capsys, *SFT, *words)


def test_a_resume_with_another_template_is_refused_by_its_key(
    project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    run = forker.train(project, "template", 1, *SFT, "train.num_steps=2")
    assert cli(["train", "run.toml", "run.name=template", *SFT, "data.template={prompt} {response}", "--resume"]) == 2
    assert "data.template: the run in" in capsys.readouterr().err
    assert len(losses(RunFolder.open(run.path))) == 2


def test_templates() -> None:
    assert parse_template("a{prompt}b{response}c") == ("a", "b", "c")
    for wrong in ("{prompt}", "{prompt}{prompt}{response}", "{response}"):
        with pytest.raises(UserError, match="must hold"):
            parse_template(wrong)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    corpus = write(tmp_path / "a.jsonl", *({"prompt": "p", "response": f"r{n}"} for n in range(5)))
    folder = responses(corpus, "byte").prepare(tmp_path / "datasets")
    with (folder / "train_tokens.npy").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(UserError, match="changed"):
        ResponseDataset.open(folder)
    with pytest.raises(UserError, match="changed"):
        responses(str(folder), "byte").locate(tmp_path)
    (folder / "description.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        ResponseDataset.open(folder)
