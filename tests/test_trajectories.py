"""In: the table of trajectory runs. Out: every layout has the losses of one process, for every task and precision.
Does not count bytes (test_declared does) and moves no checkpoint to another layout (test_checkpoint_layouts does)."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
import trajectories
from _pytest.mark import ParameterSet
from covering import Covering, Row, pairs_of
from forker import Forker, Runs
from runs import assert_same, losses
from trajectories import (
    FACTORS,
    LAYOUTS,
    SAMPLES,
    STEPS,
    TASKS,
    computed,
    is_large,
    is_never,
    layout_words,
    model_words,
    refusal,
    rows,
    write_corpora,
)

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.03}
"""Relative, of losses and gradient norms; bf16 is compared with fp32. Measured: 5e-16, 2e-7, 0.004 and norms 0.016."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("trajectories")
    write_corpora(project)
    return Runs(project, forker, (), (f"train.microbatch_size={SAMPLES}",))


def walk(runs: Runs, row: Row, ranks: int, *more: str) -> None:
    """One run on the layout, and one on one process, which is done once for all rows that it serves.

    Args:
        more: words that both runs have too.
    """
    wide = row | {"precision": "fp32" if row["precision"] == "bf16" else row["precision"]}
    expected = runs.of_one(*model_words(wide), *more)
    found = runs.run(ranks, *model_words(row), *more, *layout_words(row))
    assert len(losses(found)) == STEPS
    assert_same(found, expected, TOLERANCE[row["precision"]])
    assert losses(found) != losses(expected) or row["precision"] != "bf16"
    assert losses(expected)[-1] < losses(expected)[0]  # it learns: equality of runs that stand still proves nothing
    assert all(row["grad_norm"] > 0.1 for row in found.read_metrics())  # clipped


def named(table: list[Row]) -> list[ParameterSet]:
    return [pytest.param(row, id=" ".join(row.values())) for row in table]


@pytest.mark.parametrize("row", named(rows(slow=False)))
def test_every_layout_walks_the_trajectory_of_one_process(runs: Runs, row: Row) -> None:
    walk(runs, row, LAYOUTS[row["layout"]])


@pytest.mark.slow
@pytest.mark.parametrize("row", named(rows(slow=True)))
def test_large_layouts_walk_it_for_every_task(runs: Runs, row: Row) -> None:
    walk(runs, row, LAYOUTS[row["layout"]])


