"""In: a machine with CUDA. Out: the same config runs there, on the trajectory of the CPU; skipped elsewhere.
Does not measure speed: benchmarks/gpu_step.py does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from runs import assert_same, codescent, losses, train

from codescent.record import RunFolder

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
    "words",
    [
        ("model.kind=llama", "model.num_kv_heads=1"),
        ("model.dropout=0.2",),
        ("model.dropout=0.2", "train.compile=none", "train.microbatch_size=2"),
        ("optimizer.kind=muon",),
        ("lora.rank=4",),
        ("train.label_smoothing=0.1", "train.head_chunk_tokens=24"),
    ],
    ids=" ".join,
)
def test_parts_of_a_run_walk_the_trajectory_of_the_cpu(project: Path, words: tuple[str, ...]) -> None:
    """CUDA compiles rotary turns and dropout, and computes the head in other pieces. Validation losses count, too."""
    name = re.sub(r"\W+", "-", " ".join(words))
    words = ("train.precision=fp64", *words)
    expected = train(project, f"cpu-{name}", *words, "train.compile=none")
    run = train(project, f"cuda-{name}", *words, "train.device=cuda")
    assert_same(run, expected, 1e-9)


@pytest.mark.parametrize("config", ["reverse_lines", "synthetic_transformer"])
def test_an_encoder_and_a_decoder_walk_the_trajectory_of_the_cpu(tmp_path: Path, config: str) -> None:
    sizes = ("model.hidden_dim=32", "model.ffn_dim=64", "model.num_encoder_layers=1", "model.num_decoder_layers=1")
    steps = ("train.num_steps=6", "train.global_batch_size=8", "train.eval_every=3", "train.eval_samples=64")
    words = ("train", config, *sizes, *steps, "train.precision=fp64", "optimizer.warmup_steps=0", "checkpoint.every=0")
    for name, device in (("cpu", "train.compile=none"), ("cuda", "train.compile=auto")):
        done = codescent(tmp_path, *words, f"run.name={name}", f"train.device={name}", device)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same(*(RunFolder.open(tmp_path / "runs" / name) for name in ("cuda", "cpu")), 1e-9)


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
