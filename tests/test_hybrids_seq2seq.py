"""In: an encoder-decoder on lines, under axes of the mesh. Out: the losses of one process; accuracy of a run.
Does not look at samples (test_data_lines does) or at the head (test_models_translate does)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from runs import assert_same, losses, make_project

from codescent.build import build
from codescent.config import Config
from codescent.errors import UserError
from codescent.record import RunFolder
from codescent.seq2seq import evaluate_seq2seq, report

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
UNTIED = "model.embedding=untied model.causal=false"


class Runs:
    """Runs of one project, that of one process for each model done once."""

    def __init__(self, project: Path, forker: Forker) -> None:
        self.project, self.forker = project, forker
        self.alone: dict[str, RunFolder] = {}
        self.number = 0

    def run(self, ranks: int, *words: str, resume: bool = False) -> RunFolder:
        self.number += 0 if resume else 1
        return self.forker.train(self.project, f"run{self.number}", ranks, *SIZES, *words, resume=resume)

    def of_one(self, words: str) -> RunFolder:
        if words not in self.alone:
            self.alone[words] = self.run(1, *words.split(), "train.num_steps=6")
        return self.alone[words]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("hybrids_seq2seq")
    make_project(project)
    text = (project / "corpus.txt").read_text().replace(" ", "\n", 700)  # lines of very different lengths
    (project / "lines.txt").write_text(text)
    return Runs(project, forker)


@pytest.mark.parametrize(
    ("layout", "ranks", "model"),
    [
        ("pp=2", 2, ""),
        ("tp=2", 2, ""),
        *(
            pytest.param(layout, ranks, model, marks=pytest.mark.slow)
            for layout, ranks, model in (
                ("dp_replicate=2", 2, ""),
                ("dp_shard=2", 2, UNTIED),
                ("tp=2 sequence_parallel=false recompute=full", 2, UNTIED),
                ("pp=2 tp=2 cut=encoder-decoder recompute=selective", 4, UNTIED),
                ("pp=2 schedule=zero-bubble recompute=full", 2, UNTIED),
                ("pp=2 schedule=interleaved virtual_stages=2", 2, ""),
                ("pp=2 dp_replicate=2", 4, ""),
            )
        ),
    ],
)
def test_every_layout_walks_the_trajectory_of_one(runs: Runs, layout: str, ranks: int, model: str) -> None:
    keys = [f"parallel.{key}" for key in layout.split()]
    found = runs.run(ranks, *keys, *model.split(), "train.num_steps=6", "train.microbatch_size=3")
    assert_same(found, runs.of_one(model), 1e-9)
    assert len(losses(found)) == 6


def test_a_resumed_run_is_the_same_bitwise(runs: Runs) -> None:
    words = ("checkpoint.every=3", "train.eval_every=0")
    runs.run(1, *words, "train.num_steps=3")
    assert losses(runs.run(1, *words, "train.num_steps=6", resume=True)) == losses(runs.of_one(""))


def test_the_accuracy_of_a_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.project)
    run = runs.of_one("")
    found = evaluate_seq2seq(run.path, most_lines=None)
    assert found["loss"] == pytest.approx(run.read_metrics()[-1]["val_loss"], rel=1e-6)  # there in fp64
    assert 1.0 < found["tokens"] / found["lines"] < 14
    for how in ("teacher_forced", "greedy"):
        assert 0.0 <= found[how]["line_accuracy"] <= found[how]["token_accuracy"] < 1.0
    assert evaluate_seq2seq(run.path, most_lines=5)["lines"] == 5
    first, *rest = report(found)
    assert f"loss {found['loss']:.4f}" in first
    assert len(rest) == 2


def test_of_other_runs_no_accuracy_is_told(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.project)
    other = runs.forker.train(runs.project, "other", 1, "train.num_steps=1", "train.eval_every=0")
    with pytest.raises(UserError, match=r'data.task = "lm"'):
        evaluate_seq2seq(other.path)
    with pytest.raises(UserError):
        evaluate_seq2seq(runs.project / "nothing")


def test_it_learns_to_copy(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 28 channels, 120 steps: far better than chance, and by itself nearly as good."""
    monkeypatch.chdir(runs.project)
    words = ["data.pairs=copy", "model.hidden_dim=28", "model.norm=first", "model.dropout=0", "train.precision=fp32"]
    words += ["train.num_steps=120", "optimizer.max_grad_norm=1", "optimizer.decay_steps=120", "train.eval_every=0"]
    run = runs.run(1, *words)
    found = evaluate_seq2seq(run.path, most_lines=100)
    assert losses(run)[0] > math.log(10)
    assert found["teacher_forced"]["token_accuracy"] > 0.8
    assert found["greedy"]["token_accuracy"] > 0.5


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
