"""In: a folder. Out: a small corpus and config there, and real runs of the command line on it.
Does not decide what is tested: the tests that import it do."""

from __future__ import annotations

import io
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from codescent.base.temporary_folder import is_remover
from codescent.record import RunFolder
from codescent.verbs.cli import run

CONFIG = """
[model]
num_layers = 2
num_heads = 2
hidden_dim = 16
seq_len = 16

[data]
corpus = "corpus.txt"
tokenizer = "byte"

[train]
num_steps = 20
global_batch_size = 8
eval_every = 10
num_threads = 1
device = "cpu"
matmul = "exact"
allocator = "system"

[optimizer]
learning_rate = 1e-2
warmup_steps = 2

[checkpoint]
every = 0

[log]
tensorboard = false
"""


def make_project(folder: Path) -> Path:
    """A corpus of words in a fixed random order, and a config for a tiny model; returns the config's path."""
    rng = random.Random(7)
    words = ["many", "workers", "one", "descent", "loss", "gradient", "step", "rank", "sum", "mean"]
    lines = (" ".join(rng.choice(words) for _ in range(8)) for _ in range(300))
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(CONFIG)
    return folder / "run.toml"


def environment(**extra: str) -> dict[str, str]:
    """This process's environment for a run: one thread per rank, no terminal."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", **extra}


def start(folder: Path, *words: str, **popen: object) -> subprocess.Popen[str]:
    """`codescent WORDS` in `folder`, running."""
    command = [sys.executable, "-m", "codescent", *words]
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        command,
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **popen,
    )


def started_by(launcher: int) -> list[psutil.Process]:
    """The processes below one, the oldest first, without those that remove its temporary folders."""
    found = []
    for one in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if not is_remover(one.cmdline()):
                found.append(one)
    return sorted(found, key=lambda one: one.pid)


def codescent(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`codescent WORDS` in `folder`, to its end."""
    command = [sys.executable, "-m", "codescent", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(), text=True, capture_output=True, timeout=600, check=False
    )


def called(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`codescent WORDS` in `folder`, in this process: for what ends before ranks are started, and without a kill."""
    out, err = io.StringIO(), io.StringIO()
    # What a run sets in the environment does not reach the next test.
    with chdir(folder), patch.dict(os.environ, TERM="dumb"), redirect_stdout(out), redirect_stderr(err):
        try:
            code: Any = run(words)
        except SystemExit as end:  # argparse
            code = end.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def train(folder: Path, name: str, *words: str) -> RunFolder:
    """`codescent train run.toml` under `name`, which must succeed."""
    done = codescent(folder, "train", "run.toml", f"run.name={name}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder.open(folder / "runs" / name)


def losses(run: RunFolder) -> Sequence[float]:
    """Training losses, step by step."""
    return [row["train_loss"] for row in run.read_metrics()]


def assert_same(
    found: RunFolder, expected: RunFolder, tolerance: float, first: int = 0, stop: int | None = None
) -> None:
    """Numbers of the steps first + 1 to stop are alike, relatively, and there where they are there in the other run."""
    rows, others = found.read_metrics()[first:stop], expected.read_metrics()[first:stop]
    assert len(rows) == len(others) > 0
    for column in ("train_loss", "grad_norm", "val_loss"):
        for row, other in zip(rows, others, strict=True):
            number, wanted = (math.nan if it[column] is None else it[column] for it in (row, other))
            assert number == pytest.approx(wanted, rel=tolerance, abs=0, nan_ok=True), (column, row["step"])


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `codescent train run.toml` says in `folder`, where it exits with 2 and makes no run."""
    with chdir(folder):
        assert run(["train", "run.toml", "run.name=never", *words]) == 2
    assert not (folder / "runs" / "never").exists()
    return capsys.readouterr().err
