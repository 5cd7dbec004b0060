"""In: nothing. Out: processor seconds of Muon's update and of AdamW's, alone and as a share of the training step.
Does not test that updates are right (tests/test_muon.py does). It writes a temporary folder."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, table, write_json
from work import environment, write_tokens

sys.path.insert(0, str(ROOT))

from codescent.base.progress import ENDED
from codescent.build import build
from codescent.config.sections import Config
from codescent.data.text.dataset import open_dataset
from codescent.launch.environment import read
from codescent.launch.local import run_ranks
from codescent.strategies.muon import flops
from codescent.train.assemble import assemble
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer
from codescent.train.world import World

KINDS: dict[str, dict[str, str]] = {
    "AdamW": {"kind": "adamw"},
    "Muon, fp32 products": {"kind": "muon"},
    "Muon, bf16 products": {"kind": "muon", "muon_precision": "bf16"},
}
LARGE_STEP = 524_288
"""Tokens of a step of GPT-2 124M in common recipes (nanoGPT, llm.c). The update costs the same for any number."""

VOCAB_SIZE = 4096
SAMPLES, SEQ_LEN = 4, 128
"""Of a rank's step. A small vocabulary and few tokens, because the update does not depend on them."""

JOB = "CODESCENT_BENCHMARK_JOB"
"""Environment variable with the path of the job's file. If it is set, this process is a rank of the job."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time the updates of Muon and AdamW for blocks of GPT-2 124M, on one rank and several.")
    parsed.add_argument("--ranks", type=positive, default=2, help="number of replicas; one rank is measured, too")
    parsed.add_argument("--layers", type=positive, default=2, help="number of blocks")
    parsed.add_argument("--rounds", type=positive, default=5, help="number of steps of each update rule")
    parsed.add_argument("--bf16", action="store_true", help="also bf16 products; slow on a CPU without them")
    arguments = parsed.parse_args()
    if arguments.ranks < 2:
        parsed.error("--ranks 1: one rank is always measured; give at least 2")
    return arguments


class Timed:
    """A trainer whose steps and updates are timed, in processor seconds of this process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.update_s, self.steps = trainer, 0.0, 0
        self.update = trainer.optimizer.step
        trainer.optimizer.step = self._timed  # type: ignore[method-assign]

    def _timed(self, *values: Any, **options: Any) -> Any:
        begun = time.process_time()
        square = self.update(*values, **options)
        self.update_s = time.process_time() - begun
        return square

    def step(self) -> tuple[float, float]:
        """Processor seconds of a step, and of its update."""
        begun = time.process_time()
        self.trainer.executor.step(self.steps, 1e-4)
        self.steps += 1
        return time.process_time() - begun, self.update_s


def rank_main(path: Path) -> None:
    """Run one rank: a step of each update rule in turns, after one warm-up of each. Rank 0 writes the seconds."""
    job = json.loads(path.read_text(encoding="utf-8"))
    this_rank = read(os.environ)
    assert this_rank is not None
    world, dataset = World(this_rank, "cpu", 1, 600.0), open_dataset(Path(job["tokens"]))
    timed: dict[str, Timed] = {}
    with StopRequest(alone=False) as stop:
        for name in job["kinds"]:
            config = Config(**job["sections"], optimizer=KINDS[name])
            plan = build(config, dataset.vocab_size, this_rank.world_size)
            world.divide(plan)
            timed[name] = Timed(assemble(config, plan, world, dataset, 0, stop))
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
        for number in range(job["rounds"] + 1):
            for name, trainer in timed.items():
                world.all_agree(True)  # a barrier: all ranks begin together
                taken = trainer.step()
                if number:
                    seconds[name].append(taken)
        for trainer in timed.values():
            trainer.trainer.close()
    if world.is_first:
        path.with_name("measured.json").write_text(json.dumps(seconds), encoding="utf-8")
    world.at(ENDED)
    world.close()


