"""In: this machine. Out: what a save costs training, synchronous and beside training, as JSON.
Does not train: steps wait or multiply matrices. A model of 30 million parameters with AdamW is saved, by 1 and 2 ranks.

All kinds alternate in one process, so that a slow minute of the disk counts for all.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
"""Seconds of a step. Real steps of this model take longer on a CPU."""
KINDS = ("synchronous", "asynchronous", "asynchronous, computing")
"""In the last kind a step keeps all cores busy; in the others its ranks only wait, as those of a GPU do."""
SIZE = 512
"""Of the matrices that a computing step multiplies."""

FIELDS = ("blocked_s", "total_s", "more_s")
Step = Callable[[], object]


@dataclass
class Cost:
    """Seconds of one save.

    Attributes:
        blocked_s: in which the rank did not train, because it waited for the save.
        total_s: until it was complete.
        more_s: by which the steps until then took longer than without a save, with what was blocked.
    """

    blocked_s: float
    total_s: float
    more_s: float


def tensors() -> dict[str, torch.Tensor]:
    """Weights and moments."""
    size = PARAMETERS // TENSORS
    return {f"{kind}.{number}": torch.randn(size) for kind in ("model", "first", "second") for number in range(TENSORS)}


def finite(values: dict[str, torch.Tensor]) -> bool:
    """What a synchronous save asks first, as `Optimizer.is_finite` does."""
    return all(bool(value.sum().isfinite()) for value in values.values())


def synchronous(checkpoints: Checkpoints, step: int, values: dict[str, torch.Tensor]) -> Cost:
    """A save that the rank waits for."""
    dist.barrier()
    begin = time.perf_counter()
    assert finite(values)
    checkpoints.save(step, values, {"step": step}, rotates=False)
    seconds = time.perf_counter() - begin
    return Cost(seconds, seconds, seconds)


def asynchronous(
    checkpoints: Checkpoints, number: int, values: dict[str, torch.Tensor], staging: Staging, step: Step
) -> Cost:
    """The same beside training. The rank asks after each step whether it can go on with the save."""
    plain_s = statistics.median(plain(values, step) for _ in range(3))
    dist.barrier()
    begin = time.perf_counter()
    save = SaveBeside(checkpoints, number, values, {"step": number}, None, staging, all_finite)
    blocked_s, path, steps = time.perf_counter() - begin, None, 0
    while path is None:
        step()
        asked = time.perf_counter()
        save.wait_for_copy()
        blocked_s += time.perf_counter() - asked
        update(values)
        dist.barrier()  # a step ends so, by its sum over all ranks
        asked = time.perf_counter()
        votes = torch.tensor([int(save.ready)])
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        path = save.go_on() if votes.item() else None
        blocked_s, steps = blocked_s + time.perf_counter() - asked, steps + 1
    total_s = time.perf_counter() - begin
    return Cost(blocked_s, total_s, total_s - steps * plain_s)


def update(values: dict[str, torch.Tensor]) -> None:
    """Change all values, as the end of a step does. So it has touched all memory just before a save."""
    for value in values.values():
        value.mul_(0.999)


def plain(values: dict[str, torch.Tensor], step: Step) -> float:
    """Seconds of a step without a save."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    update(values)
    dist.barrier()
    return time.perf_counter() - begin


def computing() -> Step:
    """A step of about STEP_S on this machine: equally many products on every rank."""
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    def multiply(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right)

    multiply(20)
    dist.barrier()
    begin = time.perf_counter()
    multiply(20)
    products = torch.tensor([20 * STEP_S / (time.perf_counter() - begin)])
    dist.broadcast(products, 0)
    return lambda: multiply(int(products))


def measure(rank: int, ranks: int, folder: Path, port: int) -> None:
    """One rank; rank 0 prints its seconds as JSON."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.set_num_threads(max(1, available_cores() // ranks))
    torch.manual_seed(1)
    values, staging = tensors(), Staging()
    checkpoints = Checkpoints(folder, 1, keep_best=False)
    steps = {KINDS[1]: lambda: time.sleep(STEP_S), KINDS[2]: computing()}
    rows: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
    for number in range(1, len(KINDS) * (REPEATS + 1) + 1):  # the first of each kind is not counted: it allocates
        kind = KINDS[number % len(KINDS)]
        update(values)
        if kind in steps:
            found = asynchronous(checkpoints, number, values, staging, steps[kind])
        else:
            found = synchronous(checkpoints, number, values)
        if number > len(KINDS):
            rows[kind].append(found)
        if rank == 0:
            checkpoints.rotate()
        dist.barrier()
    if rank == 0:
        print(
            json.dumps(
                {kind: {name: [asdict(one)[name] for one in of] for name in FIELDS} for kind, of in rows.items()}
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
        of |= {f"median_{name}": statistics.median(of[name]) for name in FIELDS}
    whole_s = found[KINDS[0]]["median_blocked_s"]
    return {**found, "ratios": {kind: found[kind]["median_blocked_s"] / whole_s for kind in KINDS[1:]}}


def main() -> int:
    """Measure and print."""
    arguments, record = parser("Time what a save of 30 million parameters costs training.").parse_args(), hardware()
    found = {ranks: of_ranks(ranks, 29600 + os.getpid() % 500 * 2 + ranks) for ranks in (1, 2)}
    rows = [
        [f"{ranks} ranks, {kind}", *(f"{of[kind][f'median_{name}'] * 1e3:.0f}" for name in FIELDS)]
        for ranks, of in found.items()
        for kind in KINDS
    ]
    heads = ["save", "ms waited", "ms in all", "ms more of steps"]
    print(machine_line(record), "", table(heads, rows), "", sep="\n")
    claims = [
        must(f"waited for a save, share of a synchronous one, {ranks} ranks, {kind}", ratio, 0.1, at_least=False)
        for ranks, of in found.items()
        for kind, ratio in of["ratios"].items()
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
