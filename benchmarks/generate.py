"""In: nothing. Out: tokens/s of the engine beside `generate` of transformers on a CPU, with the same random weights.
Does not need a device (gpu_generate.py measures there) or the network, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_generate import write_folder
from measure import (
    Measured,
    SystemFailed,
    Timing,
    finish,
    hardware,
    interleave,
    machine_line,
    must,
    must_lines,
    parser,
    positive,
    ratio_text,
    say,
    table,
    write_json,
)
from systems import PipedProgram
from work import GPT2_124M, Work, environment

NOTES = """A turn generates all texts with a cache of keys and values; weights and cache in fp32, {threads} threads.
The likeliest token is taken, and no token ends a text. tokens/s: wanted new tokens, prompts included in the time.
one: {one}. mixed: {mixed}.
transformers: `generate`, prompts of different lengths padded on the left; all rows go on until the longest is done.
codescent: requests are added at once and leave by themselves; no page of an earlier turn is used again.
equal: texts whose tokens are those of transformers."""

MODELS = {
    "1m": Work(4, 4, 128, 1024, 512, 1, 1),
    "14m": Work(6, 6, 384, 8192, 512, 1, 1),
    "124m": GPT2_124M,
}
"""GPT-2 of these sizes; batch and length are those of the command line."""
SYSTEMS = ("codescent", "transformers")
LEAST = {"one": 1.5, "mixed": 3.0}
"""How many times the tokens/s of transformers the project asks of itself."""
MIXED_ROWS = 16


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the texts do not fit into the models' positions."""
    parsed = parser("Time the generation of texts on a CPU by codescent and by transformers, same weights.")
    parsed.add_argument("--model", choices=tuple(MODELS), nargs="+", default=["1m", "14m"], help="sizes of GPT-2")
    parsed.add_argument("--prompt-len", type=positive, default=128, help="tokens of a prompt; of the longest, if mixed")
    parsed.add_argument("--new-tokens", type=positive, default=128, help="new tokens; of the longest text, if mixed")
    parsed.add_argument("--threads", type=positive, default=2, help="threads of both")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    arguments = parsed.parse_args()
    needed = arguments.prompt_len + arguments.new_tokens
    for name in arguments.model:
        if needed > (most := MODELS[name].max_seq_len):
            parsed.error(f"--prompt-len and --new-tokens: {needed} tokens in all; {name} has {most} positions")
    return arguments


def programs(
    arguments: argparse.Namespace, weights: Path, vocab_size: int, case: str, folder: Path
) -> list[PipedProgram]:
    """Both systems. Each writes its first tokens into folder/NAME.json."""
    env = {**environment(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    env |= {"OMP_NUM_THREADS": str(arguments.threads)}
    words = [sys.executable, str(Path(__file__).with_name("generate_step.py")), "--weights", str(weights)]
    words += ["--vocab-size", str(vocab_size), "--precision", "fp32", "--device", "cpu"]
    for key in ("prompt_len", "new_tokens", "threads"):
        words += [f"--{key.replace('_', '-')}", str(getattr(arguments, key))]
    words += ["--mixed", "--batch-size", str(MIXED_ROWS)] if case == "mixed" else ["--batch-size", "1"]
    return [
        PipedProgram(name, [*words, "--system", name, "--write", str(folder / f"{name}.json")], env, folder)
        for name in SYSTEMS
    ]


def entry(model: str, case: str, timing: Timing, measured: Measured, folder: Path) -> dict[str, Any]:
    """The results of one system, as numbers."""
    ours, theirs = (json.loads((folder / f"{name}.json").read_text()) for name in SYSTEMS)
    tokens = sum(map(len, ours))
    return {
        "model": model,
        "case": case,
        "system": timing.name,
        "texts": len(ours),
        "new_tokens": tokens,
        "median_s": timing.median_s,
        "best_s": timing.best_s,
        "tokens_per_s": tokens / timing.median_s,
        "times_transformers": measured.ratio(timing.name, "transformers"),
        "equal_texts": sum(mine == other for mine, other in zip(ours, theirs, strict=True)),
        "seconds": timing.seconds,
    }


def show(entries: Sequence[Mapping[str, Any]]) -> str:
    """The results as a text table."""
    header = ["model", "texts", "system", "s median", "best", "tokens/s", "x transformers", "equal"]
    rows = [
        [
            row["model"],
            row["case"],
            row["system"],
            f"{row['median_s']:.3f}",
            f"{row['best_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            ratio_text(row["times_transformers"]),
            f"{row['equal_texts']} of {row['texts']}",
        ]
        for row in entries
    ]
    return table(header, rows)


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The results of both systems with each model and case; and failures, by name."""
    entries: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for model in arguments.model:
        weights = write_folder(folder / model, MODELS[model])
        for case in LEAST:
            here = folder / f"{model}-{case}"
            here.mkdir()
            systems = programs(arguments, weights, MODELS[model].vocab_size, case, here)
            try:
                measured = interleave(systems, arguments.rounds, 1)
            except SystemFailed as failure:
                failures[f"{model}, {case}"] = str(failure)
                continue
            failures |= {f"{name}, {model}, {case}": why for name, why in measured.failures.items()}
            if not measured.failures:
                entries += [entry(model, case, timing, measured, here) for timing in measured.timings]
    return entries, failures


def musts_of(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the project asks of itself, for each model and case."""
    return [
        must(f"{row['model']}, {row['case']}: tokens/s, x transformers", row["times_transformers"], LEAST[row["case"]])
        for row in entries
        if row["system"] == "codescent"
    ]


def main() -> int:
    """Measure and print. Returns 1 if a system failed."""
    arguments, record = arguments_of(), hardware()
    with tempfile.TemporaryDirectory(prefix="codescent-generate-") as folder:
        entries, failures = measure(arguments, Path(folder))
    sizes = arguments.prompt_len, arguments.new_tokens
    one = f"a text of {sizes[1]} new tokens after {sizes[0]}"
    mixed = f"{MIXED_ROWS} texts, prompts of up to {sizes[0]} and up to {sizes[1]} new tokens, in sixteenths"
    notes = NOTES.format(threads=arguments.threads, one=one, mixed=mixed)
    musts = musts_of(entries)
    print(machine_line(record), notes, "", sep="\n")
    if entries:
        print(show(entries), "", *must_lines(musts), sep="\n")
    for name, reason in failures.items():
        say(f"{name}: not measured: {reason}")
    result = {
        "benchmark": "generate", "hardware": record, "arguments": {**vars(arguments), "json": None},
        "notes": notes.splitlines(), "systems": entries, "musts": musts, "failures": failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if failures else 0


if __name__ == "__main__":
    finish(main)
