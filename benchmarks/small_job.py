"""In: nanoGPT's checkout, tiny Shakespeare. Out: wall-clock seconds and losses of nanoGPT's CPU job, and of ours.
Does not count the preparation of the data, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import (
    Checkout,
    SystemFailed,
    finish,
    hardware,
    machine_line,
    must,
    must_lines,
    parser,
    positive,
    revision,
    say,
    table,
    write_json,
)
from work import codescent, environment

NANOGPT_ARGUMENTS = (
    "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12",
    "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0",
)  # fmt: skip
"""The arguments in nanoGPT's README ("I only have a macbook")."""

OURS = {"codescent-fp32": "fp32", "codescent-bf16": "bf16"}
"""nanoGPT trains in fp32 on a CPU. bf16 must reach the same validation loss. Which is faster depends on the CPU."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the checkout or the text is missing."""
    parsed = parser("Time nanoGPT's Shakespeare job for CPUs and `codescent train shakespeare_char`, start to end.")
    parsed.add_argument(
        "--nanogpt", type=Checkout("nanoGPT", "train.py", "model.py", "config/train_shakespeare_char.py"),
        required=True, metavar="DIR", help="checkout of nanoGPT",
    )  # fmt: skip
    parsed.add_argument("--rounds", type=positive, default=5, help="runs of each system, in turns")
    parsed.add_argument(
        "--data", type=Path, metavar="DIR", default=os.environ.get("CODESCENT_DATA_DIR"),
        help="folder with tinyshakespeare/input.txt; the default is CODESCENT_DATA_DIR",
    )  # fmt: skip
    parsed.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides for codescent")
    arguments = parsed.parse_args()
    if arguments.data is None or not (arguments.data / "tinyshakespeare" / "input.txt").is_file():
        parsed.error(f"no tinyshakespeare/input.txt in {arguments.data}: give --data or set CODESCENT_DATA_DIR")
    return arguments


def write_characters(text: Path, folder: Path) -> None:
    """Write the text's characters as tokens in the files that nanoGPT's script reads: train.bin, val.bin and meta.pkl.

    meta.pkl is a pickled dict; nanoGPT reads its `vocab_size`. This function only writes a pickle, it never reads one.
    """
    import pickle  # noqa: PLC0415 - the only place of the project that needs it

    characters = np.frombuffer(text.read_bytes(), dtype=np.uint8)
    alphabet, tokens = np.unique(characters, return_inverse=True)
    folder.mkdir(parents=True)
    cut = int(len(tokens) * 0.9)
    tokens[:cut].astype(np.uint16).tofile(folder / "train.bin")
    tokens[cut:].astype(np.uint16).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(alphabet)}))


