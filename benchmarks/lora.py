"""In: sizes of a GPT-2, a rank. Out: seconds and memory of a fine-tuning step: our adapters, peft's, all weights.
Does not contain code of peft, and writes only into a temporary folder (and the --json file)."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import (
    Measured,
    System,
    SystemFailed,
    chosen,
    finish,
    hardware,
    interleave,
    machine_line,
    must,
    must_lines,
    not_negative,
    parser,
    positive,
    say,
    write_json,
)  # fmt: skip
from peers import memory_ratio, rows, show
from systems import PipedProgram, Watched
from work import WORKS, Work, environment, training, write_tokens

NAMES = (
    "peft-fp32",
    "codescent-lora-fp32",
    "codescent-full-fp32",
    "peft-bf16",
    "codescent-lora-bf16",
    "codescent-full-bf16",
)

NOTES = """A step of every system: next batch, forward, backward, {clip}AdamW, gradients freed.
{tokens} tokens, {threads} threads; adapters of rank {rank} on every matrix of the blocks; GFLOP/s as if all weights
were trained.
peft: adapters in transformers' GPT2LMHeadModel, AdamW (fused); bf16: frozen weights in bf16, torch's autocast.
codescent: `codescent train` with lora.rank, timed from outside, metrics and log at every step.
full: the same without adapters, all weights trained."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time a step of fine-tuning GPT-2: with peft's adapters, with ours, and with all weights trained.")
    parsed.add_argument("--work", choices=tuple(WORKS), default="gpt2-124m", help="sizes of model and step")
    parsed.add_argument("--only", metavar="NAME,...", help=f"names of systems, or beginnings: {', '.join(NAMES)}")
    parsed.add_argument("--rank", type=positive, default=8, help="of the adapters")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    parsed.add_argument("--steps", type=positive, default=1, help="steps per turn")
    parsed.add_argument("--threads", type=positive, default=2, help="threads of every system")
    parsed.add_argument("--clip", type=not_negative, default=0.0, help="gradient norm to clip to; 0: none")
    parsed.add_argument("--warmup", type=positive, default=2, help="steps before the first that counts")
    arguments = parsed.parse_args()
    arguments.names = chosen(parsed, arguments.only, NAMES)
    return arguments


def system(name: str, arguments: argparse.Namespace, work: Work, folder: Path, tokens: Path) -> System:
    """The system of this name, not started."""
    *who, precision = name.split("-")
    common = ["--threads", str(arguments.threads), "--clip", str(arguments.clip), "--warmup", str(arguments.warmup)]
    if who == ["peft"]:
        argv = [
            sys.executable, str(Path(__file__).with_name("peer_step.py")),
            "--peer", "peft", "--tokens", str(tokens), "--work", work.text(), "--precision", precision,
            "--rank", str(arguments.rank), *common,
        ]  # fmt: skip
        return PipedProgram(name, argv, environment(), folder)
    run = folder / f"run-{name}"
    words = [f"lora.rank={arguments.rank}"] if who[1] == "lora" else []
    argv = training(
        work, tokens, run,
        f"train.precision={precision}",
        f"train.num_threads={arguments.threads}",
        f"optimizer.max_grad_norm={arguments.clip}",
        *words,
    )  # fmt: skip
    return Watched(name, argv, environment(), folder, run / "metrics.csv", arguments.warmup + 1)


def musts(measured: Measured) -> list[dict[str, Any]]:
    """The requirements: adapters are as fast and as small as peft's, and faster and smaller than full fine-tuning."""
    found = []
    for precision in ("fp32", "bf16"):
        ours, peft, full = f"codescent-lora-{precision}", f"peft-{precision}", f"codescent-full-{precision}"
        found += [
            must(f"{precision}, times peft", measured.ratio(ours, peft), 1),
            must(f"{precision}, times all weights", measured.ratio(ours, full), 1),
            must(
                f"peak memory, {precision}, over peft's",
                memory_ratio(measured.find(ours), measured.find(peft)),
                1,
                at_least=False,
            ),
            must(
                f"peak memory, {precision}, over that of all weights",
                memory_ratio(measured.find(ours), measured.find(full)),
                1,
                at_least=False,
            ),
        ]
    return found


def main() -> int:
    """Measure and print. Returns 1 if a system failed, else 0, even if a requirement does not hold."""
    arguments = arguments_of()
    work = WORKS[arguments.work]
    record = hardware()
    try:
        with tempfile.TemporaryDirectory(prefix="codescent-lora-") as folder:
            tokens = write_tokens(Path(folder), work.vocab_size)
            systems = [system(name, arguments, work, Path(folder), tokens) for name in arguments.names]
            measured = interleave(systems, arguments.rounds, arguments.steps)
    except SystemFailed as failure:
        say(str(failure))
        return 1
    notes = NOTES.format(
        clip="clipping, " if arguments.clip else "", tokens=f"{work.batch_size} x {work.seq_len}",
        threads=arguments.threads, rank=arguments.rank,
    )  # fmt: skip
    entries, claims = rows(measured, work, systems[0].name), musts(measured)
    print(machine_line(record), notes, "", show(entries, systems[0].name), "", sep="\n")
    print("\n".join(must_lines(claims)))
    for name, reason in measured.failures.items():
        say(f"{name} was not measured: {reason}")
    result = {
        "benchmark": "lora",
        "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "work": vars(work), "rank": arguments.rank, "threads": arguments.threads, "clip": arguments.clip,
        "rounds": arguments.rounds, "steps_per_turn": arguments.steps, "notes": notes.splitlines(),
        "systems": entries, "musts": claims, "failures": measured.failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if measured.failures else 0


if __name__ == "__main__":
    finish(main)
