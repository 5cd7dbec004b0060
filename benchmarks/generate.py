"""In: nothing. Out: tokens/s of the engine beside `generate` of transformers on a CPU, with the same random weights.
Does not need a device (gpu_generate.py measures there) or the network, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_generate import sizes_of, write_folder
from measure import (
    ROOT,
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

sys.path.insert(0, str(ROOT))

from codescent import models
from codescent.launch.huge_pages import with_huge_pages

NOTES = """A turn generates all texts with a cache of keys and values; {threads} threads.
Weights and cache have the dtype that is shown.
The likeliest token is taken, and no token ends a text. tokens/s: wanted new tokens, prompts included in the time.
one: {one}. mixed: {mixed}.
transformers: `generate`, prompts of different lengths padded on the left; all rows go on until the longest is done.
codescent: requests are added at once and leave by themselves; no page of an earlier turn is used again.
equal: texts whose tokens are those of transformers. With rounding to bf16, two tokens may be equally likely.
of floor: of one text's time, how much it takes at least to read all weights once for each token, at the GB/s with which
the same threads add up the numbers of a tensor as large as these weights."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "1m": ("gpt2", sizes_of(Work(4, 4, 128, 1024, 512, 1, 1))),
    "14m": ("gpt2", sizes_of(Work(6, 6, 384, 8192, 512, 1, 1))),
    "124m": ("gpt2", sizes_of(GPT2_124M)),
    "llama_12m": ("llama", {
        "num_layers": 6, "num_heads": 6, "num_kv_heads": 2, "hidden_dim": 384, "ffn_dim": 1024, "vocab_size": 8192,
        "seq_len": 512, "tie_head": True,
    }),
    "llama_135m": ("llama", {
        "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "hidden_dim": 576, "ffn_dim": 1536, "vocab_size": 49152,
        "seq_len": 2048, "tie_head": True,
    }),
}  # fmt: skip
"""Kind and sizes, by their parameters; the last one has those of SmolLM2-135M."""
SYSTEMS = ("codescent", "transformers")
BYTES = {"fp32": 4, "bf16": 2}
LEAST = {"one": 1.5, "mixed": 3.0}
"""How many times the tokens/s of transformers the project asks of itself."""
MIXED_ROWS = 16
READINGS = 20
"""Of a tensor as large as the weights; the fastest counts."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the texts do not fit into the models' positions."""
    parsed = parser("Time the generation of texts on a CPU by codescent and by transformers, same weights.")
    parsed.add_argument("--model", choices=tuple(MODELS), nargs="+", default=["1m", "14m"], help="kinds and sizes")
    parsed.add_argument(
        "--precision", choices=tuple(BYTES), nargs="+", default=list(BYTES), help="of weights and cache"
    )
    parsed.add_argument("--prompt-len", type=positive, default=128, help="tokens of a prompt; of the longest, if mixed")
    parsed.add_argument("--new-tokens", type=positive, default=128, help="new tokens; of the longest text, if mixed")
    parsed.add_argument("--threads", type=positive, default=2, help="threads of both")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    arguments = parsed.parse_args()
    needed = arguments.prompt_len + arguments.new_tokens
    for name in arguments.model:
        if needed > (most := MODELS[name][1]["seq_len"]):
            parsed.error(f"--prompt-len and --new-tokens: {needed} tokens in all; {name} has {most} positions")
    return arguments


def floor_s(model: str, precision: str, threads: int) -> float:
    """Seconds to read all weights that a token of one text needs, by so many threads of this process."""
    name, sizes = MODELS[model]
    parameters = models.parameters_of(name, models.shape_of(name, sizes))
    read = sum(math.prod(one.shape) for one in parameters if one.name != "pos.weight")
    torch.set_num_threads(threads)
    weights = torch.ones(read * BYTES[precision] // 4)
    times = list[float]()
    for _ in range(READINGS):
        begin = time.perf_counter()
        weights.sum()
        times.append(time.perf_counter() - begin)
    return min(times)


@dataclass(frozen=True)
class Task:
    """What both systems do: a model, a precision, and "one" text or "mixed" ones."""

    model: str
    precision: str
    case: str

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.model}, {self.precision}, {self.case}"


