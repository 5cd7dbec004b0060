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
    computed,
    is_large,
    is_never,
    layout_words,
    model_words,
    refusal,
    rows,
    write_corpora,
)

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 0.05}
"""Relative, of losses and gradient norms; bf16 is compared with fp32."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("trajectories")
    write_corpora(project)
    return Runs(project, forker, (), (f"train.microbatch_size={SAMPLES}",))


def walk(runs: Runs, row: Row) -> None:
    """One run on the layout, and one on one process, which is done once for all rows that it serves."""
    wide = row | {"precision": "fp32" if row["precision"] == "bf16" else row["precision"]}
    expected = runs.of_one(*model_words(wide))
    found = runs.run(LAYOUTS[row["layout"]], *model_words(row), *layout_words(row))
    assert len(losses(found)) == STEPS
    assert_same(found, expected, TOLERANCE[row["precision"]])
    assert losses(found) != losses(expected) or row["precision"] != "bf16"
    assert losses(expected)[-1] < losses(expected)[0]  # it learns: equality of runs that stand still proves nothing
    assert all(row["grad_norm"] > 0.1 for row in found.read_metrics())  # clipped


def named(table: list[Row]) -> list[ParameterSet]:
    return [pytest.param(row, id=" ".join(row.values())) for row in table]


@pytest.mark.parametrize("row", named(rows(slow=False)))
def test_every_layout_walks_the_trajectory_of_one_process(runs: Runs, row: Row) -> None:
    walk(runs, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", named(rows(slow=True)))
def test_large_layouts_walk_it_for_every_task(runs: Runs, row: Row) -> None:
    walk(runs, row)


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
