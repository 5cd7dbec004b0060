"""In: runs of an encoder-decoder on pairs of lines. Out: a resumed run is the same bitwise; the accuracy of a run.
Does not look at samples (test_data_lines) or the head (test_models_translate); layouts are in test_trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forker import Forker, Runs
from runs import losses, make_project

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.inference.trained import dataset_of, find, module_of
from codescent.record import RunFolder
from codescent.tasks.pairs.evaluate import LineScore, score_lines
from codescent.verbs.cli import run as cli

SIZES = (
    "model.kind=transformer",
    "model.num_layers=auto",
    "model.seq_len=auto",
    "model.num_encoder_layers=2",
    "model.num_decoder_layers=2",
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.source_len=12",
    "model.target_len=14",
    "model.dropout=0.1",
    "data.task=seq2seq",
    "data.corpus=lines.txt",
    "data.tokenizer=char",
    "train.precision=fp64",
    "train.global_batch_size=12",
    "train.eval_every=3",
    "optimizer.decay_steps=20",
    "optimizer.max_grad_norm=0.1",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("pairs_runs")
    make_project(project)
    text = (project / "corpus.txt").read_text().replace(" ", "\n", 700)  # lines of very different lengths
    (project / "lines.txt").write_text(text)
    return Runs(project, forker, SIZES, ("train.num_steps=6",))


def test_a_resumed_run_is_the_same_bitwise(runs: Runs) -> None:
    words = ("checkpoint.every=3", "train.eval_every=0")
    runs.run(1, *words, "train.num_steps=3")
    assert losses(runs.run(1, *words, "train.num_steps=6", resume=True)) == losses(runs.of_one())


def score(run: RunFolder, most_lines: int | None = None) -> LineScore:
    trained, device = find(run.path), torch.device("cpu")
    shape = trained.resolved.shape
    source = dataset_of(trained).source("validation", shape.seq_len, shape.target_len)
    return score_lines(module_of(trained, device).eval(), source, device, most_lines)


def test_the_accuracy_of_a_run(runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(runs.project)
    run = runs.of_one()
    found = score(run)
    assert found.loss == pytest.approx(run.read_metrics()[-1]["val_loss"], rel=1e-6)  # there in fp64
    assert 1.0 < found.tokens / found.lines < 14
    for how in (found.forced, found.alone):
        assert 0.0 <= how.lines / found.lines <= how.tokens / found.tokens < 1.0
    assert score(run, most_lines=5).lines == 5
    assert cli(["evaluate", str(run.path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == found.scores().lines
    assert len(said) == 4


def test_it_learns_to_copy(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 28 channels, 120 steps: far better than chance, and by itself nearly as good."""
    monkeypatch.chdir(runs.project)
    words = ["data.pairs=copy", "model.hidden_dim=28", "model.norm=first", "model.dropout=0", "train.precision=fp32"]
    words += ["train.num_steps=120", "optimizer.max_grad_norm=1", "optimizer.decay_steps=120", "train.eval_every=0"]
    run = runs.run(1, *words)
    found = score(run, most_lines=100)
    assert losses(run)[0] > math.log(10)
    assert found.forced.tokens > 0.8 * found.tokens
    assert found.alone.tokens > 0.5 * found.tokens


MODEL: dict[str, Any] = {"kind": "transformer", "num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
MODEL |= {"hidden_dim": 8, "source_len": 2, "target_len": 3}


@pytest.mark.parametrize(
    ("model", "sections", "words"),
    [
        ({"embedding": "none"}, {}, ['data.task = "seq2seq" gives tokens', '"tied"']),
        (
            {},
            {"parallel": {"data_parallel": 2}, "train": {"global_batch_size": 4, "device": "cuda"}},
            ["parallel.data_parallel = 2", "lengths"],
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(model: dict[str, Any], sections: dict[str, Any], words: list[str]) -> None:
    config = Config.model_validate({"model": MODEL | model, "data": {"task": "seq2seq"}, **sections})
    with pytest.raises(UserError) as told:
        build(config, 11, 1)
    for word in words:
        assert word in str(told.value)
