"""In: this machine. Out: the time that training waits for a save, synchronous and beside training, as JSON.
Does not train: the state of a model of 30 million parameters with AdamW is saved, by one rank and by two.

Both kinds alternate in one process, so that a slow minute of the disk counts for both.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import finish, hardware, machine_line, must, must_lines, parser, table, write_json

from codescent.base.cores import available_cores
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.checkpoint.save_beside import SaveBeside, Staging
from codescent.train.finite import all_finite

PARAMETERS, TENSORS, REPEATS = 30_000_000, 60, 11
"""Each parameter has three numbers in a checkpoint: a weight and two moments. Each moment is divided into TENSORS."""
STEP_S = 0.1
"""Seconds of a step, in which the ranks only wait. Real steps of this model take longer on a CPU."""
KINDS = ("synchronous", "asynchronous")


def tensors() -> dict[str, torch.Tensor]:
    """Weights and moments."""
    size = PARAMETERS // TENSORS
    return {f"{kind}.{number}": torch.randn(size) for kind in ("model", "first", "second") for number in range(TENSORS)}


def finite(values: dict[str, torch.Tensor]) -> bool:
    """What a synchronous save asks first, as `Optimizer.is_finite` does."""
    return all(bool(value.sum().isfinite()) for value in values.values())


def synchronous(checkpoints: Checkpoints, step: int, values: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds that a rank waits for a save, and until it is complete."""
    dist.barrier()
    begin = time.perf_counter()
    assert finite(values)
    checkpoints.save(step, values, {"step": step}, rotates=False)
    seconds = time.perf_counter() - begin
    return seconds, seconds


def asynchronous(
    checkpoints: Checkpoints, step: int, values: dict[str, torch.Tensor], staging: Staging
) -> tuple[float, float]:
    """The same for a save beside training. The rank asks after each step whether it can go on with it."""
    dist.barrier()
    begin = time.perf_counter()
    save = SaveBeside(checkpoints, step, values, {"step": step}, None, staging, all_finite)
    blocked_s, path = time.perf_counter() - begin, None
    while path is None:
        time.sleep(STEP_S)
        dist.barrier()  # a step ends so, by its sum over all ranks
        asked = time.perf_counter()
        votes = torch.tensor([int(save.ready)])
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        path = save.go_on() if votes.item() else None
        blocked_s += time.perf_counter() - asked
    return blocked_s, time.perf_counter() - begin


def measure(rank: int, ranks: int, folder: Path, port: int) -> None:
    """One rank; rank 0 prints its seconds as JSON."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.set_num_threads(max(1, available_cores() // ranks))
    torch.manual_seed(1)
    values, staging = tensors(), Staging()
    checkpoints = Checkpoints(folder, 1, keep_best=False)
    rows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for step in range(1, 2 * REPEATS + 3):  # the first of each kind is not counted: it allocates
        kind = KINDS[step % 2]
        for value in values.values():  # as a training step does: it has touched all memory just before
            value.mul_(0.999)
        if kind == "synchronous":
            found = synchronous(checkpoints, step, values)
        else:
            found = asynchronous(checkpoints, step, values, staging)
        if step > 2:
            rows[kind].append(found)
        if rank == 0:
            checkpoints.rotate()
        dist.barrier()
    if rank == 0:
        print(
            json.dumps(
                {kind: {"blocked_s": [a for a, _ in of], "total_s": [b for _, b in of]} for kind, of in rows.items()}
            )
        )
    dist.destroy_process_group()


def of_ranks(ranks: int, port: int) -> dict[str, Any]:
    """Start the ranks; what was measured, with medians."""
    folder = Path(tempfile.mkdtemp(prefix="saves-"))
    try:
        words = [sys.executable, __file__, "rank"]
        processes = [
            subprocess.Popen([*words, str(rank), str(ranks), str(folder / "c"), str(port)], stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a rank has failed")
        found: dict[str, Any] = json.loads(said[0])
    finally:
        shutil.rmtree(folder)
    for of in found.values():
        of |= {f"median_{name}": statistics.median(of[name]) for name in ("blocked_s", "total_s")}
    ratio = found["asynchronous"]["median_blocked_s"] / found["synchronous"]["median_blocked_s"]
    return {**found, "ratio": ratio}


def main() -> int:
    """Measure and print."""
    arguments, record = parser("Time how long ranks wait for a save of 30 million parameters.").parse_args(), hardware()
    found = {ranks: of_ranks(ranks, 29600 + os.getpid() % 500 * 2 + ranks) for ranks in (1, 2)}
    rows = [
        [f"{ranks} ranks, {kind}", *(f"{of[kind][f'median_{name}'] * 1e3:.0f}" for name in ("blocked_s", "total_s"))]
        for ranks, of in found.items()
        for kind in KINDS
    ]
    print(machine_line(record), "", table(["save", "ms waited", "ms in all"], rows), "", sep="\n")
    claims = [
        must(
            f"waited for a save beside training, share of a synchronous one, {ranks} ranks",
            of["ratio"],
            0.1,
            at_least=False,
        )
        for ranks, of in found.items()
    ]
    print("\n".join(must_lines(claims)))
    sizes = {"parameters": PARAMETERS, "checkpoint_bytes": 12 * PARAMETERS, "repeats": REPEATS, "step_s": STEP_S}
    cases = [{"ranks": ranks, **of} for ranks, of in found.items()]
    write_json(
        arguments.json, {"benchmark": "async_saves", "hardware": record, **sizes, "cases": cases, "musts": claims}
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        finish(main)
