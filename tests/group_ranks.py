"""In: layouts. Out: the process groups that each rank makes, in order, with their names.
Does not assert anything (test_groups does). One process plays all ranks, on torch's fake process group."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from declared_ranks import plan_of
from rank_server import Place
from torch.testing._internal.distributed.fake_pg import FakeStore

from codescent.train.world import World

Made = list[tuple[list[int], str]]


def made(place: Place, cases: dict[str, Any]) -> dict[str, list[Made]]:
    """By case, for each rank: the ranks and the name of every group that it makes after the first, of all ranks."""
    whole, calls = dist.new_group, []

    def new_group(ranks: list[int], *arguments: Any, **options: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = whole(ranks, *arguments, **options)
        calls.append((list(ranks), group.group_name))
        return group

    dist.new_group = new_group
    found: dict[str, list[Made]] = {}
    for name, case in cases.items():
        plan, found[name] = plan_of(case), []
        for rank in range(case["world_size"]):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world_size"])
            world: Any = World.__new__(World)
            world.this_rank = SimpleNamespace(rank=rank, world_size=case["world_size"])
            world.timeout, world.groups = timedelta(seconds=60), {}
            world.living = tuple(range(case["world_size"]))
            world.divide(plan)
            found[name].append(list(calls))
            calls.clear()
            dist.destroy_process_group()
    return found
