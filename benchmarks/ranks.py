"""In: nanoGPT's checkout (optional). Out: tokens/s of two ranks with one thread each, relative to one process with two.
Does not measure a network: all ranks are on this machine. Writes only into a temporary folder."""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import (
    Checkout,
    Measured,
    System,
    SystemFailed,
    finish,
    hardware,
    interleave,
    machine_line,
    must,
    must_lines,
    parser,
    positive,
    ratio_text,
    revision,
    say,
    table,
    write_json,
)
from systems import PipedProgram, PipedRanks, Watched
from work import GPT2_124M, SMALL, Work, environment, training, write_tokens

RANKS = 2
FLOOR = 0.85
"""Two ranks must reach at least this fraction of one process's tokens/s."""

FSDP = f"-fsdp-{RANKS}x1"
FSDP_FLOOR = 0.9
"""Two sharded ranks must reach at least this fraction of the tokens/s of two replicated ranks."""

NOTES = """{batch} x {seq} tokens per rank, {total} x {seq} in one process: the same global batch, full steps.
codescent: `codescent train`, timed from outside; exposed: ms of a step in which ranks wait for gradients (from its
metrics). fsdp: parallel.dp_shard, stage 3; a wait for weights counts as forward or backward, not as exposed.
{peer}: the same model in torch's DistributedDataParallel with its defaults over gloo; bf16: torch's autocast.
share: tokens/s of {ranks} ranks x 1 thread, divided by those of one process x {ranks} threads of the same system."""


@dataclass(frozen=True)
class Job:
    """Settings that all systems of one precision share."""

    precision: str
    work: Work
    tokens: Path
    folder: Path
    warmup: int
    nanogpt: Path | None

    @property
    def peer(self) -> str:
        """The peer whose model DDP wraps."""
        return "nanogpt" if self.nanogpt else "transformers"


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser(f"Compare {RANKS} ranks of one thread with one process of {RANKS} threads, also for torch's DDP.")
    parsed.add_argument(
        "--nanogpt",
        type=Checkout("nanoGPT", "model.py"),
        metavar="DIR",
        help="checkout of nanoGPT: DDP wraps its model instead of transformers' model",
    )
    parsed.add_argument("--work", choices=("gpt2-124m", "small"), default="gpt2-124m", help="sizes of the model")
    parsed.add_argument("--batch-size", type=positive, default=4, help="samples per rank")
    parsed.add_argument("--seq-len", type=positive, help="tokens per sample; 256 on gpt2-124m, 64 on small")
    parsed.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parsed.add_argument("--no-ddp", action="store_true", help="do not measure torch's DDP")
    parsed.add_argument("--rounds", type=positive, default=5, help="turns of every system")
    parsed.add_argument("--steps", type=positive, default=2, help="steps per turn")
    parsed.add_argument("--warmup", type=positive, default=2, help="steps before the first that counts")
    return parsed.parse_args()


def product(job: Job, ranks: int, *, divided: bool = False) -> Watched:
    """`codescent train` on the global batch, with as many threads in total as the comparison has ranks."""
    name = f"codescent-{job.precision}{FSDP if divided else f'-{ranks}x{RANKS // ranks}'}"
    run = job.folder / f"run-{name}"
    work = replace(job.work, batch_size=RANKS * job.work.batch_size)
    argv = training(
        work, job.tokens, run, f"train.precision={job.precision}", f"train.num_threads={RANKS // ranks}",
        f"parallel.ranks={ranks}", f"parallel.dp_shard={ranks if divided else 1}",
    )  # fmt: skip
    return Watched(name, argv, environment(), job.folder, run / "metrics.csv", job.warmup + 1)


def peer_argv(job: Job, batch_size: int, threads: int) -> list[str]:
    """The command line of peer_step.py."""
    argv = [
        sys.executable, str(Path(__file__).with_name("peer_step.py")), "--peer", job.peer, "--tokens", str(job.tokens),
        "--work", replace(job.work, batch_size=batch_size).text(), "--precision", job.precision,
        "--threads", str(threads), "--warmup", str(job.warmup),
    ]  # fmt: skip
    return argv if job.nanogpt is None else [*argv, "--checkout", str(job.nanogpt)]


def peer_alone(job: Job) -> PipedProgram:
    """The peer in one process."""
    argv = peer_argv(job, RANKS * job.work.batch_size, RANKS)
    return PipedProgram(f"{job.peer}-{job.precision}-1x{RANKS}", argv, environment(), job.folder)


def peer_on_ranks(job: Job) -> PipedRanks:
    """The peer in torch's DistributedDataParallel: one process for each rank, with torchrun's variables."""
    name = f"{job.peer}-ddp-{job.precision}-{RANKS}x1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        place = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        argv = [*peer_argv(job, job.work.batch_size, 1), "--ddp"]
        ranks.append(PipedProgram(f"{name}-{rank}", argv, environment() | place, job.folder))
    return PipedRanks(name, ranks)


