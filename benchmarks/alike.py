"""In: nothing. Out: seconds to compare the ranks' copies of tensors, next to those of a training step and of a sum.
Does not test that differences are found (tests/test_alike.py does). It writes a temporary folder."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, table, write_json
from work import WORKS, environment, write_tokens

sys.path.insert(0, str(ROOT))

from codescent.base.progress import ENDED
from codescent.build import build
from codescent.config.sections import Config
from codescent.data.text.dataset import open_dataset
from codescent.launch.environment import read
from codescent.launch.local import run_ranks
from codescent.train.alike import Copies, compare, replicated_tensors
from codescent.train.assemble import assemble
from codescent.train.stop import StopRequest
from codescent.train.tensor_hash import tensor_hash
from codescent.train.trainer import Trainer
from codescent.train.world import World

CHECK_EVERY = 100
"""The default of train.check_every."""

JOB = "CODESCENT_BENCHMARK_JOB"
"""Environment variable with the path of the job's file. If it is set, this process is a rank of the job."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time the comparison of the ranks' copies of tensors, and training steps of replicated GPT-2.")
    parsed.add_argument("--ranks", type=positive, default=2, help="number of replicas; each is a process")
    parsed.add_argument("--rounds", type=positive, default=5, help="number of steps and comparisons of each case")
    parsed.add_argument("--work", choices=WORKS, nargs="+", default=[*WORKS], help="of these sizes alone")
    arguments = parsed.parse_args()
    if arguments.ranks < 2:
        parsed.error("--ranks 1: one rank has no copies to compare; give at least 2")
    return arguments


def timed(act: Callable[[], object]) -> float:
    """The wall-clock seconds of a call."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


@contextmanager
def replicas(job: Mapping[str, Any]) -> Iterator[tuple[World, Trainer, Copies]]:
    """This process as a rank of a job: the world, a trainer, and the tensors that other ranks hold as well."""
    this_rank = read(os.environ)
    assert this_rank is not None
    world, dataset = World(this_rank, "auto", None, 600.0), open_dataset(Path(job["tokens"]))
    config = Config(**job["sections"])
    plan = build(config, dataset.vocab_size, this_rank.world_size)
    world.divide(plan)
    with StopRequest(alone=False) as stop:
        trainer = assemble(config, plan, world, dataset, 0, stop)
        yield world, trainer, replicated_tensors(plan, this_rank.rank, trainer.parts, trainer.optimizer)
        trainer.close()
    world.at(ENDED)
    world.close()


def rank_main(path: Path) -> None:
    """Run one rank: steps and comparisons in turns, after one warm-up of each. Rank 0 writes the seconds."""
    job = json.loads(path.read_text(encoding="utf-8"))
    with replicas(job) as (world, trainer, copies):
        tensors = [tensor.detach() for part in copies.values() for tensor in part.values()]
        sizes = [tensor.nbytes // 8 * 8 for tensor in tensors]
        words = [t.view(-1).view(torch.uint8)[:size].view(torch.int64) for t, size in zip(tensors, sizes) if size]
        acts: dict[str, Callable[[], object]] = {
            "step_s": lambda: trainer.executor.step(0, 1e-4),
            "check_s": lambda: compare(copies, "benchmark"),
            "hash_s": lambda: int(tensor_hash(tensors)),
            "sum_s": lambda: [int(one.sum()) for one in words],
        }
        seconds: dict[str, list[float]] = {name: [] for name in acts}
        for number in range(job["rounds"] + 1):
            for name, act in acts.items():
                world.all_agree(True)  # a barrier: all ranks begin together
                taken_s = timed(act)
                if number:
                    seconds[name].append(taken_s)
        if world.is_first:
            measured = {"bytes": sum(sizes), "seconds": seconds}
            path.with_name("measured.json").write_text(json.dumps(measured), encoding="utf-8")


def job_of(name: str, precision: str, folder: Path) -> dict[str, Any]:
    """What a rank needs to make a trainer. Writes random tokens into the folder."""
    work = WORKS[name]
    sizes = {"num_layers": work.num_layers, "num_heads": work.num_heads, "hidden_dim": work.hidden_dim}
    tokens = str(write_tokens(folder, work.vocab_size).parent)
    sections: dict[str, dict[str, Any]] = {
        "model": {**sizes, "vocab_size": work.vocab_size, "seq_len": work.max_seq_len},
        "data": {"corpus": tokens, "seq_len": work.seq_len},
        "train": {"global_batch_size": work.batch_size, "precision": precision},
    }
    return {"sections": sections, "tokens": tokens}


def entry_of(name: str, precision: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one case on new ranks. Returns medians. Raises SystemExit if a rank fails; the rank has printed why."""
    path = folder / "job.json"
    path.write_text(json.dumps({**job_of(name, precision, folder), "rounds": arguments.rounds}), encoding="utf-8")
    if run_ranks([sys.executable, __file__], arguments.ranks, {**environment(), JOB: str(path)}) != 0:
        sys.exit(1)
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    medians = {what: statistics.median(taken) for what, taken in measured["seconds"].items()}
    return {
        "work": name,
        "precision": precision,
        **medians,
        "bytes": measured["bytes"],
        "hash_bytes_per_s": measured["bytes"] / medians["hash_s"],
        "sum_bytes_per_s": measured["bytes"] / medians["sum_s"],
        "share": medians["check_s"] / (CHECK_EVERY * medians["step_s"]),
        "seconds": measured["seconds"],
    }


def main() -> int:
    """Measure and print."""
    arguments, record = arguments_of(), hardware()
    entries = []
    for name in arguments.work:
        for precision in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory(prefix="codescent-alike-") as folder:
                entries.append(entry_of(name, precision, arguments, Path(folder)))
    rows = [
        [
            f"{entry['work']} {entry['precision']}",
            f"{entry['step_s'] * 1e3:.1f}",
            f"{entry['check_s'] * 1e3:.1f}",
            f"{entry['bytes'] / 1e6:.0f}",
            f"{entry['hash_bytes_per_s'] / 1e9:.1f}",
            f"{entry['sum_bytes_per_s'] / 1e9:.1f}",
            f"{entry['share']:.3%}",
        ]
        for entry in entries
    ]
    columns = ["replicas", "ms step", "ms check", "MB compared", "GB/s hash", "GB/s int64 sum", "share of the time"]
    print(machine_line(record), "", table(columns, rows), "", sep="\n")
    most = max(entry["share"] for entry in entries)
    claims = [must(f"a check every {CHECK_EVERY} steps, share of the time", most, 0.01, at_least=False)]
    print("\n".join(must_lines(claims)))
    result = {"benchmark": "alike", "hardware": record, "ranks": arguments.ranks, "cases": entries, "musts": claims}
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    if job_file := os.environ.get(JOB):
        rank_main(Path(job_file))
    else:
        finish(main)
