"""In: a CUDA device; a folder of weights (optional). Out: tokens/s of generation with a cache, beside `transformers`.
Does not need the network, and writes only into a temporary folder. `--device cpu` is for trying the script."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
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
from work import WORKS, Work, environment

sys.path.insert(0, str(ROOT))

from codescent import models
from codescent.base.errors import UserError
from codescent.huggingface import kind_of
from codescent.huggingface.folder import open_folder, parts_of
from codescent.huggingface.rounding import Rounding
from codescent.huggingface.write import shards, write_weights
from codescent.models.initialize import initial_values

NOTES = """A turn: {batch} texts, each of {new} new tokens after {prompt}, with a cache of keys and values; {weights}.
The likeliest token is taken, and no token ends a text. Both systems read the same folder of weights, in {precision}.
equal: new tokens of the first text that are those of codescent, up to the first other one."""

MOST_S, AT_ONCE = 3.0, 200
"""A text of so many tokens may take so many seconds."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the texts do not fit into the model's positions."""
    parsed = parser("Time the generation of tokens with a cache by codescent and by transformers, same weights.")
    parsed.add_argument("--weights", type=Path, metavar="DIR", help="Hugging Face folder; without it, random weights")
    parsed.add_argument("--work", choices=tuple(WORKS), default="gpt2-124m", help="sizes of the random weights")
    parsed.add_argument("--batch-size", type=positive, nargs="+", default=[1, 16], help="texts at once")
    parsed.add_argument("--prompt-len", type=positive, default=16, help="tokens of a prompt")
    parsed.add_argument("--new-tokens", type=positive, default=200, help="new tokens of a text")
    parsed.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of weights and products")
    parsed.add_argument("--static-cache", action="store_true", help="also transformers' compiled cache: a minute more")
    parsed.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    arguments = parsed.parse_args()
    needed = arguments.prompt_len + arguments.new_tokens
    if arguments.weights is None and needed > (most := WORKS[arguments.work].max_seq_len):
        parsed.error(f"--prompt-len and --new-tokens: {needed} tokens in all; {arguments.work} has {most} positions")
    return arguments


def sizes_of(work: Work) -> dict[str, Any]:
    """The sizes of a GPT-2 as keys of [model]."""
    names = ("num_layers", "num_heads", "hidden_dim", "vocab_size")
    return {name: getattr(work, name) for name in names} | {"seq_len": work.max_seq_len}


def write_folder(folder: Path, name: str, sizes: Mapping[str, Any]) -> Path:
    """A model of the kind `name` with random initial values, as a folder that both systems read. fp32."""
    shape = models.shape_of(name, sizes)
    kind = kind_of(name, shape)
    parameters = {parameter.name: parameter for parameter in models.parameters_of(name, shape)}
    parts = [part for of_one in parts_of(kind, shape).values() for part in of_one]
    zeros = {part.parameter.name for part in parts} - set(parameters)
    folder.mkdir()
    files = shards(parts, "F32", 1 << 40)
    write_weights(
        folder,
        files,
        "F32",
        lambda parameter, slices: initial_values(1337, parameters[parameter], slices),
        zeros,
        Rounding("fp32"),
    )
    sizes = {theirs: getattr(shape, ours) for ours, theirs in kind.sizes.items()}
    fixed = {key: alike[0] for key, alike in kind.fixed.items()}
    named = {"architectures": [kind.architectures(shape)[0]], "model_type": kind.model_type}
    settings = {**named, **sizes, **kind.write(shape), **fixed, "bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def systems_of(
    arguments: argparse.Namespace, weights: Path, vocab_size: int, batch_size: int, folder: Path
) -> list[PipedProgram]:
    """codescent, and transformers where it is installed. Each writes its first tokens into folder/NAME.json."""
    env = {**environment(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    words = ["--weights", str(weights), "--vocab-size", str(vocab_size), "--batch-size", str(batch_size)]
    for key in ("prompt_len", "new_tokens", "precision", "device"):
        words += [f"--{key.replace('_', '-')}", str(getattr(arguments, key))]
    wanted = {"codescent": ["--system", "codescent"]}
    if importlib.util.find_spec("transformers") is not None:
        wanted["transformers"] = ["--system", "transformers"]
        if arguments.static_cache:
            wanted["transformers-static"] = ["--system", "transformers", "--static-cache"]
    program = [sys.executable, str(Path(__file__).with_name("generate_step.py")), *words]
    return [
        PipedProgram(name, [*program, *more, "--write", str(folder / f"{name}.json")], env, folder)
        for name, more in wanted.items()
    ]


def entry(timing: Timing, measured: Measured, batch_size: int, new_tokens: int, folder: Path) -> dict[str, Any]:
    """The results of one system, as numbers."""
    ours, theirs = (json.loads((folder / f"{name}.json").read_text())[0] for name in ("codescent", timing.name))
    return {
        "system": timing.name,
        "batch_size": batch_size,
        "median_s": timing.median_s,
        "best_s": timing.best_s,
        "tokens_per_s": batch_size * new_tokens / timing.median_s,
        "times_transformers": measured.ratio(timing.name, "transformers"),
        "equal_tokens": len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs)))),
        "seconds": timing.seconds,
    }


