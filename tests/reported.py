"""In: a layout, numbers of steps. Out: run folders as a run leaves them, made without training, for tests of reports.
Does not train: the seconds and losses are computed here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from codescent.build import build
from codescent.clusters.cluster import Software
from codescent.clusters.files import load_cluster
from codescent.config.load import load
from codescent.cost.price import price
from codescent.plan import Plan
from codescent.planner.prediction import price_json
from codescent.record import RunFolder
from codescent.record.ranks import write
from codescent.record.rows import json_line

STEP_S = 0.1
MACHINE = {
    "codescent": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "system": "Linux", "processor": "a processor",
    "cores": 64, "memory_bytes": 2**36, "device": "cpu", "num_threads": 1, "peak_flops_per_s": 1e12,
}  # fmt: skip


@cache
def plan_of(ranks: int, *words: str) -> Plan:
    sizes = ("model.num_layers=4", "train.global_batch_size=8", "train.microbatch_size=1")
    return build(load("default", [*sizes, *words]).config, 2048, ranks)


def make_run(
    path: Path,
    ranks: int = 1,
    *words: str,
    steps: int = 40,
    every: int = 10,
    slower: Mapping[int, float] | None = None,
    losses: Sequence[float] | None = None,
    events: Sequence[tuple[str, Mapping[str, Any]]] = (("end", {}),),
    environment: Mapping[str, Any] | None = None,
    keys: str = "",
    peaks: Mapping[str, float] | None = None,
) -> RunFolder:
    """A run whose ranks compute 0.06 s of a step of 0.1 s, `slower` ones longer by that factor; the others wait.

    Every step has a row in metrics.csv, every `every` steps one of each rank in ranks.csv.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = plan_of(ranks, *words)
    folder = RunFolder.create(
        path, f"[run]\nname = {json.dumps(path.name)}\n[parallel]\nranks = {ranks}\n{keys}", plan.to_json()
    )
    folder.write_environment(
        {
            **MACHINE,
            "world_size": ranks,
            "ranks": [{"host": f"node{rank // 2}", "device": "cpu"} for rank in range(ranks)],
            **(environment or {}),
        }
    )
    folder.event("start", step=0)
    tokens = plan.work.tokens
    falling = losses or [2.0 + 5.0 / math.sqrt(step) for step in range(1, steps + 1)]
    with (path / "metrics.csv").open("a") as csv, (path / "metrics.jsonl").open("a") as jsonl:
        for step, loss in enumerate(falling, start=1):
            row = {**metrics(step, loss, tokens), **(peaks or {})}
            csv.write(",".join("" if value is None else repr(value) for value in row.values()) + "\n")
            jsonl.write(json_line(row))
    for step in range(every, steps + 1, every):
        write(path, [of_rank(step, every, rank, (slower or {}).get(rank, 1.0)) for rank in range(ranks)])
    for kind, fields in events:
        folder.event(kind, step=steps, **fields)
    return folder


def predicted_run(path: Path, ranks: int = 1, *words: str, **changes: Any) -> RunFolder:
    """A run with the prediction of its plan on the laptop; `changes`: values of the prediction that are replaced."""
    folder = make_run(path, ranks, *words)
    found = price_json(
        price(plan_of(ranks, *words), load_cluster("laptop", ["node.devices=8"]), Software(held_bytes=0.0))
    )
    folder.write_prediction({**found, **changes})
    return folder


def metrics(step: int, loss: float, tokens: int) -> dict[str, float | int | None]:
    """A row of metrics.csv, all columns in order."""
    step_s = STEP_S * (1 + 0.01 * math.sin(step))
    return {
        "step": step, "train_loss": loss, "val_loss": loss + 0.1 if step % 10 == 0 else None, "learning_rate": 1e-3,
        "grad_norm": 1.0, "tokens": step * tokens, "tokens_per_s": tokens / step_s, "flops_per_s": 4e11, "mfu": 0.4,
        "step_s": step_s, "data_s": 0.001, "compute_s": 0.06, "exposed_comm_s": step_s - 0.066, "optimizer_s": 0.004,
        "peak_memory_bytes": 2**30, "forward_s": 0.02, "backward_s": 0.04, "other_s": 0.001,
        "mfu_spec": None, "hfu": 0.4,
    }  # fmt: skip


def of_rank(step: int, steps: int, rank: int, factor: float) -> dict[str, float]:
    """A row of ranks.csv."""
    compute_s = 0.06 * factor
    return {
        "step": step, "rank": rank, "steps": steps, "step_s": STEP_S, "data_s": 0.001, "forward_s": compute_s / 3,
        "backward_s": compute_s * 2 / 3, "exposed_comm_s": STEP_S - 0.006 - compute_s, "optimizer_s": 0.004,
        "other_s": 0.001, "peak_memory_bytes": 2**30 + rank * 2**20,
    }  # fmt: skip
