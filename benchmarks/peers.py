"""In: checkouts of nanoGPT and llm.c. Out: seconds and memory of a training step of both, transformers and codescent.
Does not contain code of a peer, and writes only into a temporary folder (and the --json file)."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import llmc
from measure import (
    Checkout,
    Measured,
    System,
    SystemFailed,
    Timing,
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
    ratio_text,
    revision,
    say,
    table,
    write_json,
)  # fmt: skip
from systems import PipedProgram, Watched
from work import SMALL, WORKS, Work, environment, random_tokens, training, write_tokens

REFERENCE = "nanogpt-fp32-eager"

NAMES = (
    REFERENCE, "codescent-bf16", "codescent-fp32", "nanogpt-bf16-eager", "nanogpt-bf16-compile", "llmc",
    "products-fp32", "products-bf16", "bound-fp32", "bound-bf16",
    "nanogpt-fp32-compile", "transformers-fp32", "transformers-bf16",
)  # fmt: skip
"""The systems that the requirements compare come first, so that they share a sitting if memory is short."""

BEFORE = ("before-bf16", "before-fp32")
"""The checkout of --before, as `codescent-bf16` and `codescent-fp32`."""

ISA = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}
"""Environment variables of oneDNN, torch and MKL: a processor without bf16 instructions, emulated for every system."""

NOTES = """A step of every system: next batch, forward, backward, {clip}AdamW, gradients freed.
{tokens} tokens, {threads} threads. GFLOP/s: 6 N tokens/s, N = {parameters:,}.
nanoGPT: nanoGPT's model and optimizer (torch's AdamW, not fused on a CPU), vocabulary {padded}; bf16: torch's autocast.
transformers: GPT2LMHeadModel, AdamW as its Trainer chooses it, vocabulary {vocab}; bf16: torch's autocast.
llm.c: its CPU functions built with its Makefile, fp32, AdamW, never clipped; vocabulary {vocab}, padded by llm.c.
codescent: `codescent train`, timed from outside, metrics and log at every step; vocabulary {vocab};
bf16: bf16 weights, fp32 master weights and moments. before: the same of another checkout of codescent.
products: no training, only the step's matrix products (without attention's), each with the fastest kernels of torch on
this machine: a program that computes in this precision with these kernels cannot be faster.
bound: these products, then a copy that moves as many bytes as the rest of a step:
{moved}."""

SHARES = {"fp32": 0.92, "bf16": 0.80}
"""The share of `bound` that a step of codescent must reach at least."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if the checkout of a selected system is not given."""
    parsed = parser("Time a full training step of GPT-2: nanoGPT, llm.c, transformers and codescent in turns.")
    parsed.add_argument("--nanogpt", type=Checkout("nanoGPT", "model.py"), metavar="DIR", help="checkout of nanoGPT")
    llmc_checkout = Checkout("llm.c", "train_gpt2.c", "Makefile")
    parsed.add_argument("--llmc", type=llmc_checkout, metavar="DIR", help="checkout of llm.c")
    before = Checkout("codescent", "codescent/__init__.py")
    parsed.add_argument("--before", type=before, metavar="DIR", help="another checkout of codescent, beside this one")
    parsed.add_argument("--work", choices=tuple(WORKS), default="gpt2-124m", help="sizes of model and step")
    parsed.add_argument(
        "--only", metavar="NAME,...", help=f"names of systems, or beginnings: {', '.join(NAMES + BEFORE)}"
    )
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    parsed.add_argument("--steps", type=positive, help="steps per turn; if not given, 1 on gpt2-124m and 50 on small")
    parsed.add_argument("--threads", type=positive, default=2, help="threads of every system")
    parsed.add_argument("--isa", choices=tuple(ISA), help="let the libraries use no newer instructions than these")
    parsed.add_argument(
        "--clip", type=not_negative, default=0.0, help="gradient norm to clip to, except llm.c; 0: none"
    )
    parsed.add_argument("--warmup", type=positive, default=2, help="steps before the first that counts")
    arguments = parsed.parse_args()
    arguments.names = chosen(parsed, arguments.only, NAMES + (BEFORE if arguments.before else ()))
    for peer, given in (("nanogpt", arguments.nanogpt), ("llmc", arguments.llmc)):
        if given is None and any(name.startswith(peer) for name in arguments.names):
            parsed.error(f"{peer} needs its checkout: give --{peer} DIR, or select other systems with --only")
    return arguments


