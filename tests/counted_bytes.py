"""In: ranks in a network namespace, or a rank on a host. Out: JSON: bytes that leave the device of each collective, and
of a step of each layout beside what its plan says. Does not assert anything: test_counted_bytes does."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from declared_cases import Case, case
from declared_ranks import plan_of, trainer_of

from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.cost.arithmetic import arithmetic
from codescent.cost.ranks_walk import walk
from codescent.plan import Plan
from codescent.strategies import collectives

NUMEL = 3 * 2**18
"""Elements of a payload in fp32: 3 MiB, which 2, 3 and 4 divide."""
TRIES = 4
MODEL = {"hidden_dim": 256, "num_heads": 4, "num_layers": 2, "seq_len": 256}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 4, "zero_stage": 1},
    "zero1 of 2": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 4, "zero_stage": 2, "microbatches": 2},
    "zero3": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp with sequence_parallel": {"tp": 4},
    "tp": {"tp": 4, "sequence_parallel": False},
    "cp all-gather": {"cp": 4, "context": "all-gather"},
    "cp ring": {"cp": 4},
    "pp": {"pp": 2, "microbatches": 2},
}


def layouts(ranks: int) -> dict[str, Case]:
    """The layouts of so many ranks."""
    cases = {name: case(**{"model": MODEL, **one}) for name, one in LAYOUTS.items()}
    return {name: one for name, one in cases.items() if one["world_size"] == ranks}


def sends(ranks: int) -> dict[str, Callable[[], object]]:
    """What the strategies send by, each with a payload of NUMEL elements."""
    whole, part, group = torch.ones(NUMEL), torch.ones(NUMEL // ranks), dist.group.WORLD
    rank, gathered = dist.get_rank(), torch.empty(NUMEL)
    to_first = [part.numel() * 2 if peer == 0 else part.numel() for peer in range(ranks)]
    received = torch.empty(ranks * to_first[rank])
    uneven = torch.ones(sum(to_first))
    return {
        "all_reduce": lambda: collectives.all_reduce(whole, group=group),
        "reduce_scatter": lambda: collectives.reduce_scatter_into(part, whole, group=group),
        "started reduce_scatter": lambda: collectives.start_reduce_scatter(part, whole, group=group).wait(),
        "all_gather": lambda: collectives.all_gather_into(gathered, part, group=group),
        "all_to_all": lambda: collectives.all_to_all(gathered, whole, group=group),
        "uneven all_to_all": lambda: collectives.all_to_all(
            received, uneven, [to_first[rank]] * ranks, to_first, group=group
        ),
        "broadcast": lambda: collectives.broadcast(whole, 0, group=group),
        "send": lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0) if rank == 1 else None,
    }


def counted(act: Callable[[], object], device: str = "lo") -> int:
    """Bytes that a network device sends while all ranks act, with headers: the least of TRIES. TCP may send some again.

    Connections are made by a first time that is not counted.
    """
    act()
    found = []
    for _ in range(TRIES):
        dist.barrier()
        time.sleep(0.05)
        before = sent_by(device)
        dist.barrier()
        act()
        dist.barrier()
        time.sleep(0.05)
        found.append(sent_by(device) - before)
    return min(found)


def sent_by(device: str) -> int:
    (line,) = (one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith(f"{device}:"))
    return int(line.partition(":")[2].split()[8])


def rank_of(rank: int, ranks: int, store: Path, device: str = "lo", ranks_per_host: int = 1) -> dict[str, Any]:
    """What one rank counts. On a device of a host: beside each layout what the simulated cards of hosts send."""
    os.environ["GLOO_SOCKET_IFNAME"] = device
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found: dict[str, Any] = {name: counted(act, device) for name, act in sends(ranks).items()}
    for name, one in layouts(ranks).items():
        plan = plan_of(one)
        trainer = trainer_of(one, plan, rank)
        steps = itertools.count()
        sent = counted(lambda: trainer.executor.step(next(steps), 1e-3), device)  # noqa: B023 - called in this turn
        found[name] = [sent, said(plan, ranks_per_host)]
        trainer.close()
    return found


def said(plan: Plan, ranks_per_host: int) -> float:
    """Bytes of a step by the plan: of all ranks, or of those that share the first host's card, as simulated."""
    if ranks_per_host == 1:
        return sum(plan.sent_bytes(rank, 1) for rank in range(plan.world_size))
    flights = walk(plan, arithmetic(plan, 1.0), of_links(Link(1.0), devices=ranks_per_host), warm_up=0).flights
    return sum(one.end_s - one.start_s for one in flights if one.stage < ranks_per_host)


def write(found: dict[str, Any], folder: Path) -> None:
    """The first rank's answer."""
    (folder / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()


def main() -> None:
    """Fork the ranks, and print what the first one counted. With a rank, a device and a number: that rank of a host."""
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3:]:
        rank, device, ranks_per_host = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
        found = rank_of(rank, ranks, folder / "store", device, ranks_per_host)
        if rank == 0:
            write(found, folder)
        return
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    children = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            found = rank_of(rank, ranks, folder / "store")
            if rank == 0:
                write(found, folder)
            os._exit(0)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    main()
