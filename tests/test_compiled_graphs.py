"""In: layouts x parallel.recompute, with train.compile = "blocks". Out: all of a block is compiled, and numbers stay.
Does not compile to machine code (test_models_compile does, slowly): it counts the graphs that Dynamo hands over."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from declared_cases import Case, case
from forker import Forker

RECOMPUTES = ("none", "selective", "products", "full")
LLAMA = {"kind": "llama", "num_layers": 2, "num_kv_heads": 2}
"""Beside GPT-2 the one kind whose compiled runs are verified: the others are refused."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2},
    "tp without sequence": {"tp": 2, "sequence_parallel": False},
    "cp ring": {"cp": 2},
    "cp all-gather": {"cp": 2, "context": "all-gather"},
    "pp": {"pp": 2, "microbatches": 2},
    "pp interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "microbatches": 2},
    "dp pp tp": {"dp_replicate": 2, "pp": 2, "tp": 2, "microbatches": 2},
    "dp_shard cp tp": {"dp_shard": 2, "cp": 2, "tp": 2},
}
ALIKE = ("zero2", "hsdp", "tp without sequence", "cp all-gather", "pp interleaved", "dp_shard cp tp")
"""Layouts whose blocks call what those of a quick one call."""
QUICK = {
    *(("one", what) for what in RECOMPUTES),
    ("tp", "products"),
    *((name, "full") for name in LAYOUTS if name not in ALIKE),
}
GRAPHS = {"cp ring": 6, "cp all-gather": 6, "dp_shard cp tp": 6}
"""Graphs of a layout's blocks. The others have one: all blocks are alike, and none breaks."""
BREAKS = {"split_attention": "messages leave in the same order on every rank, so Dynamo must not see inside"}
"""Functions that end a graph, with the reason. It is met four times: in itself, in its callers, and in the frame of
`never_compiled`, which has no graph."""


def cases_of(which: str) -> dict[str, Case]:
    """The quick cases, or the slow ones with a value of parallel.recompute."""
    wanted = [row for row in product(LAYOUTS, RECOMPUTES) if ("quick" if row in QUICK else row[1]) == which]
    wanted = [row for row in wanted if not refused(*row)]
    cases = {f"{name}, {what}": layout(name, what) for name, what in wanted}
    what = "full" if which == "quick" else which
    cases[f"llama, {what}"] = case("bf16", model=LLAMA, recompute=what)
    return {name: {**one, "config": compiled(one["config"])} for name, one in cases.items()}


def refused(name: str, recompute: str) -> bool:
    return "cp" in LAYOUTS[name] and recompute == "products"


def layout(name: str, recompute: str) -> Case:
    layers = 4 if "interleaved" in name else 2
    return case("bf16", **LAYOUTS[name], recompute=recompute, model={"num_layers": layers, "dropout": 0.1})


def compiled(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "train": {**config["train"], "compile": "blocks"}}


@pytest.mark.parametrize("which", ["quick", *(pytest.param(what, marks=pytest.mark.slow) for what in RECOMPUTES)])
def test_blocks_are_as_few_graphs_as_written_down(forker: Forker, tmp_path: Path, which: str) -> None:
    cases = cases_of(which)
    (found,) = forker.call("compiled_ranks:graphs", tmp_path, cases=cases)
    for name in cases:
        of_layout = name.partition(",")[0]
        assert found[name]["graphs"] == GRAPHS.get(of_layout, 1), (name, found[name])
        for reason, number in found[name]["breaks"].items():
            assert any(f"<function {function} at" in reason for function in BREAKS), (name, reason)
            assert number == 4, (name, reason)
        assert bool(found[name]["breaks"]) == (GRAPHS.get(of_layout, 1) == 6), name


NUMBERS = {name: LAYOUTS[name] for name in ("one", "ddp", "zero1", "zero3", "tp", "cp ring", "pp")}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        pytest.param(layout, recompute, marks=[] if (layout, recompute) == ("one", "full") else [pytest.mark.slow])
        for layout in NUMBERS
        for recompute in RECOMPUTES
        if not refused(layout, recompute)
    ],
)
def test_compiled_blocks_compute_the_same(forker: Forker, tmp_path: Path, layout: str, recompute: str) -> None:
    parallel = {key: value for key, value in NUMBERS[layout].items() if key != "microbatches"}
    ranks = 2 if parallel else 1
    config = {
        "model": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 8, "dropout": 0.1},
        "train": {"precision": "fp64", "global_batch_size": 4},
        "optimizer": {"kind": "sgd"},
        "parallel": parallel | {"recompute": recompute},
    }
    case = {"config": config, "world_size": ranks}
    for found in forker.call("compiled_ranks:step", tmp_path, ranks, case=case):
        assert found["none graphs"] == 0
        assert found["blocks graphs"] >= 1
        assert found["blocks"] == pytest.approx(found["none"], rel=1e-12)
        assert 0 <= found["difference"] < 1e-12
