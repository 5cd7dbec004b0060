"""In: a machine with CUDA. Out: the same config runs there, on the trajectory of the CPU; skipped elsewhere.
Does not measure speed: benchmarks/gpu_step.py does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import losses, train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 3e-2)])
def test_cuda_walks_the_trajectory_of_the_cpu(project: Path, precision: str, tolerance: float) -> None:
    expected = train(project, f"cpu-{precision}", f"train.precision={precision}")
    run = train(project, f"cuda-{precision}", f"train.precision={precision}", "train.device=cuda")
    assert losses(run) == pytest.approx(losses(expected), rel=tolerance)


@pytest.mark.parametrize(
    "how",
    [
        "train.compile=blocks",
        "train.compile=model",
        "train.cuda_graphs=true",
        "parallel.recompute=products",
        "parallel.recompute=full",
    ],
)
def test_compiled_follows_eager(project: Path, how: str) -> None:
    words, name = ("train.precision=fp32", "train.device=cuda"), how.replace(".", "-").replace("=", "-")
    expected = train(project, f"eager-{name}", *words, "train.compile=none")
    run = train(project, f"compiled-{name}", *words, how)
    assert losses(run) == pytest.approx(losses(expected), rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_walks_the_same_trajectory(project: Path) -> None:
    words = ("train.precision=fp64", "train.device=cuda")
    expected = train(project, "nccl-1", *words)
    run = train(project, "nccl-2", *words, "--ranks", "2")
    assert losses(run) == pytest.approx(losses(expected), rel=1e-10)


def test_resume_on_cuda_follows_the_whole_run(project: Path) -> None:
    words = ("train.device=cuda", "train.deterministic=true", "train.num_steps=20", "optimizer.decay_steps=20")
    expected = train(project, "cuda-whole", *words)
    train(project, "cuda-parts", *words, "train.num_steps=10")
    assert losses(train(project, "cuda-parts", *words, "--resume")) == losses(expected)