def piped(name: str, arguments: argparse.Namespace, work: Work, folder: Path, tokens: Path) -> PipedProgram:
    """nanoGPT or transformers in a process of its own. The name has precision and compilation."""
    peer, precision, *compiled = name.split("-")
    if peer == "nanogpt":
        work = replace(work, vocab_size=padded_vocab(work))
    argv = [
        sys.executable, str(Path(__file__).with_name("peer_step.py")),
        "--peer", peer, "--tokens", str(tokens), "--work", work.text(), "--precision", precision,
        "--threads", str(arguments.threads), "--clip", str(arguments.clip), "--warmup", str(arguments.warmup),
    ]  # fmt: skip
    if peer == "nanogpt":
        argv += ["--checkout", str(arguments.nanogpt)]
    if compiled == ["compile"]:
        argv.append("--compile")
    env = {**environment(), **ISA.get(arguments.isa, {}), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return PipedProgram(name, argv, env, folder)


def padded_vocab(work: Work) -> int:
    """The vocabulary of nanoGPT: GPT-2's, rounded up to a multiple of 64; a vocabulary of the data is not rounded."""
    return work.vocab_size if work == SMALL else -(-work.vocab_size // 64) * 64


def c_program(arguments: argparse.Namespace, work: Work, folder: Path) -> PipedProgram:
    """llm.c's CPU program, with a model file and a token file."""
    program = llmc.build(arguments.llmc, folder)
    model, tokens = folder / "llmc_model.bin", folder / "llmc_tokens.bin"
    llmc.write_model(model, work)
    llmc.write_tokens(tokens, random_tokens(work.vocab_size, 1_000_000))
    argv = llmc.command(program, model, tokens, work, arguments.warmup)
    return PipedProgram("llmc", argv, llmc.environment(arguments.threads), folder)


def watched(name: str, arguments: argparse.Namespace, work: Work, folder: Path, tokens: Path) -> Watched:
    """`codescent train`, of this checkout or that of --before."""
    run = folder / f"run-{name}"
    argv = training(
        work, tokens, run,
        f"train.precision={name.split('-')[1]}",
        f"train.num_threads={arguments.threads}",
        f"optimizer.max_grad_norm={arguments.clip}",
    )  # fmt: skip
    env = {**environment(), **ISA.get(arguments.isa, {})}
    if name in BEFORE:
        env["PYTHONPATH"] = os.pathsep.join([str(arguments.before), env["PYTHONPATH"]])
    return Watched(name, argv, env, folder, run / "metrics.csv", arguments.warmup + 1)


def prepare(arguments: argparse.Namespace, work: Work, folder: Path) -> tuple[list[System], dict[str, str]]:
    """The selected systems, not started; and the reasons why others cannot be prepared."""
    tokens = write_tokens(folder, work.vocab_size)
    systems: list[System] = []
    failures: dict[str, str] = {}
    for name in arguments.names:
        if name.startswith("codescent") or name in BEFORE:
            systems.append(watched(name, arguments, work, folder, tokens))
        elif name == "llmc":
            try:
                systems.append(c_program(arguments, work, folder))
            except SystemFailed as failure:
                failures[name] = str(failure)
        else:
            systems.append(piped(name, arguments, work, folder, tokens))
    return systems, failures


def without_bf16(measured: Measured) -> list[dict[str, Any]]:
    """The requirement on bf16 where the processor has no bf16 instructions (--isa), and what bf16 costs a peer."""
    ours, theirs = (measured.ratio(f"{name}-fp32", f"{name}-bf16") for name in ("codescent", "transformers"))
    ours_memory = memory_ratio(measured.find("codescent-bf16"), measured.find("codescent-fp32"))
    return [
        must("bf16 step over fp32 step, codescent", ours, 1.3, at_least=False),
        must("bf16 step over fp32 step, transformers", theirs, 20),
        must("peak memory, bf16 over fp32, codescent", ours_memory, 1, at_least=False),
    ]


def musts(measured: Measured) -> list[dict[str, Any]]:
    """The requirements on GPT-2 124M and the measured values: ratios of medians in the same sitting."""
    bf16 = [measured.ratio("codescent-bf16", f"nanogpt-bf16-{way}") for way in ("eager", "compile")]
    both = None if None in bf16 else min(ratio for ratio in bf16 if ratio is not None)
    ours, theirs = measured.find("codescent-bf16"), measured.find("nanogpt-bf16-eager")
    fp32, reference = measured.find("codescent-fp32"), measured.find(REFERENCE)
    limit = {precision: measured.ratio(f"products-{precision}", REFERENCE) for precision in ("fp32", "bf16")}
    shares = {precision: measured.ratio(f"codescent-{precision}", f"bound-{precision}") for precision in SHARES}
    over = measured.ratio("products-bf16", "codescent-bf16")
    return [
        *(must(f"{precision}, share of its bound", shares[precision], least) for precision, least in SHARES.items()),
        *([must("bf16, step over its products alone", over, 1.5, at_least=False)] if has_amx() else []),
        must("bf16, times nanoGPT fp32 eager", measured.ratio("codescent-bf16", REFERENCE), 3.6, limit=limit["bf16"]),
        must("bf16, times the better of nanoGPT's bf16 runs", both, 1.5),
        must("bf16, times llm.c's Makefile build", measured.ratio("codescent-bf16", "llmc"), 10),
        must("fp32, times nanoGPT fp32 eager", measured.ratio("codescent-fp32", REFERENCE), 2.4, limit=limit["fp32"]),
        must("peak memory, fp32, over nanoGPT's fp32 eager", memory_ratio(fp32, reference), 1, at_least=False),
        must("peak memory, bf16, over nanoGPT's fp32 eager", memory_ratio(ours, reference), 1, at_least=False),
        must("peak memory, bf16, over nanoGPT's bf16 eager", memory_ratio(ours, theirs), 1, at_least=False),
    ]


def has_amx() -> bool:
    """Whether the processor has tiles for products in bf16."""
    return "amx_bf16" in hardware()["cpu_flags"]


def moved_text(work: Work) -> str:
    """The bytes of `bound`, by part and precision."""
    of = importlib.import_module("bound").moved_bytes
    parts = {
        precision: (f"{part} {moved / 1e9:.2f} GB" for part, moved in of(work, precision).items())
        for precision in SHARES
    }
    return ";\n".join(f"{precision}: {', '.join(texts)}" for precision, texts in parts.items())


def of_before(measured: Measured) -> list[dict[str, Any]]:
    """The requirement on a change that is not about the CPU's speed."""
    pairs = [(f"codescent-{precision}", f"before-{precision}") for precision in ("fp32", "bf16")]
    return [must(f"{ours}, times {theirs}", measured.ratio(ours, theirs), 0.98) for ours, theirs in pairs]


def memory_ratio(ours: Timing | None, theirs: Timing | None) -> float | None:
    """Peak memory of one system divided by that of another; None if one was not measured."""
    return None if ours is None or theirs is None else ours.peak_bytes / theirs.peak_bytes


def rows(measured: Measured, work: Work, reference: str) -> list[dict[str, Any]]:
    """The results of each system, as numbers."""
    return [
        {
            "system": timing.name,
            "sitting": timing.sitting + 1,
            "median_s": timing.median_s,
            "best_s": timing.best_s,
            "tokens_per_s": work.tokens / timing.median_s,
            "flops_per_s": 6 * work.num_parameters * work.tokens / timing.median_s,
            "ratio": _ratio(measured, timing, reference),
            "peak_memory_bytes": timing.peak_bytes,
            "seconds": timing.seconds,
        }
        for timing in measured.timings
    ]


def _ratio(measured: Measured, timing: Timing, reference: str) -> float | None:
    other = measured.find(reference, timing.sitting)
    return None if other is None else other.median_s / timing.median_s


def show(entries: list[dict[str, Any]], reference: str) -> str:
    """The results as a text table."""
    header = ["system", "sitting", "ms median", "best", "tokens/s", "GFLOP/s", f"x {reference}", "peak MiB"]
    lines = [
        [
            entry["system"],
            str(entry["sitting"]),
            f"{1e3 * entry['median_s']:.1f}",
            f"{1e3 * entry['best_s']:.1f}",
            f"{entry['tokens_per_s']:.0f}",
            f"{entry['flops_per_s'] / 1e9:.0f}",
            ratio_text(entry["ratio"]),
            f"{entry['peak_memory_bytes'] / 2**20:.0f}",
        ]
        for entry in entries
    ]
    return table(header, lines)


def main() -> int:
    """Measure and print. Returns 1 if a system failed, else 0, even if a requirement does not hold."""
    arguments = arguments_of()
    work = WORKS[arguments.work]
    steps = arguments.steps or (50 if arguments.work == "small" else 1)
    record = hardware()
    try:
        with tempfile.TemporaryDirectory(prefix="codescent-peers-") as folder:
            systems, failures = prepare(arguments, work, Path(folder))
            measured = interleave(systems, arguments.rounds, steps)
    except SystemFailed as failure:
        say(str(failure))
        return 1
    measured.failures |= failures
    notes = NOTES.format(
        clip="clipping, " if arguments.clip else "", tokens=f"{work.batch_size} x {work.seq_len}",
        threads=arguments.threads, padded=padded_vocab(work), vocab=work.vocab_size, parameters=work.num_parameters,
        moved=moved_text(work),
    )  # fmt: skip
    entries = rows(measured, work, systems[0].name)
    print(machine_line(record), notes, "", show(entries, systems[0].name), "", sep="\n")
    claims = musts(measured) if arguments.work == "gpt2-124m" and arguments.isa is None else []
    claims += without_bf16(measured) if arguments.isa is not None else []
    claims += of_before(measured) if arguments.before else []
    print("\n".join(must_lines(claims)))
    for name, reason in measured.failures.items():
        say(f"{name} was not measured: {reason}")
    result = {
        "benchmark": "peers",
        "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "peers": {"nanogpt": _revision(arguments.nanogpt), "llmc": _revision(arguments.llmc)},
        "before": _revision(arguments.before),
        "work": vars(work), "isa": arguments.isa, "threads": arguments.threads, "clip": arguments.clip,
        "rounds": arguments.rounds,
        "steps_per_turn": steps, "notes": notes.splitlines(), "systems": entries, "musts": claims,
        "failures": measured.failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if measured.failures else 0


def _revision(checkout: Path | None) -> str | None:
    return None if checkout is None else revision(checkout)


if __name__ == "__main__":
    finish(main)
