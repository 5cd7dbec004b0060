"""In: this machine. Out: what a rank holds on a CPU beside the tensors of its plan, by two short runs of the product.
Does not fit constants to the user's runs (runs.py does). On CUDA torch's allocator counts itself (memory.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from codescent.base.errors import UserError
from codescent.base.temporary_folder import temporary_folder
from codescent.clusters.by_links import of_device
from codescent.cost.stage_memory import memory
from codescent.launch.allocator import MARKER
from codescent.launch.roles import die_with_parent
from codescent.record.memory import last_rows
from codescent.results import open_run

SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {"num_layers": 1, "num_heads": 1, "hidden_dim": 64, "vocab_size": 2048},
    "large": {"num_layers": 6, "num_heads": 6, "hidden_dim": 384, "vocab_size": 32768},
}
"""Of GPT-2. The small one holds little more than the program; the tensors of the large one take half a gigabyte."""
STEPS, SEQ_LEN, SAMPLES, MICROBATCH = 5, 256, 4, 2
"""A heap grows for some steps: what is let go of does not always have the size of what comes next."""
WORDS = (
    *("model.kind=gpt2", f"model.seq_len={SEQ_LEN}", f"data.seq_len={SEQ_LEN}", f"train.num_steps={STEPS}"),
    *(f"train.global_batch_size={SAMPLES}", f"train.microbatch_size={MICROBATCH}", "train.num_threads=1"),
    *("train.device=cpu", "train.eval_every=0", "checkpoint.every=0", "log.sample_tokens=0", "parallel.ranks=1"),
    *("data.corpus=text.txt", "data.tokenizer=byte", "model.dropout=0"),
)
TEXT = "Many workers, one descent. " * 10_000
"""Little text, so that nothing of its preparation counts."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
LEAST_S = 10.0
"""Who measures for less has no time for trials."""
KEPT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("LD_PRELOAD", "GLIBC_TUNABLES", MARKER),
)
"""Variables of the environment that a trial has, too. Without those of a launcher it is a run of one process."""


class HeldBesides(NamedTuple):
    """Of a rank on a CPU. `held_bytes`: what it holds beside its tensors; `fragments`: a share of the tensors that its
    allocator holds more."""

    held_bytes: int
    fragments: float


def measure() -> HeldBesides:
    """Train both sizes on one core. Takes about half a minute. Raises UserError: a trial does not run."""
    with _stopping_cleanly(), temporary_folder("codescent-trial-") as folder:
        (folder / "text.txt").write_text(TEXT, "utf-8")
        (small, of_small), (large, of_large) = (_trial(folder, size) for size in SIZES)
    held = small - of_small
    return HeldBesides(round(held), max(0.0, (large - held) / of_large - 1.0))


@contextmanager
def _stopping_cleanly() -> Iterator[None]:
    """A block that a stop request leaves by an exception: the trial ends, and its folder goes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _trial(folder: Path, size: str) -> tuple[float, float]:
    """Bytes that the run of a size held at most, and those of the tensors that its plan declares."""
    run = folder / size
    words = [*WORDS, f"run.folder={run}", *(f"model.{key}={value}" for key, value in SIZES[size].items())]
    env = {key: os.environ[key] for key in KEPT if key in os.environ}
    command = [sys.executable, "-P", "-m", "codescent", "train", "default", "model.preset=auto", *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, preexec_fn=die_with_parent()
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise UserError(f"a trial run of GPT-2 has ended with exit code {done.returncode}: {''.join(said)}")
    plan = open_run(run).plan
    assert plan is not None, "this version has written it"
    return float(last_rows(run)[0]["peak_bytes"]), memory(plan, 0, of_device("cpu")).total
