"""In: one config. Out: the same losses on 1, 2 and 4 ranks, started by us or by torchrun, accumulated or not.
Does not compare with other programs: test_models_parity does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forker import Forker
from runs import environment, losses, make_project, train

from codescent.record import RunFolder

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trajectory")
    make_project(folder)
    return folder


@pytest.fixture(scope="module")
def alone(project: Path, forker: Forker) -> dict[str, RunFolder]:
    return {
        precision: forker.train(project, f"alone-{precision}", 1, f"train.precision={precision}")
        for precision in TOLERANCE
    }


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_walk_the_trajectory_of_one(
    project: Path, forker: Forker, alone: dict[str, RunFolder], precision: str, ranks: int
) -> None:
    run = forker.train(project, f"{ranks}-{precision}", ranks, f"train.precision={precision}")
    assert len(losses(run)) == 20
    for column in ("train_loss", "grad_norm", "val_loss"):
        expected = [row[column] for row in alone[precision].read_metrics() if row[column] is not None]
        found = [row[column] for row in run.read_metrics() if row[column] is not None]
        assert found == pytest.approx(expected, rel=TOLERANCE[precision]), column
    assert losses(run)[-1] < losses(run)[0] - 1  # it learns: equality of runs that stand still proves nothing


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_walks_the_same_trajectory(
    project: Path, forker: Forker, alone: dict[str, RunFolder], ranks: int
) -> None:
    run = forker.train(project, f"accumulated-{ranks}", ranks, "train.precision=fp64", "train.microbatch_size=2")
    assert losses(run) == pytest.approx(losses(alone["fp64"]), rel=1e-10)


@pytest.mark.slow
def test_small_buckets_and_no_overlap_change_nothing(project: Path, alone: dict[str, RunFolder]) -> None:
    # From the command line, for once: the ranks of these tests are started by it, or forked by the tests.
    run = train(project, "buckets", "train.precision=fp64", "parallel.bucket_bytes=1", "--ranks", "2")
    assert losses(run) == pytest.approx(losses(alone["fp64"]), rel=1e-10)


def test_torchrun_walks_the_same_trajectory(project: Path, alone: dict[str, RunFolder]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "codescent", "train", "run.toml", "run.name=torchrun", "train.precision=fp64"]
    done = subprocess.run(
        [*command, *words], cwd=project, env=environment(), text=True, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder.open(project / "runs" / "torchrun")
    assert losses(run) == pytest.approx(losses(alone["fp64"]), rel=1e-10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_follows_the_sample_not_the_rank(project: Path, forker: Forker, ranks: int) -> None:
    words = ("train.precision=fp64", "model.dropout=0.2")
    expected = forker.train(project, f"dropout-{ranks}-expected", 1, *words)
    found = forker.train(project, f"dropout-{ranks}", ranks, *words, "train.microbatch_size=2")
    assert losses(found) == pytest.approx(losses(expected), rel=1e-10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_with_accumulation_follows_fp32_closely(
    project: Path, forker: Forker, alone: dict[str, RunFolder], ranks: int
) -> None:
    run = forker.train(project, f"bf16-{ranks}", ranks, "train.precision=bf16", "train.microbatch_size=2")
    assert losses(run) == pytest.approx(losses(alone["fp32"]), rel=0.03)
    assert losses(run) != losses(alone["fp32"])
    norms, expected = ([row["grad_norm"] for row in of.read_metrics()] for of in (run, alone["fp32"]))
    assert norms == pytest.approx(expected, rel=0.05)
