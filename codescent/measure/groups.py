"""In: where the ranks are. Out: this rank's process group for each link.
Does not know who is where (placement.py does) and times nothing."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from codescent.measure.placement import RankPlacement


def make_groups(found: RankPlacement, rank: int, timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """This rank's process group for each link that ranks can measure. Collective."""
    world = dist.group.WORLD
    assert world is not None
    groups: dict[str, dist.ProcessGroup] = {}
    for link in found.links:
        members = found.members(link, rank)
        is_world = len(members) == len(found.hosts)
        groups[link] = world if is_world else dist.new_group(members, timeout, use_local_synchronization=True)
    return groups
