"""In: layouts of up to eight ranks. Out: each rank makes the groups that NCCL needs it to make, in the same order.
Does not need NCCL: its rule is checked on what each rank asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forker import Forker
from nccl_graph import unlike

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"dp_replicate": 8},
    {"dp_shard": 8, "zero_stage": 2},
    {"dp_replicate": 2, "dp_shard": 4},
    {"tp": 4, "dp_replicate": 2},
    {"tp": 2, "sequence_parallel": True, "dp_shard": 2, "cp": 2},
    {"cp": 4, "context": "all-gather", "dp_replicate": 2},
    {"pp": 4},
    {"pp": 8},
    {"pp": 4, "tp": 2},
    {"pp": 2, "dp_replicate": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "zero_stage": 1, "cp": 2},
    {"pp": 4, "schedule": "zero-bubble", "dp_replicate": 2},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "dp_replicate": 2},
    {"servers": 1, "dp_replicate": 2},
    {"servers": 1, "dp_replicate": 2, "average_every": 5},
    {"servers": 2, "dp_replicate": 2, "average_every": 5, "updates": "asynchronous"},
    {"servers": "workers", "dp_replicate": 2, "average_every": 5},
    {"dp_replicate": 4, "average_every": 5},
    {"dp_replicate": 4, "gossip": "ring"},
)


def case(parallel: dict[str, Any]) -> dict[str, Any]:
    ranks = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        ranks *= parallel.get(axis, 1)
    servers = parallel.get("servers", 0)
    ranks += servers if servers != "workers" else 0
    sizes = {"num_layers": 8, "num_heads": 4, "hidden_dim": 16, "seq_len": 16}
    config = {
        "model": sizes,
        "train": {"precision": "fp32", "global_batch_size": 32, "microbatch_size": 2},
        "parallel": parallel,
    }
    return {"config": config, "world_size": ranks}


def test_all_ranks_make_their_groups_in_one_order(forker: Forker, tmp_path: Path) -> None:
    cases = {str(parallel): case(parallel) for parallel in LAYOUTS}
    (found,) = forker.call("group_ranks:made", tmp_path, cases=cases)
    for name, by_rank in found.items():
        assert unlike(by_rank) == [], name  # else ncclCommSplit hangs
    assert any(len(ranks) == 1 for made in found[str({"pp": 4, "tp": 2})] for ranks, _ in made)
    assert max(len(by_rank[0]) for by_rank in found.values()) >= 5