FIRST = ("model.norm=first", "model.activation=gelu", "model.embedding=untied")
TIED = ("model.embedding=tied", "model.causal=true")
LLAMA = ("model.kind=llama", "model.num_kv_heads=2", "model.hidden_dim=24")
RARE: list[tuple[str, str, int, str, str, tuple[str, ...]]] = [
    ("encoder-decoder", "pp=2 schedule=zero-bubble cut=encoder-decoder", 2, "full", "0.1", ()),
    ("encoder-decoder", "pp=2 schedule=interleaved virtual_stages=2 cut=encoder-decoder", 2, "none", "0.1", ()),
    ("encoder-decoder", "pp=2 dp_shard=2 zero_stage=2 cut=encoder-decoder", 4, "none", "0.1", ()),
    ("encoder-decoder", "dp_replicate=2 pp=2 tp=2 cut=encoder-decoder", 8, "none", "0.1", ()),
    ("encoder-decoder", "pp=4 cut=encoder-decoder", 4, "none", "0.1", FIRST),
    ("encoder-decoder", "tp=4", 4, "full", "0.1", FIRST),
    ("encoder-decoder", "dp_shard=2 tp=2", 4, "none", "0.1", FIRST),
    ("pairs", "pp=2", 2, "none", "0.1", TIED),
    ("pairs", "tp=2", 2, "none", "0.1", TIED),
    ("responses", "tp=2", 2, "none", "0", LLAMA),
]
"""Task, layout, ranks, recompute, dropout, words of the model: pairs of values that no factor of the table has."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "layout", "ranks", "recompute", "dropout", "model"),
    [pytest.param(*one, id=" ".join((one[0], one[1], *one[5]))) for one in RARE],
)
def test_rare_layouts_and_models_walk_it(
    runs: Runs, task: str, layout: str, ranks: int, recompute: str, dropout: str, model: tuple[str, ...]
) -> None:
    row = dict(zip(FACTORS, (task, layout, "fp64", recompute, dropout, "2"), strict=True))
    walk(runs, row, ranks, *model)


MUON_QUICK = [("llama", "dp_shard=2 tp=2", "fp64"), ("gpt2", "dp_replicate=2", "bf16")]
MUON_SLOW = [
    *(("gpt2", layout, "fp32") for layout in LAYOUTS if "encoder-decoder" not in layout),
    *(("llama", layout, "fp64") for layout in ("", "tp=4", "dp_shard=3", "pp=2 dp_shard=2", "cp=2 tp=2")),
    *((task, "dp_replicate=2 dp_shard=2", "fp64") for task in TASKS if task not in ("gpt2", "llama")),
    *(("encoder-decoder", layout, "bf16") for layout in ("dp_shard=2 tp=2", "pp=4 cut=encoder-decoder")),
    ("encoder-decoder", "dp_replicate=2 pp=2 tp=2", "fp64"),
    ("masked", "pp=2 tp=2", "fp64"),
    ("tensors", "tp=2 sequence_parallel=false", "fp64"),
]
MUON = [*MUON_QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in MUON_SLOW)]


@pytest.mark.parametrize(("task", "layout", "precision"), MUON)
def test_muon_walks_it(runs: Runs, task: str, layout: str, precision: str) -> None:
    row = dict(zip(FACTORS, (task, layout, precision, "none", "0", "2"), strict=True))
    walk(runs, row, LAYOUTS[layout], "optimizer.kind=muon", "optimizer.weight_decay=0.2")


@pytest.mark.parametrize("slow", [False, True])
def test_every_pair_is_in_the_table(slow: bool) -> None:
    there = set().union(*map(pairs_of, rows(slow=slow)))
    for one, other in combinations(FACTORS, 2):
        for pair in product(((one, value) for value in FACTORS[one]), ((other, value) for value in FACTORS[other])):
            assert pair in there or is_never(*pair) or (is_large(*pair) and not slow), pair


def test_the_table_is_what_its_program_writes(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    found = computed(tmp_path, slow=False)
    assert not found.never
    assert found.rows == rows(slow=False), "run python tests/trajectories.py"


@pytest.mark.slow
def test_the_planner_refuses_what_the_table_leaves_out(tmp_path: Path) -> None:
    write_corpora(tmp_path)
    for values in product(*FACTORS.values()):
        row = dict(zip(FACTORS, values))
        if any(is_never(*pair) for pair in combinations(row.items(), 2)):
            assert refusal(row, tmp_path) is not None, row


def test_a_program_that_cannot_write_the_table_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("old")
    with pytest.raises(SystemExit, match="2"):
        trajectories.main(["x"], table)
    refused = Covering([], {(("task", "gpt2"), ("dropout", "0"))})
    monkeypatch.setattr(trajectories, "computed", lambda *_, **__: refused)
    with pytest.raises(AssertionError, match="add them to NEVER"):
        trajectories.main([], table)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"table.csv": "old"}


MUP = ("model.mup_base_dim=10", "model.mup_base_head_dim=3")
MUP_QUICK = [("masked", "pp=2 tp=2", "fp64")]
MUP_SLOW = [
    *((task, "dp_shard=3", "fp64") for task in TASKS if task not in ("tensors", "gpt2", "responses")),
    *((task, "tp=2", "fp64") for task in ("encoder-decoder", "answers", "llama")),
    *((task, "pp=2", "fp64") for task in ("encoder-decoder", "masked", "llama")),
    ("llama", "cp=2", "fp64"),
    ("gpt2", "cp=4 context=all-gather", "fp64"),
    *((task, "dp_shard=2 tp=2", "bf16") for task in ("llama", "masked", "encoder-decoder")),
    ("llama", "cp=2 tp=2", "bf16"),
]


@pytest.mark.parametrize(
    ("task", "layout", "precision"), [*MUP_QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in MUP_SLOW)]
)
def test_mup_walks_it(runs: Runs, task: str, layout: str, precision: str) -> None:
    row = dict(zip(FACTORS, (task, layout, precision, "none", "0", "2"), strict=True))
    walk(runs, row, LAYOUTS[layout], *MUP)
