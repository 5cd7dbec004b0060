"""In: examples/grpo. Out: how the reward of its small model rises, and in how many seconds, on ranks of this machine.
Does not compare with another program, and writes only into a temporary folder (and the --json file)."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json
from work import codescent, environment

EXAMPLE = ROOT / "examples" / "grpo"
LAST = 20
"""The reward at the end is a mean over so many steps."""
SHOWN = 8
"""Rows of the table."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Train examples/grpo/reverse.toml: a model learns to write words backwards from rewards alone.")
    parsed.add_argument("--ranks", type=positive, default=2, help="ranks of parallel.dp_replicate")
    parsed.add_argument("--steps", type=positive, help="instead of those of the example")
    return parsed.parse_args()


def trained(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The rows of metrics, and the seconds of the command. Raises CalledProcessError if it fails."""
    place = shutil.copytree(EXAMPLE, folder / "grpo")
    steps = [] if arguments.steps is None else [f"train.num_steps={arguments.steps}"]
    words = ["train", "reverse.toml", f"parallel.ranks={arguments.ranks}", "train.num_threads=1", *steps]
    begun = time.perf_counter()
    subprocess.run(codescent(*words), cwd=place, env=environment(), check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    lines = (place / "runs" / "reverse" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], seconds


def main() -> int:
    """Measure and print. Returns 1 if the run failed, else 0, even if a requirement does not hold."""
    arguments, record = arguments_of(), hardware()
    with tempfile.TemporaryDirectory(prefix="codescent-rewards-") as name:
        try:
            rows, seconds = trained(arguments, Path(name))
        except subprocess.CalledProcessError as error:
            say(f"the run failed: {error.stdout}{error.stderr}")
            return 1
    last = [row["reward"] for row in rows[-LAST:]]
    reward = sum(last) / len(last)
    claims = [
        must(f"mean reward of the last {LAST} steps", reward, 0.9),
        must("minutes of the whole command", seconds / 60, 10, at_least=False),
    ]
    validated = [row for row in rows if row["val_reward"] is not None]
    shown = validated[:: max(1, len(validated) // SHOWN)]
    shown += [] if shown and shown[-1] is validated[-1] else validated[-1:]
    cells = [
        [str(row["step"]), f"{row['reward']:.3f}", f"{row['val_reward']:.3f}", f"{row['step_s']:.3f}"] for row in shown
    ]
    print(machine_line(record), "", table(["step", "reward", "of words not seen", "s"], cells), "", sep="\n")
    print("\n".join(must_lines(claims)))
    kept = [{key: row[key] for key in ("step", "reward", "val_reward", "step_s", "data_s")} for row in rows]
    result = {"benchmark": "rewards", "hardware": record, "ranks": arguments.ranks, "seconds": seconds}
    write_json(arguments.json, {**result, "rows": kept, "musts": claims})
    return 0


if __name__ == "__main__":
    finish(main)
