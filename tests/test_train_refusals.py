"""In: what a user may get wrong. Out: one clear message, exit code 2, nothing started, nothing left behind.
Does not cover bad text, shards or checkpoints in depth: the tests of those rooms do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from forker import Forker
from runs import called, make_project

from codescent.base.errors import UserError
from codescent.data.samples import AnyDataset
from codescent.train.open import check_alike
from codescent.train.world import World


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.num_step=3"], ["num_step", "did you mean", "num_steps"]),
        (["train.num_steps=many"], ["train.num_steps", "many"]),
        (["model.num_heads=3"], ["3 heads do not divide", "num_heads = 2 or 4"]),
        (["data.corpus=absent.txt"], ["absent.txt"]),
        (["--ranks", "3"], ["train.global_batch_size = 8", "2 or 4 ranks"]),
        (["data.seq_len=17"], ["data.seq_len = 17", "16 positions"]),
        (["model.preset=gpt3"], ["gpt3", "gpt2-xl"]),
        (["train.device=cuda"], ["CUDA device"]),
        (["parallel.tp=3", "--ranks", "3"], ["parallel.tp = 3: 2 heads do not divide"]),
        (["train.global_batch_size=100000"], ["samples", "train.global_batch_size = 100000"]),
        (["data.validation_fraction=0.0001"], ["validation"]),
        (["model.hidden_dim=1000000", "model.num_heads=1"], ["parameters: weights, gradients", "GiB"]),
        (["data.corpus="], ["data.corpus"]),
        (["model.num_heads=3", "train.global_batch_size=7", "--ranks", "2"], ["3 heads", "7 does not divide"]),
    ],
)
def test_one_clear_message(project: Path, words: list[str], expected: list[str]) -> None:
    done = called(project, "train", "run.toml", "run.name=refused", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    for part in expected:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    notes = [line for line in done.stderr.splitlines() if " has no effect: " in line or " replaces model." in line]
    assert all(line.startswith("error: ") for line in done.stderr.splitlines() if line not in notes)
    assert not (project / "runs" / "refused").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"good text " * 100 + b"\xff\xfe bad", "offset 1000"),
        (b"short", "samples"),
    ],
)
def test_bad_text(tmp_path: Path, content: bytes, expected: str) -> None:
    make_project(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(content)
    done = called(tmp_path, "train", "run.toml")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "corpus" in done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "command", [("train",), ("train", "--ranks", "2"), *((verb, "data.tokenizer=char") for verb in ("train", "plan"))]
)
def test_a_model_without_sizes_is_refused_before_the_data_is_prepared(command: tuple[str, ...], tmp_path: Path) -> None:
    config = make_project(tmp_path)
    config.write_text(config.read_text().replace("num_heads = 2\n", "").replace("\nseq_len = 16", ""))
    done = called(tmp_path, command[0], "run.toml", *command[1:])
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.num_heads, model.seq_len: not given; give them, or model.preset")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "run.toml"]


def test_divergence_stops_the_run_and_keeps_the_weights(project: Path) -> None:
    words = ("optimizer.kind=sgd", "optimizer.learning_rate=1e30", "optimizer.max_grad_norm=0", "train.eval_every=0")
    done = called(project, "train", "run.toml", "run.name=diverged", *words, "optimizer.warmup_steps=0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not finite" in done.stdout
    assert "codescent train --resume runs/diverged optimizer.learning_rate=1e+29 (or" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_full_disk_keeps_the_last_checkpoint(tmp_path: Path, forker: Forker) -> None:
    make_project(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    size = ["-o", "size=2500k"]
    if subprocess.run(["mount", "-t", "tmpfs", *size, "tmpfs", str(runs)], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        words = ("model.hidden_dim=64", "checkpoint.every=5", "checkpoint.keep_last=9", "train.eval_every=0")
        done = forker.run(tmp_path, 1, ["run.name=full", *words])
        assert done.codes == [2], done.said
        assert "no space left" in done.said.lower()
        assert "Traceback" not in done.said
        saved = sorted(path.name for path in (runs / "full" / "checkpoints").iterdir())
        assert saved == ["step_00000005"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(runs)], check=True)
        run = forker.train(tmp_path, "full", 1, *words, resume=True)
        assert run.read_metrics()[-1]["step"] == 20
    finally:
        subprocess.run(["umount", str(runs)], check=True)


def test_nodes_with_other_samples_are_refused() -> None:
    dataset = SimpleNamespace(path=Path("datasets/a"), fingerprint="theirs")
    world = SimpleNamespace(this_rank=SimpleNamespace(rank=3), from_first=lambda make: "ours")
    with pytest.raises(
        UserError, match=r"rank 3 on .*: the samples in datasets/a differ from .* rank 0 \(theirs, on rank 0"
    ):
        check_alike(cast(AnyDataset, dataset), cast(World, world))
    check_alike(cast(AnyDataset, dataset), cast(World, SimpleNamespace(from_first=lambda make: make())))
