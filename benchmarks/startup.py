"""In: nothing. Out: seconds of `codescent --help`, `config` and `plan`, and whether they import torch.
Does not train, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json
from work import codescent, environment

COMMANDS: dict[str, tuple[str, ...]] = {
    "python -c pass": (),
    "codescent --help": ("--help",),
    "codescent config gpt2_124m": ("config", "gpt2_124m"),
    "codescent plan gpt2_124m": ("plan", "gpt2_124m"),
    "codescent plan llama3_405b, priced": ("plan", "llama3_405b", "--ranks", "16384", "--cluster", "h100-sxm"),
}
MOST_S = {"codescent --help": 0.4, "codescent plan llama3_405b, priced": 2.5}
"""What a command may take. The last one plans and prices 16,384 ranks."""

WITNESS = """
import sys
from codescent.__main__ import main
sys.argv = ["codescent", *sys.argv[1:]]
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
"""A program that runs a subcommand and then prints whether torch was imported."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time `codescent --help`, `config` and `plan`, from the start of the process to its end.")
    parsed.add_argument("--rounds", type=positive, default=9, help="runs of each command, in turns")
    return parsed.parse_args()


def seconds_of(command: list[str], folder: Path) -> float:
    """The wall-clock seconds of a command. Raises CalledProcessError if it fails."""
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)
    return time.perf_counter() - begun


def loads_torch(words: tuple[str, ...], folder: Path) -> bool:
    """Whether a subcommand imports torch."""
    command = [sys.executable, "-c", WITNESS, *words]
    done = subprocess.run(command, cwd=folder, env=environment(), check=False, capture_output=True, text=True)
    return done.stderr.split()[-1] == "True"


def main() -> int:
    """Measure and print."""
    arguments = arguments_of()
    record = hardware()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="codescent-startup-") as name:
        folder = Path(name)
        for number in range(arguments.rounds + 1):
            for text, words in COMMANDS.items():
                taken_s = seconds_of(codescent(*words) if words else [sys.executable, "-c", "pass"], folder)
                if number > 0:  # the first round only fills the file cache
                    times[text].append(taken_s)
        torch_loaded = {text: loads_torch(words, folder) for text, words in COMMANDS.items() if words}
    medians = {text: statistics.median(taken) for text, taken in times.items()}
    entries: list[dict[str, Any]] = [
        {
            "command": text,
            "median_s": medians[text],
            "best_s": min(taken),
            "loads_torch": torch_loaded.get(text, False),
            "seconds": taken,
        }
        for text, taken in times.items()
    ]
    claims = [must(text, medians[text], most, at_least=False, unit=" s") for text, most in MOST_S.items()]
    rows = [
        [
            entry["command"],
            f"{entry['median_s']:.3f}",
            f"{entry['best_s']:.3f}",
            "yes" if entry["loads_torch"] else "no",
        ]
        for entry in entries
    ]
    print(machine_line(record), "", table(["command", "s median", "best", "torch"], rows), "", sep="\n")
    print("\n".join(must_lines(claims)))
    for text, loaded in torch_loaded.items():
        if loaded:
            say(f"{text} imports torch, but does not need it")
    write_json(arguments.json, {"benchmark": "startup", "hardware": record, "commands": entries, "musts": claims})
    return 0


if __name__ == "__main__":
    finish(main)
