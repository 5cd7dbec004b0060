"""In: every kind of model, precision, recompute and layout. Out: autograd keeps for backward what the plan declares.
Does not run a step itself: kept_ranks does, on torch's fake process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from kept_cases import QUICK, SLOW
from kept_ranks import plan_of

from codescent.cost.activations import bytes_by_chunk, deferred_by_chunk, most_bytes
from codescent.plan.activations import CPU


def check(forker: Forker, folder: Path, cases: dict[str, Any]) -> None:
    """What each rank keeps of a micro-batch, and of all in flight, is what its plan declares."""
    (found,) = forker.call("kept_ranks:on_fake_ranks", folder, cases=cases)
    wrong = {}
    for name, ranks in found.items():
        plan = plan_of(cases[name])
        for rank, kept in ranks.items():
            stage = plan.mesh.coordinates(int(rank))["pp"]
            declared = {
                "chunks": bytes_by_chunk(plan, stage, CPU, int(rank)),
                "waiting": deferred_by_chunk(plan, stage, CPU, int(rank)) if plan.deferred else [],
                "most": most_bytes(plan, stage, CPU, int(rank)),
            }
            if kept != declared:
                wrong[name, rank] = (kept, declared)
    assert not wrong


@pytest.mark.parametrize("part", range(8))
def test_a_rank_keeps_what_is_declared(forker: Forker, tmp_path: Path, part: int) -> None:
    check(forker, tmp_path, {name: make() for name, make in list(QUICK.items())[part::8]})


def check_part(forker: Forker, folder: Path, group: str, part: int, parts: int) -> None:
    """Every n-th case of a group."""
    check(forker, folder, dict(list(SLOW[group]().items())[part::parts]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_rank_keeps_what_is_declared_of_every_kind(forker: Forker, tmp_path: Path, part: int) -> None:
    check_part(forker, tmp_path, "kinds", part, 3)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_a_rank_keeps_what_is_declared_in_every_layout(forker: Forker, tmp_path: Path, part: int) -> None:
    check_part(forker, tmp_path, "layouts", part, 6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_rank_keeps_what_is_declared_of_one_sample(forker: Forker, tmp_path: Path, part: int) -> None:
    check_part(forker, tmp_path, "samples", part, 4)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["adapters", "methods", "large", "objectives", "preferences"])
def test_a_rank_keeps_what_is_declared_with(forker: Forker, tmp_path: Path, group: str) -> None:
    check_part(forker, tmp_path, group, 0, 1)
