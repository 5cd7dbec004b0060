"""In: nanoGPT's checkout (optional), a CUDA device. Out: tokens/s, MFU, peak memory of GPT-2 124M, context 1024, bf16.
Does not need the network, a corpus or a config file, and writes only into a temporary folder."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import (
    Checkout,
    SystemFailed,
    Timing,
    finish,
    hardware,
    machine_line,
    parser,
    positive,
    revision,
    say,
    table,
    write_json,
)
from systems import PipedProgram
from work import GPT2_124M, Work, environment, write_tokens

PEAK_FLOPS_PER_S = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}
"""Peak FLOP/s by a part of the device's name: dense bf16 with fp32 sums, from NVIDIA's data sheets (SXM parts)."""

NOTES = """A step: next batch, forward, backward, {clip}AdamW (fused); {batch} x {seq} tokens, vocabulary {vocab}.
nanoGPT: its model compiled whole, torch's autocast, fp32 weights. codescent: bf16 weights, fp32 masters, moments.
MFU: (6 N + 12 layers x width x context) tokens/s over {peak:.0f} TFLOP/s ({source}), N = {parameters:,}."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the checkout is not one of nanoGPT."""
    parsed = parser("Time a full training step of GPT-2 124M on a CUDA device: nanoGPT compiled, and codescent.")
    parsed.add_argument("--nanogpt", type=Checkout("nanoGPT", "model.py"), metavar="DIR", help="checkout of nanoGPT")
    parsed.add_argument("--batch-size", type=positive, default=16, help="samples per step")
    parsed.add_argument("--seq-len", type=positive, default=1024, help="tokens per sample")
    parsed.add_argument("--vocab-size", type=positive, default=50304, help="of both; 50257 is not a multiple of 8")
    parsed.add_argument("--compile", default="blocks,none", help="values of codescent's train.compile, with commas")
    parsed.add_argument("--head-chunk-tokens", type=int, default=1024, help="codescent's train.head_chunk_tokens")
    parsed.add_argument("--clip", type=float, default=1.0, help="gradient norm to clip to; 0: no clipping")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    parsed.add_argument("--steps", type=positive, default=20, help="steps per turn")
    parsed.add_argument("--warmup", type=positive, default=5, help="steps before the first that counts")
    parsed.add_argument("--peak-tflops", type=float, help="bf16 peak of the device, if this script lacks it")
    return parsed.parse_args()


def peak_of(arguments: argparse.Namespace, name: str) -> tuple[float, str]:
    """The device's bf16 peak in FLOP/s, and its origin: --peak-tflops, a data sheet or a measured matrix product."""
    if arguments.peak_tflops:
        return arguments.peak_tflops * 1e12, "as given"
    for part, peak in PEAK_FLOPS_PER_S.items():
        if part in re.split(r"[\s-]+", name):
            return peak, "data sheet"
    return measured_peak(), "measured, 8192 cubed"


def measured_peak() -> float:
    """FLOP/s of the best of ten bf16 products of 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best_ms = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.mm(a, b)
        end.record()
        torch.cuda.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return 2 * 8192**3 / (best_ms / 1e3)


def systems_of(arguments: argparse.Namespace, work: Work, folder: Path) -> list[PipedProgram]:
    """nanoGPT if its checkout is given, and codescent with each value of train.compile."""
    tokens = write_tokens(folder, work.vocab_size)
    common = [
        "--tokens", str(tokens), "--work", work.text(), "--precision", "bf16", "--device", "cuda",
        "--clip", str(arguments.clip), "--warmup", str(arguments.warmup),
    ]  # fmt: skip
    env = {**environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    here = Path(__file__).parent
    systems = []
    if arguments.nanogpt:
        peer = ["--peer", "nanogpt", "--checkout", str(arguments.nanogpt), "--compile"]
        systems.append(
            PipedProgram("nanogpt", [sys.executable, str(here / "peer_step.py"), *common, *peer], env, folder)
        )
    for way in arguments.compile.split(","):
        own = ["--compile", way, "--head-chunk-tokens", str(arguments.head_chunk_tokens)]
        argv = [sys.executable, str(here / "codescent_step.py"), *common, *own]
        systems.append(PipedProgram(f"codescent-{way}", argv, env, folder))
    return systems


def measure(systems: list[PipedProgram], rounds: int, steps: int) -> tuple[list[Timing], dict[str, str]]:
    """Measure the systems in turns, all running at once. Returns seconds and peak device memory; and failures."""
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
            system.send("memory")
            timings[system.name].peak_bytes = int(system.number())
    finally:
        for system in systems:
            system.stop()
    return list(timings.values()), failures


def entry(timing: Timing, work: Work, peak: float, reference: Timing) -> dict[str, Any]:
    """The results of one system, as numbers."""
    per_token = 6 * work.num_parameters + 12 * work.num_layers * work.hidden_dim * work.seq_len
    tokens_per_s = work.tokens / timing.median_s
    return {
        "system": timing.name,
        "median_s": timing.median_s,
        "best_s": timing.best_s,
        "tokens_per_s": tokens_per_s,
        "mfu": per_token * tokens_per_s / peak,
        "ratio": reference.median_s / timing.median_s,
        "peak_memory_bytes": timing.peak_bytes,
        "seconds": timing.seconds,
    }


def show(entries: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    header = ["system", "ms median", "best", "tokens/s", "MFU", f"x {entries[0]['system']}", "peak MiB on device"]
    rows = [
        [
            row["system"],
            f"{1e3 * row['median_s']:.2f}",
            f"{1e3 * row['best_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['peak_memory_bytes'] / 2**20:,.0f}",
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
    peak, source = peak_of(arguments, device)
    work = replace(
        GPT2_124M, vocab_size=arguments.vocab_size, batch_size=arguments.batch_size, seq_len=arguments.seq_len,
        max_seq_len=max(GPT2_124M.max_seq_len, arguments.seq_len),
    )  # fmt: skip
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="codescent-gpu-") as folder:
        systems = systems_of(arguments, work, Path(folder))
        timings, failures = measure(systems, arguments.rounds, arguments.steps)
    entries = [entry(timing, work, peak, timings[0]) for timing in timings]
    notes = NOTES.format(
        clip="clipping, " if arguments.clip else "", batch=work.batch_size, seq=work.seq_len, vocab=work.vocab_size,
        peak=peak / 1e12, source=source, parameters=work.num_parameters,
    )  # fmt: skip
    print(f"{device}, CUDA {record['cuda']}", machine_line(record), notes, "", sep="\n")
    if entries:
        print(show(entries))
    for name, reason in failures.items():
        say(f"{name} was not measured: {reason}")
    result = {
        "benchmark": "gpu_step", "hardware": record, "work": vars(work), "clip": arguments.clip,
        "peers": {"nanogpt": None if arguments.nanogpt is None else revision(arguments.nanogpt)},
        "peak_flops_per_s": peak, "peak_source": source, "rounds": arguments.rounds, "steps_per_turn": arguments.steps,
        "notes": notes.splitlines(), "systems": entries, "failures": failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if failures else 0


if __name__ == "__main__":
    finish(main)
