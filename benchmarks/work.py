"""In: nothing. Out: the measured workloads: sizes of model and step, a file of random tokens, codescent's command line.
Does not import torch and does not measure."""

from __future__ import annotations

import os
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from measure import ROOT

NUM_TOKENS = 1_000_000
"""Tokens of the training file; the validation file has a tenth."""


@dataclass(frozen=True)
class Work:
    """Sizes of a GPT-2 and of one step, which has `batch_size` samples of `seq_len` tokens."""

    num_layers: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int
    batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.seq_len

    @property
    def num_parameters(self) -> int:
        """N in 6 N: the tied head counts once, position embeddings count."""
        per_layer = 12 * self.hidden_dim**2 + 13 * self.hidden_dim
        embeddings = (self.vocab_size + self.max_seq_len) * self.hidden_dim
        return embeddings + self.num_layers * per_layer + 2 * self.hidden_dim

    def text(self) -> str:
        """The sizes as text, for another program's command line."""
        return ",".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Work:
        """Inverse of `text`."""
        return cls(*map(int, text.split(",")))


GPT2_124M = Work(
    num_layers=12, num_heads=12, hidden_dim=768, vocab_size=50257, max_seq_len=1024, batch_size=4, seq_len=256,
)  # fmt: skip
SMALL = Work(num_layers=4, num_heads=4, hidden_dim=128, vocab_size=65, max_seq_len=64, batch_size=12, seq_len=64)
WORKS = {"gpt2-124m": GPT2_124M, "small": SMALL}


def random_tokens(vocab_size: int, count: int) -> np.ndarray:
    """Uniform random tokens, equal in every run. The time of a step does not depend on the tokens."""
    return np.random.default_rng(1337).integers(vocab_size, size=count, dtype=np.uint16)


def write_tokens(folder: Path, vocab_size: int) -> Path:
    """Write `train.bin` and `val.bin` in nanoGPT's format (uint16, no header) into a new folder; returns `train.bin`.

    With a vocabulary other than GPT-2's the folder must have a meta.pkl. It is empty, since no program reads it here.
    """
    created = folder / f"tokens-{vocab_size}"
    created.mkdir()
    tokens = random_tokens(vocab_size, NUM_TOKENS + NUM_TOKENS // 10)
    tokens[:NUM_TOKENS].tofile(created / "train.bin")
    tokens[NUM_TOKENS:].tofile(created / "val.bin")
    if vocab_size != GPT2_124M.vocab_size:
        (created / "meta.pkl").touch()
    return created / "train.bin"


def codescent(*arguments: str) -> list[str]:
    """The command line of codescent, with the code of this checkout."""
    return [sys.executable, "-m", "codescent", *arguments]


def environment() -> dict[str, str]:
    """The user's environment, with this checkout first on PYTHONPATH, and without variables that tune speed."""
    tuning = (
        "GOMP_SPINCOUNT",
        "OMP_WAIT_POLICY",
        "GLIBC_TUNABLES",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "LD_PRELOAD",
        "CODESCENT_ALLOCATOR",
    )
    env = {key: value for key, value in os.environ.items() if key not in tuning}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    return env


CONFIG = """# Written by a benchmark: no evaluation, no checkpoint, no end, metrics at every step. The rest is default.
[run]
folder = "{run}"

[model]
num_layers = {work.num_layers}
num_heads = {work.num_heads}
hidden_dim = {work.hidden_dim}
vocab_size = {work.vocab_size}
seq_len = {work.max_seq_len}

[data]
corpus = "{corpus}"
seq_len = {work.seq_len}

[train]
num_steps = 1_000_000
global_batch_size = {work.batch_size}
eval_every = 0

[checkpoint]
every = 0

[log]
every = 1
metrics_every = 1
"""


def training(work: Work, tokens: Path, run: Path, *overrides: str) -> list[str]:
    """The command line of `codescent train` on `work`. Writes the config next to the run folder.

    `overrides` are key=value.
    """
    config = run.with_suffix(".toml")
    config.write_text(CONFIG.format(work=work, run=run, corpus=tokens.parent), encoding="utf-8")
    return codescent("train", str(config), *overrides)