def show(entries: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    header = ["system", "texts", "s median", "best", "tokens/s", "x transformers", "equal"]
    rows = [
        [
            row["system"],
            str(row["batch_size"]),
            f"{row['median_s']:.3f}",
            f"{row['best_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            ratio_text(row["times_transformers"]),
            str(row["equal_tokens"]),
        ]
        for row in entries
    ]
    return table(header, rows)


def measure(arguments: argparse.Namespace, weights: Path, folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The results of every system with each number of texts; and failures, by name."""
    vocab_size = open_folder(weights).shape.vocab_size
    entries: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for batch_size in arguments.batch_size:
        here = folder / f"texts-{batch_size}"
        here.mkdir()
        systems = systems_of(arguments, weights, vocab_size, batch_size, here)
        try:
            measured = interleave(systems, arguments.rounds, 1)
        except SystemFailed as failure:  # of codescent, to which all others are compared, or in a turn
            failures[f"{batch_size} texts"] = str(failure)
            continue
        failures |= {f"{name}, {batch_size} texts": why for name, why in measured.failures.items()}
        found = {timing.name: timing for timing in measured.timings}
        entries += [entry(one, measured, batch_size, arguments.new_tokens, here) for one in found.values()]
    return entries, failures


def musts_of(arguments: argparse.Namespace, entries: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the project asks of itself, on a device with CUDA."""
    ours = [row for row in entries if row["system"] == "codescent" and row["batch_size"] == 1]
    per_text = ours[0]["median_s"] * AT_ONCE / arguments.new_tokens if ours and arguments.device == "cuda" else None
    return [must(f"seconds for {AT_ONCE} tokens of one text", per_text, MOST_S, at_least=False, unit=" s")]


def main() -> int:
    """Measure and print. Returns 1 if a system failed, 2 if there is no device or the weights cannot be used."""
    arguments = arguments_of()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        say("error: no CUDA device here (torch.cuda.is_available() is False); nothing was measured")
        return 2
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    record = {**hardware(), "device": device, "cuda": torch.version.cuda}
    with tempfile.TemporaryDirectory(prefix="codescent-generate-") as folder:
        try:
            weights = arguments.weights or write_folder(
                Path(folder) / "weights", "gpt2", sizes_of(WORKS[arguments.work])
            )
            entries, failures = measure(arguments, weights.resolve(), Path(folder))
        except UserError as error:
            say("\n".join(f"error: {problem}" for problem in error.problems))
            return 2
    notes = NOTES.format(
        batch=" or ".join(map(str, arguments.batch_size)), new=arguments.new_tokens, prompt=arguments.prompt_len,
        weights=arguments.weights or f"{arguments.work} with random values", precision=arguments.precision,
    )  # fmt: skip
    musts = musts_of(arguments, list(entries))
    print(f"{device}, CUDA {record['cuda']}", machine_line(record), notes, "", sep="\n")
    if entries:
        print(show(entries), "", *must_lines(musts), sep="\n")
    if importlib.util.find_spec("transformers") is None:
        say("transformers is not installed: codescent was measured alone")
    for name, reason in failures.items():
        say(f"{name}: not measured: {reason}")
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    result = {
        "benchmark": "gpu_generate", "hardware": record, "arguments": given, "notes": notes.splitlines(),
        "systems": entries, "musts": musts, "failures": failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if failures else 0


if __name__ == "__main__":
    finish(main)
