"""In: checkouts of nanoGPT and llm.c (optional), a CUDA device. Out: tokens/s, MFU, peak memory of GPT-2 124M in bf16.
Does not need the network, a corpus or a config file, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llmc import OnCuda
from measure import (
    ROOT,
    Checkout,
    SystemFailed,
    Timing,
    finish,
    hardware,
    machine_line,
    not_negative,
    parser,
    positive,
    revision,
    say,
    table,
    whole,
    write_json,
)
from systems import PipedProgram
from work import GPT2_124M, Work, environment, write_tokens

sys.path.insert(0, str(ROOT))

from codescent.plan.device_specs import spec_of
from codescent.train.machine import peak_flops_per_s

NOTES = """A step: next batch, forward, backward, {clip}AdamW (fused); {batch} x {seq} tokens, vocabulary {vocab}.
nanoGPT: its model compiled whole, torch's autocast, fp32 weights. codescent: bf16 weights, fp32 masters, moments.
llm.c: bf16 weights, fp32 masters, its own clock of a step, always clipped; started anew for each turn.
MFU: (6 N + 12 layers x width x context) tokens/s over a peak, N = {parameters:,}.
Peak (published): {published}. Peak (measured): {measured:.0f} TFLOP/s of a square product in bf16."""

WAYS = ("none", "blocks", "model")


def ways(text: str) -> list[str]:
    """Argument type: values of train.compile, with commas."""
    found = text.split(",")
    if wrong := [way for way in found if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(WAYS)}")
    return found


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the checkout is not one of nanoGPT."""
    parsed = parser("Time a training step of GPT-2 124M on a CUDA device: nanoGPT compiled, llm.c, and codescent.")
    parsed.add_argument("--nanogpt", type=Checkout("nanoGPT", "model.py"), metavar="DIR", help="checkout of nanoGPT")
    llmc = Checkout("llm.c", "train_gpt2.cu", "Makefile")
    parsed.add_argument("--llmc", type=llmc, metavar="DIR", help="checkout of llm.c; needs make and nvcc")
    parsed.add_argument("--batch-size", type=positive, default=16, help="samples per step")
    parsed.add_argument("--seq-len", type=positive, default=1024, help="tokens per sample")
    parsed.add_argument("--vocab-size", type=positive, default=50304, help="of both; 50257 is not a multiple of 8")
    parsed.add_argument(
        "--compile", type=ways, default="blocks,none", help="values of codescent's train.compile, with commas"
    )
    parsed.add_argument("--head-chunk-tokens", type=whole, help="codescent's train.head_chunk_tokens; default: auto")
    parsed.add_argument("--clip", type=not_negative, default=1.0, help="gradient norm to clip to; 0: no clipping")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    parsed.add_argument("--steps", type=positive, default=20, help="steps per turn")
    parsed.add_argument("--warmup", type=positive, default=5, help="steps before the first that counts")
    parsed.add_argument("--peak-tflops", type=positive, help="bf16 peak of the device, if this script lacks it")
    return parsed.parse_args()


def published_peak(arguments: argparse.Namespace, name: str) -> tuple[float | None, str]:
    """The device's bf16 peak in FLOP/s and its origin: --peak-tflops, or a data sheet; None: neither has it."""
    if arguments.peak_tflops:
        return arguments.peak_tflops * 1e12, f"{arguments.peak_tflops:g} TFLOP/s, as given"
    spec = spec_of(name)
    if spec is None or spec.bf16 is None:
        return None, f"no entry for {name} in codescent/plan/device_specs.py; give --peak-tflops"
    return spec.bf16, f"{spec.bf16 / 1e12:g} TFLOP/s, {spec.name}: {spec.source}"


