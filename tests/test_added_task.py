"""In: a task that is one file and one line of the registry. Out: every verb serves it, on one rank and on two.
Does not test the tasks that come with the package."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forker import TESTS, Forker, Prepared
from runs import assert_same, losses, make_project
from sentence_order import REGISTERED

from codescent import tasks
from codescent.base.errors import UserError
from codescent.record import RunFolder
from codescent.verbs.cli import run as cli

ORDER = (
    "data.task=order",
    "model.seq_len=24",
    "train.precision=fp64",
    "train.num_steps=6",
    "train.eval_every=6",
    "train.eval_samples=16",
    "optimizer.decay_steps=6",
)
TWO = ("parallel.dp_shard=2", "train.microbatch_size=2")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project in which every process that is started knows the task: Python imports sitecustomize by itself."""
    folder = tmp_path_factory.mktemp("order")
    make_project(folder)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import sentence_order\nsentence_order.register()\n")
    with pytest.MonkeyPatch.context() as patch:
        python_path = (str(folder / "site"), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(python_path))
        patch.setattr(tasks, "TASKS", REGISTERED)
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def alone(project: Path, ranks: Forker) -> RunFolder:
    return ranks.train(project, "alone", 1, *ORDER)


@pytest.fixture(scope="module")
def ranks(forker: Forker) -> Forker:
    """Ranks that know the task."""
    return Prepared(forker, "sentence_order:register")


def test_two_ranks_and_a_resumed_run_walk_its_trajectory(project: Path, ranks: Forker, alone: RunFolder) -> None:
    assert losses(alone)[-1] < losses(alone)[0]
    assert alone.plan["task"]["name"] == "order"
    assert_same(ranks.train(project, "two", 2, *ORDER, *TWO), alone, 1e-9)
    ranks.train(project, "resumed", 2, *ORDER, *TWO, "train.num_steps=3", "train.eval_every=0")
    assert_same(ranks.train(project, "resumed", 1, *ORDER, resume=True), alone, 1e-9)


def test_it_is_scored_as_it_was_validated(alone: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["evaluate", "runs/alone"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"validation split: loss [\d.]+ of \d+ pairs of lines", said)
    assert (alone.path / "tokenizer.json").is_file()
    assert cli(["evaluate", "runs/alone", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["task"], facts["unit"]) == ("runs/alone", "order", "pairs of lines")
    assert f"loss {facts['loss']:.4f} of {facts['count']:,} pairs of lines" in said
    assert cli(["evaluate", "runs/alone", "--data", "corpus.txt"]) == 2
    assert 'with data.task = "order" only the run\'s own validation split can be scored' in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_proved(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ORDER[:2], "--layouts", "dp_replicate=2", "--steps", "4"]
    assert cli(["prove", "run.toml", *words]) == 0
    assert "same" in capsys.readouterr().out


def test_a_name_that_no_task_has(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "run.toml", "data.task=oder"]) == 2
    told = capsys.readouterr().err
    assert told.startswith('error: command line: data.task: given "oder"; must be "lm", ')
    assert told.rstrip().endswith('or "auto"; did you mean "order"?')
    assert cli(["plan", "run.toml", "data.task=order", "model.kind=bert"]) == 2
    assert "take that, or model.kind = gpt2 or llama" in capsys.readouterr().err
    with pytest.raises(UserError, match="must be"):
        tasks.task_named("nothing like it")