def entries_of(measured: Measured, job: Job, systems: list[System]) -> list[dict[str, Any]]:
    """The results of each system, as numbers. A share is relative to one process of the same system."""
    entries = []
    for timing in measured.timings:
        system = next(system for system in systems if system.name == timing.name)
        baseline = timing.name.replace("-ddp", "").replace("-fsdp", "").replace(f"{RANKS}x1", f"1x{RANKS}")
        exposed = [float(row["exposed_comm_s"]) for row in system.rows] if isinstance(system, Watched) else []
        entries.append(
            {
                "system": timing.name,
                "precision": job.precision,
                "sitting": timing.sitting + 1,
                "median_s": timing.median_s,
                "best_s": timing.best_s,
                "tokens_per_s": RANKS * job.work.tokens / timing.median_s,
                "share": None if timing.name == baseline else measured.ratio(timing.name, baseline),
                "exposed_comm_s": statistics.median(exposed) if exposed else None,
                "peak_memory_bytes": timing.peak_bytes,
                "seconds": timing.seconds,
            }
        )
    return entries


def show(entries: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    header = ["system", "sitting", "ms median", "best", "tokens/s", "share", "exposed ms", "peak MiB a process"]
    rows = [
        [
            entry["system"],
            str(entry["sitting"]),
            f"{1e3 * entry['median_s']:.1f}",
            f"{1e3 * entry['best_s']:.1f}",
            f"{entry['tokens_per_s']:.0f}",
            ratio_text(entry["share"]),
            "-" if entry["exposed_comm_s"] is None else f"{1e3 * entry['exposed_comm_s']:.1f}",
            f"{entry['peak_memory_bytes'] / 2**20:.0f}",
        ]
        for entry in entries
    ]
    return table(header, rows)


def measure(arguments: argparse.Namespace, work: Work) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure the systems in turns, for each precision. Returns the results, and the reasons of failures."""
    entries: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for precision in ("fp32", "bf16") if arguments.precision == "both" else (arguments.precision,):
        with tempfile.TemporaryDirectory(prefix="codescent-ranks-") as name:
            folder = Path(name)
            tokens = write_tokens(folder, work.vocab_size)
            job = Job(precision, work, tokens, folder, arguments.warmup, arguments.nanogpt)
            systems: list[System] = [product(job, 1), product(job, RANKS), product(job, RANKS, divided=True)]
            if not arguments.no_ddp:
                systems += [peer_alone(job), peer_on_ranks(job)]
            measured = interleave(systems, arguments.rounds, arguments.steps)
        entries += entries_of(measured, job, systems)
        failures |= measured.failures
    return entries, failures


def main() -> int:
    """Measure and print. Returns 1 if a system failed, else 0."""
    arguments = arguments_of()
    model = SMALL if arguments.work == "small" else GPT2_124M
    work = replace(model, batch_size=arguments.batch_size, seq_len=arguments.seq_len or model.seq_len)
    record = hardware()
    try:
        entries, failures = measure(arguments, work)
    except SystemFailed as failure:
        say(str(failure))
        return 1
    ours = [entry for entry in entries if entry["system"].startswith("codescent-") and entry["share"] is not None]
    shares = {(entry["precision"], entry["system"].endswith(FSDP)): entry["share"] for entry in ours}
    claims = [
        must(f"{RANKS} ranks, {kind}: share of one process's tokens/s", share, FLOOR)
        for (kind, divided), share in shares.items()
        if not divided
    ]
    claims += [
        must(f"{RANKS} ranks, {kind}, FSDP: share of the replicated ranks' tokens/s", share / whole, FSDP_FLOOR)
        for (kind, divided), share in shares.items()
        if divided and (whole := shares.get((kind, False)))
    ]
    notes = NOTES.format(
        batch=work.batch_size, seq=work.seq_len, total=RANKS * work.batch_size, ranks=RANKS,
        peer="nanoGPT" if arguments.nanogpt else "transformers",
    )  # fmt: skip
    print(machine_line(record), notes, "", show(entries), "", *must_lines(claims), sep="\n")
    for name, reason in failures.items():
        say(f"{name} was not measured: {reason}")
    result = {
        "benchmark": "ranks", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "peers": {"nanogpt": None if arguments.nanogpt is None else revision(arguments.nanogpt)},
        "work": vars(work), "rounds": arguments.rounds, "steps_per_turn": arguments.steps,
        "notes": notes.splitlines(), "systems": entries, "musts": claims, "failures": failures,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if failures else 0


if __name__ == "__main__":
    finish(main)
