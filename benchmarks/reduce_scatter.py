"""In: numbers of ranks, links. Out: seconds of our reduce-scatter over gloo, gloo's own, ZeRO-1's sums, and DDP's.
Does not train. Hosts are namespaces (hosts.py); skips, saying so, where they cannot be made."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from hosts import DEVICE, Hosts, missing, rank_environment
from measure import ROOT, finish, hardware, machine_line, not_negative, parser, positive, say, table, write_json

sys.path.insert(0, str(ROOT))

from codescent.strategies import collectives

PORT = 29_410
IN_RANK = "REDUCE_SCATTER_NUMEL"
"""Environment variable of a rank: elements of the payload."""


def rank_of(numel: int, rounds: int) -> None:
    """One rank: each call in turns; a call takes as long as its slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, ranks = dist.group.WORLD, dist.get_world_size()
    part, whole = torch.empty(numel // ranks), torch.ones(numel // ranks * ranks)
    gathered, reduced = torch.empty_like(whole), whole.clone()

    def of_zero1() -> None:
        collectives.reduce_scatter_into(part, whole, group=group)
        collectives.all_gather_into(gathered, part, group=group)

    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: collectives.reduce_scatter_into(part, whole, group=group),
        "gloo's": lambda: collectives.torch_reduce_scatter(part, whole, group=group),
        "ours and all-gather": of_zero1,
        "all_reduce": lambda: dist.all_reduce(reduced),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            begin_s = time.monotonic()
            call()
            took = torch.tensor([time.monotonic() - begin_s])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                seconds[name].append(float(took))
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    os._exit(0)


def measured(ranks: int, mbit: float, numel: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call on hosts with links of `mbit` million bits a second; 0: no limit."""
    with Hosts(ranks) as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.shape(mbit or None)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE, IN_RANK: f"{numel} {rounds}"}
        logs = [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        started = []
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                variables = rank_environment(env, rank, ranks, PORT)
                program = [sys.executable, str(Path(__file__).resolve())]
                started.append(hosts.start(rank, program, variables, Path(__file__).parent, file))
        for process in started:
            process.wait()
        lines = [line for line in logs[0].read_text().splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit("a rank ended by an error")
    return cast(dict[str, list[float]], json.loads(lines[0]))


def main() -> int:
    """Print the table. Returns the exit code."""
    parsed = parser(__doc__.splitlines()[0])
    parsed.add_argument("--ranks", nargs="+", type=positive, default=[2, 4], metavar="N", help="a rank on each host")
    parsed.add_argument("--rates", nargs="+", type=not_negative, default=[0.0, 4.0], metavar="MBIT", help="0: no limit")
    parsed.add_argument("--numel", type=positive, default=500_000, help="elements of the payload in fp32")
    parsed.add_argument("--rounds", type=positive, default=5, help="after one for warming up")
    arguments = parsed.parse_args()
    if why := missing():
        say(f"skipped: {why}")
        return 0
    record, rows = hardware(), list[dict[str, Any]]()
    for ranks in arguments.ranks:
        for mbit in arguments.rates:
            numel = arguments.numel if mbit else 4 * arguments.numel
            seconds = measured(ranks, mbit, numel, arguments.rounds if mbit else 5 * arguments.rounds)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            rows.append({"ranks": ranks, "mbit": mbit, "numel": numel, "seconds": seconds, "median_s": medians})
    print(machine_line(record))
    names = list(rows[0]["median_s"])
    cells = [
        [f"{row['ranks']}", f"{row['mbit']:g}", *(f"{1e3 * row['median_s'][n]:.1f}" for n in names)] for row in rows
    ]
    print(table(("ranks", "Mbit/s", *(f"{name}, ms" for name in names)), cells))
    write_json(arguments.json, {"benchmark": "reduce_scatter", "hardware": record, "rows": rows})
    return 0


if __name__ == "__main__":
    if given := os.environ.get(IN_RANK):
        rank_of(*map(int, given.split()))
    finish(main)