def timed(command: list[str], folder: Path, env: dict[str, str]) -> tuple[float, str]:
    """Run a command. Returns its wall-clock seconds and its output."""
    begun = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=env, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seconds = time.perf_counter() - begun
    if done.returncode != 0:
        raise SystemFailed(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")
    return seconds, done.stdout


def run_nanogpt(checkout: Path, folder: Path) -> dict[str, Any]:
    """Run nanoGPT's script once, in the folder of its data and configurator: the script's paths are relative."""
    command = [sys.executable, str(checkout / "train.py"), str(checkout / "config" / "train_shakespeare_char.py")]
    wall_s, output = timed([*command, *NANOGPT_ARGUMENTS], folder, environment())
    losses = re.findall(r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)", output, re.MULTILINE)
    steps_ms = [float(ms) for ms in re.findall(r"^iter \d+: loss [\d.]+, time ([\d.]+)ms", output, re.MULTILINE)]
    return {
        "system": "nanogpt",
        "wall_s": wall_s,
        "validation_loss": float(losses[-1][1]),
        "step_s": statistics.median(steps_ms) / 1e3,
        "in_steps_s": statistics.median(steps_ms) / 1e3 * len(steps_ms),
    }


def run_codescent(system: str, folder: Path, number: int, data: Path, overrides: list[str]) -> dict[str, Any]:
    """Run `codescent train shakespeare_char` once, including the text that it generates at its end."""
    run = folder / f"run-{system}-{number}"
    command = codescent(
        "train", "shakespeare_char", f"run.folder={run}", f"data.folder={folder / 'datasets'}",
        f"train.precision={OURS[system]}",
    )  # fmt: skip
    wall_s, _ = timed([*command, *overrides], folder, {**environment(), "CODESCENT_DATA_DIR": str(data)})
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps_s = [float(row["step_s"]) for row in rows]
    return {
        "system": system,
        "wall_s": wall_s,
        "validation_loss": float(next(row["val_loss"] for row in reversed(rows) if row["val_loss"])),
        "step_s": statistics.median(steps_s),
        "in_steps_s": statistics.median(steps_s) * len(steps_s),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all systems in turns, in alternating order."""
    text = arguments.data / "tinyshakespeare" / "input.txt"
    write_characters(text, folder / "data" / "shakespeare_char")
    (folder / "configurator.py").symlink_to(arguments.nanogpt / "configurator.py")
    preparing = codescent("data", "shakespeare", "--tokenizer", "char", "--folder", str(folder / "datasets"))
    timed(preparing, folder, {**environment(), "CODESCENT_DATA_DIR": str(arguments.data)})
    runs: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        systems = ("nanogpt", *OURS)
        for system in systems if number % 2 == 0 else reversed(systems):
            if system == "nanogpt":
                runs.append(run_nanogpt(arguments.nanogpt, folder))
            else:
                runs.append(run_codescent(system, folder, number, arguments.data, arguments.overrides))
            say(f"round {number + 1}/{arguments.rounds}  {system:14} {runs[-1]['wall_s']:6.1f} s")
    return runs


def summary(runs: list[dict[str, Any]], system: str) -> dict[str, Any]:
    """Medians over the runs of a system, its best wall-clock time, and all its validation losses."""
    own = [run for run in runs if run["system"] == system]
    entry: dict[str, Any] = {
        key: statistics.median(run[key] for run in own) for key in ("wall_s", "step_s", "in_steps_s")
    }
    losses = [run["validation_loss"] for run in own]
    return {"system": system, "best_s": min(run["wall_s"] for run in own), **entry, "validation_losses": losses}


def main() -> int:
    """Measure and print."""
    arguments = arguments_of()
    record = hardware()
    try:
        with tempfile.TemporaryDirectory(prefix="codescent-small-job-") as folder:
            runs = measure(arguments, Path(folder))
    except SystemFailed as failure:
        say(str(failure))
        return 1
    theirs, *ours = (summary(runs, system) for system in ("nanogpt", *OURS))
    best = min(ours, key=lambda entry: entry["wall_s"])
    share = best["wall_s"] / theirs["wall_s"]
    claims = [
        must(f"wall clock of {best['system']}, share of nanoGPT's", share, 0.5, at_least=False),
        must("its validation loss after 2,000 steps", max(best["validation_losses"]), 1.89, at_least=False),
    ]
    header = ["system", "wall s median", "best", "ms a step", "s in steps", "s outside", "validation loss"]
    rows = [
        [
            entry["system"],
            f"{entry['wall_s']:.1f}",
            f"{entry['best_s']:.1f}",
            f"{1e3 * entry['step_s']:.1f}",
            f"{entry['in_steps_s']:.1f}",
            f"{entry['wall_s'] - entry['in_steps_s']:.1f}",
            " ".join(f"{loss:.4f}" for loss in sorted(set(entry["validation_losses"]))),
        ]
        for entry in (theirs, *ours)
    ]
    print(
        machine_line(record), f"nanoGPT: train.py {' '.join(NANOGPT_ARGUMENTS)}", "", table(header, rows), "", sep="\n"
    )
    print("\n".join(must_lines(claims)))
    result = {
        "benchmark": "small_job", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "peers": {"nanogpt": revision(arguments.nanogpt)}, "rounds": arguments.rounds,
        "overrides": arguments.overrides, "systems": [theirs, *ours], "ratio": 1 / share, "runs": runs, "musts": claims,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    finish(main)
