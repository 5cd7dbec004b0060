"""In: a method of averaging that is one file of 80 lines and two entries. Out: it trains, resumes, is proved, planned.
Does not test the methods that come with the package. No file of train/, plan/ or cost/ knows it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forker import TESTS, Forker
from runs import assert_same, called, losses, make_project

from codescent.record import RunFolder

TOY = (
    "parallel.average_every=3",
    "train.precision=fp64",
    "train.num_steps=9",
    "train.eval_every=3",
    "optimizer.decay_steps=9",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Iterator[Path]:
    """A project in which every process that is started knows the method: Python imports sitecustomize by itself.

    The process that other tests share runs before, so that it is started without the method.
    """
    folder = tmp_path_factory.mktemp("nth")
    make_project(folder)
    forker.train(folder, "local-sgd", 2, *TOY)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import every_nth\nevery_nth.register()\n")
    with pytest.MonkeyPatch.context() as patch:
        python_path = (str(folder / "site"), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(python_path))
        yield folder


@pytest.fixture(scope="module")
def ranks(project: Path) -> Iterator[Forker]:
    """A process of its own: the one that other tests share does not know the method."""
    forker = Forker()
    yield forker
    forker.close()


def test_it_trains_saves_and_resumes_as_local_sgd_does(project: Path, ranks: Forker) -> None:
    whole = ranks.train(project, "whole", 2, *TOY)
    assert [row["consensus"] is not None for row in whole.read_metrics()] == [number % 3 == 2 for number in range(9)]
    assert_same(RunFolder.open(project / "runs/local-sgd"), whole, 1e-12)
    ranks.train(project, "resumed", 2, *TOY, "train.num_steps=6")
    assert losses(ranks.train(project, "resumed", 2, *TOY, resume=True)) == losses(whole)


@pytest.mark.slow
def test_it_is_planned_timed_and_proved(project: Path) -> None:
    link = ("--link", "1gbit,0.1ms", "--compute-s", "0.01")
    plan = called(project, "plan", "run.toml", *TOY, "parallel.dp_replicate=2", "--ranks", "2", *link)
    assert plan.returncode == 0, plan.stderr
    assert "average after step 3 of the round" in plan.stdout
    assert re.search(r"all_reduce over dp_replicate .*weights.*once in 3 steps", plan.stdout)
    assert re.search(r"step +1\d\.\d ms, mean of 3 steps", plan.stdout)
    proof = called(project, "prove", "run.toml", TOY[1], "--layouts", "dp_replicate=2,average_every=3", "--steps", "6")
    assert re.search(r"average_every=3.*drift", proof.stdout), proof.stderr
