"""In: tiny Shakespeare. Out: the validation losses that fp32 and bf16 training reach on the same job.
Does not compare speed and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json
from work import codescent, environment

CLOSE = 0.02
"""Largest allowed difference between the validation losses."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the text is missing."""
    parsed = parser("Train the character-level Shakespeare job of 6 layers and 384 channels in fp32 and in bf16.")
    parsed.add_argument("--steps", type=positive, default=300, help="steps of each run")
    parsed.add_argument("--batch-size", type=positive, default=64, help="samples per step")
    parsed.add_argument("--seq-len", type=positive, default=256, help="characters per sample")
    parsed.add_argument("--dropout", type=float, default=0.0, help="dropout rate; nanoGPT's config for GPUs has 0.2")
    parsed.add_argument("--seeds", type=int, nargs="+", default=[1337], help="seeds; one pair of runs for each")
    parsed.add_argument(
        "--data", type=Path, metavar="DIR", default=os.environ.get("CODESCENT_DATA_DIR"),
        help="folder with tinyshakespeare/input.txt; the default is CODESCENT_DATA_DIR",
    )  # fmt: skip
    arguments = parsed.parse_args()
    if arguments.data is None or not (arguments.data / "tinyshakespeare" / "input.txt").is_file():
        parsed.error(f"no tinyshakespeare/input.txt in {arguments.data}: give --data or set CODESCENT_DATA_DIR")
    return arguments


def train(arguments: argparse.Namespace, precision: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run `codescent train` once. Returns its validation losses by step, over the whole validation split."""
    run = folder / f"{precision}-{seed}"
    command = codescent(
        "train", "shakespeare_char", f"run.folder={run}", f"run.seed={seed}", f"data.folder={folder / 'datasets'}",
        "model.num_layers=6", "model.num_heads=6", "model.hidden_dim=384", f"model.seq_len={arguments.seq_len}",
        f"model.dropout={arguments.dropout}", f"train.global_batch_size={arguments.batch_size}",
        f"train.num_steps={arguments.steps}", f"train.precision={precision}", "train.eval_samples=auto",
        f"train.eval_every={max(1, arguments.steps // 3)}", "log.every=10",
    )  # fmt: skip
    begun = time.perf_counter()
    env = {**environment(), "CODESCENT_DATA_DIR": str(arguments.data)}
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=sys.stderr)
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        losses = {int(row["step"]): float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]}
    return {
        "precision": precision, "seed": seed, "wall_s": time.perf_counter() - begun, "validation_losses": losses,
        "validation_loss": losses[max(losses)],
    }  # fmt: skip


def main() -> int:
    """Train and print."""
    arguments = arguments_of()
    record = hardware()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="codescent-bf16-") as folder:
        for seed in arguments.seeds:
            for precision in ("fp32", "bf16"):
                say(f"{precision}, seed {seed}: {arguments.steps} steps")
                runs.append(train(arguments, precision, seed, Path(folder)))
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    rows = [
        [
            f"seed {fp32['seed']}, step {step}",
            f"{loss:.4f}",
            f"{bf16['validation_losses'][step]:.4f}",
            f"{bf16['validation_losses'][step] - loss:+.4f}",
        ]
        for fp32, bf16 in pairs
        for step, loss in fp32["validation_losses"].items()
    ]
    worst = max(abs(bf16["validation_loss"] - fp32["validation_loss"]) for fp32, bf16 in pairs)
    claims = [must("|bf16 - fp32| of the last validation losses", worst, CLOSE, at_least=False)]
    job = (
        f"6 layers, 384 channels, {arguments.batch_size} x {arguments.seq_len} characters, dropout {arguments.dropout}"
    )
    print(machine_line(record), job, "", table(["validation loss", "fp32", "bf16", "difference"], rows), "", sep="\n")
    print("\n".join(must_lines(claims)))
    work = {"steps": arguments.steps, "batch_size": arguments.batch_size, "seq_len": arguments.seq_len}
    result = {"benchmark": "bf16_parity", "hardware": record, "work": work, "runs": runs, "musts": claims}
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    finish(main)
