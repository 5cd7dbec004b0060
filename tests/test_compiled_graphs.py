"""In: layouts x parallel.recompute, with train.compile = "blocks". Out: something is compiled, and numbers stay.
Does not compile to machine code (test_models_compile does, slowly): it counts the graphs that Dynamo hands over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forker import Forker

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero3": {"dp_shard": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
}
QUICK = {(layout, "full") for layout in ("one", "zero3", "tp", "cp")} | {("tp", "products")}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        pytest.param(layout, recompute, marks=[] if (layout, recompute) in QUICK else [pytest.mark.slow])
        for layout in LAYOUTS
        for recompute in ("none", "selective", "products", "full")
        if (layout, recompute) != ("cp", "products")  # refused
    ],
)
def test_compiled_blocks_are_compiled(forker: Forker, tmp_path: Path, layout: str, recompute: str) -> None:
    parallel = LAYOUTS[layout] | {"recompute": recompute}
    ranks = 2 if LAYOUTS[layout] else 1
    config = {
        "model": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 8, "dropout": 0.1},
        "train": {"precision": "fp64", "global_batch_size": 4},
        "optimizer": {"kind": "sgd"},
        "parallel": parallel,
    }
    case = {"config": config, "world_size": ranks}
    for found in forker.call("compiled_ranks:step", tmp_path, ranks, case=case):
        assert found["none graphs"] == 0
        assert found["blocks graphs"] >= 1
        assert found["blocks"] == pytest.approx(found["none"], rel=1e-12)
        assert 0 <= found["difference"] < 1e-12
