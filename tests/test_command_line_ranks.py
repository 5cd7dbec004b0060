"""In: one config. Out: the same losses on two ranks, started by the command line or by torchrun.
Does not go through the layouts: test_trajectories does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forker import Forker
from runs import environment, losses, make_project, train

from codescent.record import RunFolder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trajectory")
    make_project(folder)
    return folder


@pytest.fixture(scope="module")
def alone(project: Path, forker: Forker) -> RunFolder:
    return forker.train(project, "alone", 1, "train.precision=fp64")


@pytest.mark.slow
def test_small_buckets_and_no_overlap_change_nothing(project: Path, alone: RunFolder) -> None:
    # From the command line, for once: the ranks of these tests are started by it, or forked by the tests.
    run = train(project, "buckets", "train.precision=fp64", "parallel.bucket_bytes=1", "--ranks", "2")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-10)


def test_torchrun_walks_the_same_trajectory(project: Path, alone: RunFolder) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "codescent", "train", "run.toml", "run.name=torchrun", "train.precision=fp64"]
    done = subprocess.run(
        [*command, *words], cwd=project, env=environment(), text=True, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder.open(project / "runs" / "torchrun")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-10)