def programs(arguments: argparse.Namespace, weights: Path, task: Task, folder: Path) -> list[PipedProgram]:
    """Both systems. Each writes its first tokens into folder/NAME.json."""
    env = {**environment(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    env |= {"OMP_NUM_THREADS": str(arguments.threads)}
    words = [sys.executable, str(Path(__file__).with_name("generate_step.py")), "--weights", str(weights)]
    words += ["--vocab-size", str(MODELS[task.model][1]["vocab_size"])]
    words += ["--precision", task.precision, "--device", "cpu"]
    for key in ("prompt_len", "new_tokens", "threads"):
        words += [f"--{key.replace('_', '-')}", str(getattr(arguments, key))]
    words += ["--mixed", "--batch-size", str(MIXED_ROWS)] if task.case == "mixed" else ["--batch-size", "1"]
    envs = {"codescent": with_huge_pages(env), "transformers": env}  # the commands of codescent do that themselves
    return [
        PipedProgram(name, [*words, "--system", name, "--write", str(folder / f"{name}.json")], envs[name], folder)
        for name in SYSTEMS
    ]


def entry(task: Task, timing: Timing, measured: Measured, folder: Path, least_s: float) -> dict[str, Any]:
    """The results of one system, as numbers. `least_s`: seconds to read all weights once."""
    ours, theirs = (json.loads((folder / f"{name}.json").read_text()) for name in SYSTEMS)
    tokens = sum(map(len, ours))
    return {
        **asdict(task),
        "system": timing.name,
        "texts": len(ours),
        "new_tokens": tokens,
        "median_s": timing.median_s,
        "best_s": timing.best_s,
        "tokens_per_s": tokens / timing.median_s,
        "times_transformers": measured.ratio(timing.name, "transformers"),
        "of_floor": tokens * least_s / timing.median_s if task.case == "one" else None,
        "equal_texts": sum(mine == other for mine, other in zip(ours, theirs, strict=True)),
        "seconds": timing.seconds,
    }


def show(entries: Sequence[Mapping[str, Any]]) -> str:
    """The results as a text table."""
    header = [
        "model",
        "dtype",
        "texts",
        "system",
        "s median",
        "best",
        "tokens/s",
        "x transformers",
        "of floor",
        "equal",
    ]
    rows = [
        [
            row["model"],
            row["precision"],
            row["case"],
            row["system"],
            f"{row['median_s']:.3f}",
            f"{row['best_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            ratio_text(row["times_transformers"]),
            "" if row["of_floor"] is None else f"{row['of_floor']:.0%}",
            f"{row['equal_texts']} of {row['texts']}",
        ]
        for row in entries
    ]
    return table(header, rows)


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The results of both systems with each task; and failures, by name."""
    entries: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for model in arguments.model:
        weights = write_folder(folder / model, *MODELS[model])
        for task in (Task(model, precision, case) for precision in arguments.precision for case in LEAST):
            here = folder / f"{model}-{task.precision}-{task.case}"
            here.mkdir()
            least_s = floor_s(model, task.precision, arguments.threads)
            try:
                measured = interleave(programs(arguments, weights, task, here), arguments.rounds, 1)
            except SystemFailed as failure:
                failures[task.label] = str(failure)
                continue
            failures |= {f"{name}, {task.label}": why for name, why in measured.failures.items()}
            if not measured.failures:
                entries += [entry(task, timing, measured, here, least_s) for timing in measured.timings]
    return entries, failures


def musts_of(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the project asks of itself, for each task."""
    return [
        must(
            f"{Task(row['model'], row['precision'], row['case']).label}: tokens/s, x transformers",
            row["times_transformers"],
            LEAST[row["case"]],
        )
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