def systems_of(arguments: argparse.Namespace, work: Work, folder: Path) -> list[PipedProgram | OnCuda]:
    """nanoGPT and llm.c if their checkouts are given, and codescent with each value of train.compile."""
    tokens = write_tokens(folder, work.vocab_size)
    common = [
        "--tokens", str(tokens), "--work", work.text(), "--precision", "bf16", "--device", "cuda",
        "--clip", str(arguments.clip), "--warmup", str(arguments.warmup),
    ]  # fmt: skip
    env = {**environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    here = Path(__file__).parent
    systems: list[PipedProgram | OnCuda] = []
    if arguments.nanogpt:
        peer = ["--peer", "nanogpt", "--checkout", str(arguments.nanogpt), "--compile"]
        systems.append(
            PipedProgram("nanogpt", [sys.executable, str(here / "peer_step.py"), *common, *peer], env, folder)
        )
    if arguments.llmc:
        systems.append(OnCuda(arguments.llmc, work, arguments.warmup, folder))
    for way in arguments.compile:
        chunk = arguments.head_chunk_tokens
        own = ["--compile", way, *([] if chunk is None else ["--head-chunk-tokens", str(chunk)])]
        argv = [sys.executable, str(here / "codescent_step.py"), *common, *own]
        systems.append(PipedProgram(f"codescent-{way}", argv, env, folder))
    return systems


def measure(systems: Sequence[PipedProgram | OnCuda], rounds: int, steps: int) -> tuple[list[Timing], dict[str, str]]:
    """Measure the systems in turns, all there at once. Returns seconds and peak device memory; and failures."""
    timings: dict[str, Timing] = {}
    failures: dict[str, str] = {}
    try:
        for system in systems:
            say(f"starting {system.name}")
            try:
                system.start()
            except SystemFailed as failure:
                failures[system.name] = str(failure)
                continue
            timings[system.name] = Timing(system.name, 0)
        alive = [system for system in systems if system.name in timings]
        for number in range(rounds):
            for system in alive if number % 2 == 0 else reversed(alive):
                seconds = system.turn(steps)
                timings[system.name].seconds.append(seconds)
                say(f"round {number + 1}/{rounds}  {system.name:20} {1e3 * seconds:8.2f} ms")
        for system in alive:
            if isinstance(system, OnCuda):  # it does not say how much memory it has
                continue
            system.send("memory")
            timings[system.name].peak_bytes = int(system.number())
    finally:
        for system in systems:
            system.stop()
    return list(timings.values()), failures


def entry(timing: Timing, work: Work, published: float | None, measured: float, reference: Timing) -> dict[str, Any]:
    """The results of one system, as numbers. MFU is relative to each of two peaks, in FLOP/s."""
    per_token = 6 * work.num_parameters + 12 * work.num_layers * work.hidden_dim * work.seq_len
    tokens_per_s = work.tokens / timing.median_s
    return {
        "system": timing.name,
        "median_s": timing.median_s,
        "best_s": timing.best_s,
        "tokens_per_s": tokens_per_s,
        "mfu_published": None if published is None else per_token * tokens_per_s / published,
        "mfu_measured": per_token * tokens_per_s / measured,
        "ratio": reference.median_s / timing.median_s,
        "peak_memory_bytes": timing.peak_bytes or None,
        "seconds": timing.seconds,
    }


def show(entries: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    header = ["system", "ms median", "best", "tokens/s", "MFU (published)", "MFU (measured)"]
    header += [f"x {entries[0]['system']}", "peak MiB on device"]
    rows = [
        [
            row["system"],
            f"{1e3 * row['median_s']:.2f}",
            f"{1e3 * row['best_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            "-" if row["mfu_published"] is None else f"{row['mfu_published']:.3f}",
            f"{row['mfu_measured']:.3f}",
            f"{row['ratio']:.2f}",
            "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        for row in entries
    ]
    return table(header, rows)


def main() -> int:
    """Measure and print. Returns 1 if a system failed, 2 if there is no CUDA device, else 0."""
    arguments = arguments_of()
    if not torch.cuda.is_available():
        say("error: no CUDA device here (torch.cuda.is_available() is False); nothing was measured")
        return 2
    device = torch.cuda.get_device_name()
    record = {**hardware(), "device": device, "cuda": torch.version.cuda}
    published, published_text = published_peak(arguments, device)
    measured = peak_flops_per_s(torch.device("cuda"), "bf16")
    work = replace(
        GPT2_124M, vocab_size=arguments.vocab_size, batch_size=arguments.batch_size, seq_len=arguments.seq_len,
        max_seq_len=max(GPT2_124M.max_seq_len, arguments.seq_len),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="codescent-gpu-") as folder:
        systems = systems_of(arguments, work, Path(folder))
        timings, failures = measure(systems, arguments.rounds, arguments.steps)
    entries = [entry(timing, work, published, measured, timings[0]) for timing in timings]
    notes = NOTES.format(
        clip="clipping, " if arguments.clip else "", batch=work.batch_size, seq=work.seq_len, vocab=work.vocab_size,
        published=published_text, measured=measured / 1e12, parameters=work.num_parameters,
    )  # fmt: skip
    print(f"{device}, CUDA {record['cuda']}", machine_line(record), notes, "", sep="\n")
    if entries:
        print(show(entries))
    for name, reason in failures.items():
        say(f"{name} was not measured: {reason}")
    peers = {"nanogpt": arguments.nanogpt, "llmc": arguments.llmc}
    result = {
        "benchmark": "gpu_step", "hardware": record, "work": vars(work), "clip": arguments.clip,
        "peers": {name: path and revision(path) for name, path in peers.items()},
        "published_flops_per_s": published, "measured_flops_per_s": measured,
        "rounds": arguments.rounds, "steps_per_turn": arguments.steps,
        "notes": notes.splitlines(), "systems": entries, "failures": failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if failures else 0


if __name__ == "__main__":
    finish(main)