def measured(ranks: int, arguments: argparse.Namespace, folder: Path, kinds: list[str]) -> dict[str, Any]:
    """Medians of a number of ranks, by update rule. Raises SystemExit if a rank fails; the rank has printed why."""
    sections: dict[str, Any] = {
        "model": model_of(arguments.layers),
        "data": {"corpus": str(write_tokens(folder, VOCAB_SIZE).parent), "seq_len": SEQ_LEN},
        "train": {"global_batch_size": SAMPLES * ranks, "device": "cpu"},
    }
    job = {"sections": sections, "tokens": sections["data"]["corpus"], "rounds": arguments.rounds, "kinds": kinds}
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    if run_ranks([sys.executable, __file__], ranks, {**environment(), JOB: str(path)}) != 0:
        sys.exit(1)
    found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    medians = {name: [statistics.median(some) for some in zip(*taken)] for name, taken in found.items()}
    return {name: {"step_s": step_s, "update_s": update_s} for name, (step_s, update_s) in medians.items()}


def model_of(layers: int) -> dict[str, Any]:
    """The section [model]."""
    return {"preset": "gpt2", "num_layers": layers, "vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN}


def products_of(layers: int) -> float:
    """FLOPs of the Newton-Schulz steps of one update."""
    sections = {"model": model_of(layers), "optimizer": {"kind": "muon"}}
    plan = build(Config.model_validate(sections), None, 1)
    return float(sum(5 * flops(tensor.parameter) for tensor in plan.trained if tensor.orthogonalized))


def row(ranks: int, name: str, entry: dict[str, float], adamw: dict[str, float], work_flops: float) -> list[str]:
    """A line of the table."""
    rest_s = entry["step_s"] - entry["update_s"]  # of the tokens of one rank
    share = entry["update_s"] / (entry["update_s"] + rest_s * LARGE_STEP / (SAMPLES * SEQ_LEN * ranks))
    entry["share_of_large_step"] = share
    extra_s = entry["update_s"] - adamw["update_s"]
    return [
        f"{name}, {ranks} rank{'s' if ranks > 1 else ''}",
        f"{entry['update_s'] * 1e3:.0f}",
        f"{entry['update_s'] / adamw['update_s']:.2f}",
        "-" if extra_s <= 0 or name == "AdamW" else f"{work_flops / ranks / extra_s / 1e9:.0f}",
        f"{entry['step_s'] * 1e3:.0f}",
        f"{entry['update_s'] / entry['step_s']:.1%}",
        f"{share:.2%}",
    ]


def main() -> int:
    """Measure and print."""
    arguments, record = arguments_of(), hardware()
    kinds = [name for name in KINDS if arguments.bf16 or "bf16" not in name]
    work_flops = products_of(arguments.layers)
    entries: dict[int, dict[str, Any]] = {}
    for ranks in (1, arguments.ranks):
        with tempfile.TemporaryDirectory(prefix="codescent-muon-") as folder:
            entries[ranks] = measured(ranks, arguments, Path(folder), kinds)
    rows = [
        row(ranks, name, entry, found["AdamW"], work_flops)
        for ranks, found in entries.items()
        for name, entry in found.items()
    ]
    columns = [
        "update rule",
        "CPU ms update",
        "x AdamW",
        "GFLOP/s",
        "CPU ms step",
        "share",
        f"of {LARGE_STEP:,} tokens",
    ]
    print(machine_line(record), "", table(columns, rows), "", sep="\n")
    one, many = (entries[ranks]["Muon, fp32 products"] for ranks in (1, arguments.ranks))
    adamw_s = entries[arguments.ranks]["AdamW"]["update_s"]
    # Replicas repeat AdamW's part and the update itself, but no product of the Newton-Schulz steps.
    alone_s = one["update_s"] - entries[1]["AdamW"]["update_s"]
    claims = [
        must(f"Muon's share of a step of {LARGE_STEP:,} tokens", one["share_of_large_step"], 0.02, at_least=False),
        must(
            f"what Muon adds to AdamW's update on a rank of {arguments.ranks}, share of one rank's",
            (many["update_s"] - adamw_s) / alone_s,
            1 / arguments.ranks + 0.2,
            at_least=False,
        ),
    ]
    print("\n".join(must_lines(claims)))
    cases = {str(ranks): found for ranks, found in entries.items()}
    write_json(arguments.json, {"benchmark": "muon", "hardware": record, "cases": cases, "musts": claims})
    return 0


if __name__ == "__main__":
    if job_file := os.environ.get(JOB):
        rank_main(Path(job_file))
    else:
        finish(main)
